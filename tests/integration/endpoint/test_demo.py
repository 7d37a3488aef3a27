"""The demo by an agent that imports only `openai`: its samples are those of the native agent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM

from asyncrl.api import GenerationRequest, GenerationResult, Sample
from asyncrl.comm.http_client import JsonHttp
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.data.prompt_queue import PromptRef
from asyncrl.inference.client import GenerateItem, GenerationServerClient, derive_seed
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.server import serve
from asyncrl.rollout.episode import run_group
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code_pool.call_records import UserCodeError

EXPERIMENTS = Path(__file__).parents[3] / "experiments"
GROUP = 4
AGENTS = """
import openai


async def native(prompt, env, client):
    reply = await client.chat([{"role": "user", "content": prompt.data["prompt"]}])
    await env.reset(options={"data": prompt.data})
    return float((await env.step(reply.content))[1])


def blocking(prompt, base_url, api_key, *, stream):
    "A plain function, with the client that blocks."
    with openai.OpenAI(base_url=base_url, api_key=api_key) as policy:
        messages = [{"role": "user", "content": prompt.data["prompt"]}]
        if not stream:
            return policy.chat.completions.create(model="policy", messages=messages).choices[0].message.content
        chunks = policy.chat.completions.create(model="policy", messages=messages, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def swallows(prompt, base_url, api_key):
    try:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as policy:
            await policy.responses.create(model="policy", input=prompt.data["prompt"])
    except openai.APIError:
        return 0.0
    return 1.0


async def leaves_open(prompt, base_url, api_key):
    policy = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    await policy.responses.create(model="policy", input=prompt.data["prompt"])
    raise RuntimeError("crashed")


def two(prompt, policy):
    return 0.0


def rejects(prompt, base_url, api_key):
    return None


def wrong(prompt, base_url, api_key):
    return ["4"]
"""


class EnginePolicy:
    """The embedded engine, asked as a RolloutWorker does."""

    def __init__(self, server: GenerationServerClient) -> None:
        self._server = server
        self.error: Exception | None = None

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if self.error is not None:
            raise self.error
        sampling = request.sampling
        assert sampling.seed is not None
        ids, most = list(request.input_ids), sampling.max_new_tokens
        items = [
            GenerateItem(f"{request.request_id}/{i}", ids, most, derive_seed(sampling.seed, i), 0)
            for i in range(request.n)
        ]
        completions = await self._server.generate(items, sampling, timeout_s=60.0)
        return GenerationResult(request.request_id, tuple(completions))


@pytest_asyncio.fixture
async def policy(tiny_model: Path) -> AsyncIterator[EnginePolicy]:
    model = AutoModelForCausalLM.from_pretrained(str(tiny_model)).eval()
    engine = GenerationEngine(model, max_running_requests=1)  # what is batched together changes the last bits
    engine.start()
    server, http = await serve(engine, token="secret"), JsonHttp(None, key="secret")
    yield EnginePolicy(GenerationServerClient(http, server.url))
    await http.close()
    await server.close()
    engine.close()


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    file = tmp_path / "my_agents.py"
    file.write_text(AGENTS)
    return file


def components_of(model: Path, path: str, **args: Any) -> UserComponents:
    config = ExperimentConfig()
    config.model.path, config.group_size = str(model), GROUP
    config.rollout.sampling.max_new_tokens = 24
    config.dataset.chat_template = str(EXPERIMENTS / "openai_agent.jinja")
    config.reward.path = "asyncrl.plugins.rewards.arithmetic:arithmetic_reward"
    config.agent.path, config.agent.args = path, args
    return UserComponents(config)


def over_http(model: Path, run: str, **args: Any) -> UserComponents:
    return components_of(model, "asyncrl.plugins.agents.openai_agent:OpenAIAgent", run=run, args=args)


async def samples(components: UserComponents, policy: EnginePolicy, prompts: int) -> list[Sample]:
    made = []
    try:
        async with components.runner:
            for row in range(prompts):
                prompt = components.prompts.train(PromptRef(f"0-{row}", row, row))
                group, _ = await run_group(
                    components.agent, components.environments.one, prompt, policy, components.conversations.client
                )
                made += group
        assert len(components.conversations.endpoint) == 0, "every session is closed with its episode"
    finally:
        await components.conversations.close()
    return made


def assert_equal(found: Sequence[Sample], expected: Sequence[Sample]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        for name in ("tokens", "loss_mask", "versions"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        # samples that share a row of the engine, as they do where they come together, differ in the last bit
        np.testing.assert_allclose(one.behave_logprobs, other.behave_logprobs, rtol=0, atol=1e-6)
        assert (one.reward, one.truncated, one.episode) == (other.reward, other.truncated, other.episode)


async def test_the_demos_samples_are_the_native_agents(policy: EnginePolicy, tiny_model: Path, agents: Path) -> None:
    expected = await samples(components_of(tiny_model, f"{agents}:native"), policy, 6)
    assert len(expected) == 6 * GROUP
    assert len({sample.tokens.tobytes() for sample in expected}) > 6, "members of a group draw numbers of their own"
    assert all((sample.behave_logprobs[sample.loss_mask == 1] < 0).all() for sample in expected)
    demo = f"{EXPERIMENTS / 'openai_agent.py'}:run"
    assert_equal(await samples(over_http(tiny_model, demo), policy, 6), expected)
    for stream in (False, True):
        found = await samples(over_http(tiny_model, f"{agents}:blocking", stream=stream), policy, 2)
        assert_equal(found, expected[: 2 * GROUP])


async def test_a_policy_that_fails_fails_the_rollout_whatever_the_agent_makes_of_it(
    policy: EnginePolicy, tiny_model: Path, agents: Path
) -> None:
    policy.error = ConnectionError("no server left")
    with pytest.raises(ConnectionError, match="no server left"):
        await samples(over_http(tiny_model, f"{agents}:swallows"), policy, 1)


async def test_sessions_that_a_crashed_agent_left_open_are_closed(
    policy: EnginePolicy, tiny_model: Path, agents: Path
) -> None:
    components = over_http(tiny_model, f"{agents}:leaves_open")
    with pytest.raises(RuntimeError, match="crashed"):
        await samples(components, policy, 1)
    assert len(components.conversations.endpoint) == 0


async def test_an_episode_may_be_rejected_and_must_be_worth_a_number(
    policy: EnginePolicy, tiny_model: Path, agents: Path
) -> None:
    assert await samples(over_http(tiny_model, f"{agents}:rejects"), policy, 1) == []
    with pytest.raises((TypeError, UserCodeError), match="return its reward"):
        await samples(over_http(tiny_model, f"{agents}:wrong"), policy, 1)


def test_a_function_of_another_form_is_refused_at_the_start(tiny_model: Path, agents: Path) -> None:
    for run, why in ((f"{agents}:two", "base_url"), (f"{agents}:nothing", "nothing"), ("no_such:run", "no_such")):
        with pytest.raises(ValueError, match=why):
            over_http(tiny_model, run)
