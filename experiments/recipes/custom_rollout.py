"""A custom episode as a function: up to `looks` answers from scratch, the first right one ends it."""

from __future__ import annotations

from asyncrl.api import ChatClient, Environment, GenerationRequest, Prompt, Tokenizer, answer_text


async def run(
    prompt: Prompt, env: Environment, client: ChatClient, *, tokenizer: Tokenizer, looks: int = 2, price: float = 0.2
) -> float:
    """The reward of all answers of the episode: 1 where one was right, less `price` for each look beyond the first.

    Each answer begins at the prompt, and so is a sample of its own: an episode gives one to `looks` samples.
    """
    reward = 0.0
    for number in range(looks):
        name = f"{prompt.prompt_id}/{prompt.member}/{number}"
        request = GenerationRequest(name, prompt.input_ids, 1, prompt.sampling, prompt.pictures)
        (answer,) = (await client.generate(request)).completions
        await env.reset(options={"data": prompt.data})
        _, reward, *_ = await env.step(answer_text(tokenizer, prompt.input_ids, answer.token_ids))
        if reward == 1.0:
            return reward - price * number
    return reward
