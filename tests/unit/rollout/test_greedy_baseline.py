"""ReMax's baseline: a greedy episode beside each group that is played for training, and who cannot have one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.api import Completion, GenerationRequest, GenerationResult, SamplingParams
from asyncrl.api.generation import FinishReason
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.data.prompt_queue import PromptRef
from asyncrl.rollout.episode import RetryLimits
from asyncrl.rollout.user_code.components import UserComponents

CODE = """
from dataclasses import replace

from asyncrl.api import Agent, GenerationRequest


def length(data, completion):
    return float(len(completion))


def of_a_group(group):
    return [1.0 for _ in group]


async def twice(prompt, env, client):
    "Two answers, the second with a temperature of its own."
    for number, temperature in enumerate((1.0, 0.3)):
        sampling = replace(prompt.sampling, temperature=temperature)
        await client.generate(GenerationRequest(str(number), prompt.input_ids, 1, sampling))
    return [replace(sample, reward=float(len(sample.tokens))) for sample in client.samples()]


async def silent(prompt, env, client):
    return None


class Together(Agent):
    def __init__(self, tokenizer): ...

    async def run_group(self, prompt, make_env, client): ...
"""
GROUP = 3


class Policy:
    """Greedy answers have one token, others as many as their temperature's first decimal; it keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[SamplingParams] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.asked.append(request.sampling)
        ids = [5] * (1 if request.sampling.temperature == 0.0 else round(10 * request.sampling.temperature))
        done = Completion(ids, [-1.0] * len(ids), [0] * len(ids), FinishReason.stop)
        return GenerationResult(request.request_id, [done] * request.n)


@pytest.fixture
def configured(tmp_path: Path, tiny_model: Path) -> Callable[..., ExperimentConfig]:
    (tmp_path / "code.py").write_text(CODE)

    def make(agent: str | None = None, reward: str = "length", advantage: str = "remax") -> ExperimentConfig:
        config = ExperimentConfig(group_size=GROUP)
        config.model.path, config.algorithm.advantage.name = str(tiny_model), advantage
        config.reward.path = f"{tmp_path / 'code.py'}:{reward}"
        if agent is not None:
            config.agent.path = f"{tmp_path / 'code.py'}:{agent}"
        return config

    return make


async def played(components: UserComponents, policy: Policy) -> tuple[int, dict[str, float]]:
    async with components.runner:
        prompt = components.prompts.train(PromptRef("p", 0, 0))
        samples, counted = await components.play_to_train(prompt, policy, RetryLimits())
    return len(samples), counted


async def test_a_greedy_answer_is_rewarded_and_not_trained(configured: Callable[..., ExperimentConfig]) -> None:
    components, policy = UserComponents(configured()), Policy()
    samples, counted = await played(components, policy)
    greedy = [asked for asked in policy.asked if asked.temperature == 0.0]
    assert samples == GROUP
    assert len(greedy) == 1
    assert counted["agent/greedy_reward"] == len(components.tokenizer.decode([5]))


async def test_an_agent_that_chooses_how_it_samples_is_greedy_in_every_call(
    configured: Callable[..., ExperimentConfig],
) -> None:
    policy = Policy()
    samples, counted = await played(UserComponents(configured("twice")), policy)
    assert samples == 2 * GROUP
    assert sorted(asked.temperature for asked in policy.asked) == [0.0] * 2 + [0.3] * GROUP + [1.0] * GROUP
    prompt = UserComponents(configured()).prompts.train(PromptRef("p", 0, 0))
    assert counted["agent/greedy_reward"] == len(prompt.input_ids) + 1, "the mean over the episode's samples"


async def test_a_prompt_that_the_agent_rejects_has_no_baseline(configured: Callable[..., ExperimentConfig]) -> None:
    samples, counted = await played(UserComponents(configured("silent")), Policy())
    assert samples == 0
    assert "agent/greedy_reward" not in counted


async def test_other_advantages_and_evaluation_play_no_greedy_answer(
    configured: Callable[..., ExperimentConfig],
) -> None:
    policy = Policy()
    assert "agent/greedy_reward" not in (await played(UserComponents(configured(advantage="grpo")), policy))[1]
    components = UserComponents(configured())
    async with components.runner:
        await components.agent_setup.play(components.prompts.train(PromptRef("p", 0, 0)), policy)
    assert all(asked.temperature == 1.0 for asked in policy.asked)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"agent": "Together"}, "the agent plays its group at once"),
        ({"reward": "of_a_group"}, "a reward compares the answers of a group"),
    ],
)
def test_where_one_greedy_episode_has_no_comparable_reward_remax_is_refused(
    configured: Callable[..., ExperimentConfig], given: dict[str, str], why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^algorithm\.advantage\.name=remax: .*{why}"):
        UserComponents(configured(**given))
    UserComponents(configured(advantage="grpo", **given))
    UserComponents(configured(**given), training=False)
