"""Your agent: it plays an episode of a prompt. This one asks the policy once, and the environment scores the answer."""

from asyncrl.api import ChatClient, Environment, GenerationRequest, Prompt, Tokenizer, answer_text


async def run(prompt: Prompt, env: Environment, client: ChatClient, *, tokenizer: Tokenizer) -> float:
    """Return the reward of the episode. You may ask the policy any number of times; each answer is trained."""
    name = f"{prompt.prompt_id}/{prompt.member}"
    request = GenerationRequest(name, prompt.input_ids, 1, prompt.sampling, prompt.pictures)
    (answer,) = (await client.generate(request)).completions
    await env.reset(options={"data": prompt.data})
    text = answer_text(tokenizer, prompt.input_ids, answer.token_ids)
    _, reward, *_ = await env.step(text)  # calls your reward
    return float(reward)
