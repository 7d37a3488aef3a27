"""Your agent: what an episode does with a prompt. This one asks the policy once and has the environment judge."""

from asyncrl.api import ChatClient, Environment, GenerationRequest, Prompt, Tokenizer


async def run(prompt: Prompt, env: Environment, client: ChatClient, *, tokenizer: Tokenizer) -> float:
    """The reward of the episode; ask the policy as often as you like, each answer is trained."""
    name = f"{prompt.prompt_id}/{prompt.member}"
    request = GenerationRequest(name, prompt.input_ids, 1, prompt.sampling, prompt.pictures)
    (answer,) = (await client.generate(request)).completions
    await env.reset(options={"data": prompt.data})
    _, reward, *_ = await env.step(tokenizer.decode(answer.token_ids))  # calls your reward
    return float(reward)
