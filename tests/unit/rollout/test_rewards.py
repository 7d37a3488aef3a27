"""Rewards by name and weight; users' agents and environments in either form, as a worker makes them."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.api import (
    Agent,
    Completion,
    Episode,
    GenerationRequest,
    GenerationResult,
    Prompt,
    RunIn,
    Sample,
    SamplingParams,
)
from asyncrl.api.picture import Picture
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.data.tokenizers import CharTokenizer
from asyncrl.plugins.settings import EnvConfig, NamedRewardConfig
from asyncrl.rollout.checks import check, code_problems
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code.rewards_of_groups import episode_of
from asyncrl.rollout.user_code_pool.call_records import UserCodeError, metered
from asyncrl.rollout.user_code_pool.child import USE, ChildCall
from asyncrl.rollout.user_code_pool.process_pool import PoolProcess

TOKENIZER = CharTokenizer()
LIMIT_S = 150.0
MINE = """
import asyncio
import os
import threading
import time
from dataclasses import replace

import numpy
from asyncrl.api.trajectory import with_turn_rewards
from asyncrl.plugins.agents.sample_builder import SampleBuilder
from asyncrl.plugins.agents.single_turn import SingleTurnAgent
from asyncrl.api import Agent, Environment, GenerationRequest, run_in
from asyncrl.plugins.envs.single_turn import SingleTurnEnv

home = []


def twos(data, completion, *, each=1.0):
    return each * completion.count("2")


async def later(data, completion):
    await asyncio.sleep(0)
    return 10.0


@run_in("process")
def in_process(episode):
    return 100.0 * len(episode.turns) + 1000.0 * episode.generated_tokens


class Ranks:
    def __init__(self, *, step=0.5):
        self.step = step

    def __call__(self, group):
        order = sorted(group, key=lambda episode: episode.reward)
        return [self.step * order.index(episode) for episode in group]


def too_few(group):
    return [1.0]


def raises(data, completion):
    raise ValueError("no such row")


def nothing(data, completion):
    return None


class PlainEnv(Environment):
    def __init__(self, *, reward):
        home.append(threading.get_ident())
        self._reward = reward

    def reset(self, *, seed=None, options=None):
        home.append(threading.get_ident())
        self._data = options["data"]
        return "", {}

    def step(self, action):
        home.append(threading.get_ident())
        return "", self._reward(self._data, action), True, False, {}

    def close(self):
        home.append(threading.get_ident())


class OddEnv(Environment):
    def __init__(self, *, reward, kind):
        self._returns = {
            "four": ("", 1.0, True, {}),
            "text": ("", "1.0", True, False, {}),
            "none": ("", None, True, False, {}),
            "nan": ("", float("nan"), True, False, {}),
            "numpy": ("", numpy.array([0.5], numpy.float32), numpy.bool_(True), False, {}),
            "reset": ("", 1.0, True, False, {}),
        }[kind]
        self._begins = "" if kind == "reset" else ("", {})

    def reset(self, *, seed=None, options=None):
        return self._begins

    def step(self, action):
        return self._returns


def other_source(data, completion):
    return None


def with_extras(data, completion):
    return {"score": numpy.float32(1), "torch_like": numpy.array(0.25), "numpy": numpy.int64(3), "text": "x"}


def group_none(group):
    return [None, 1.0, None]


def picky(episode):
    if episode.completion == "12":
        raise ValueError("cannot read this")
    return 0


class AwaitingEnv(SingleTurnEnv):
    async def step(self, action):
        home.append(threading.get_ident())
        return "", await self._reward(self._data, action), True, False, {}


class ForgetfulEnv(SingleTurnEnv):
    async def step(self, action):
        return "", float(self._reward(self._data, action)), True, False, {}


class BrokenEnv(SingleTurnEnv):
    def step(self, action):
        raise OSError("no connection")


class PlainAgent(Agent):
    def __init__(self, *, tokenizer):
        self.tokenizer = tokenizer

    def run(self, prompt, env, client):
        home.append(threading.get_ident())
        result = client.generate(GenerationRequest(f"r{prompt.member}", prompt.input_ids, 1, prompt.sampling))
        (completion,) = result.completions
        env.reset(options={"data": prompt.data})
        _, reward, *_ = env.step(self.tokenizer.decode(completion.token_ids))
        builder = SampleBuilder(prompt.input_ids)
        builder.generate(completion)
        return builder.build(reward, truncated=False)


class PlainGroup(PlainAgent):
    def run_group(self, prompt, make_env, client):
        return [super(PlainGroup, self).run(own, make_env(), client.episode(own))
                for own in map(prompt.of_member, range(prompt.group_size))]


class OwnAgent(SingleTurnAgent):
    async def run_group(self, prompt, make_env, client):
        home.append(threading.get_ident())
        return await super().run_group(prompt, make_env, client)


class OwnEpisode(SingleTurnAgent):
    async def run(self, prompt, env, client):
        home.append(threading.get_ident())
        return await super().run(prompt, env, client)


def plain_function(prompt, env, client, *, tokenizer, least=0):
    home.append(threading.get_ident())
    env.reset(options={"data": prompt.data})
    request = GenerationRequest(f"r{prompt.member}", prompt.input_ids, 1, prompt.sampling)
    (completion,) = client.generate(request).completions
    return max(least, env.step(tokenizer.decode(completion.token_ids))[1])


async def function(prompt, env, client, tokenizer):
    home.append(threading.get_ident())
    await env.reset(options={"data": prompt.data})
    request = GenerationRequest(f"r{prompt.member}", prompt.input_ids, 1, prompt.sampling)
    (completion,) = (await client.generate(request)).completions
    return (await env.step(tokenizer.decode(completion.token_ids)))[1]


class Recorded(PlainAgent):
    def run(self, prompt, env, client):
        env.reset(options={"data": prompt.data})
        request = GenerationRequest(f"r{prompt.member}", prompt.input_ids, 1, prompt.sampling)
        (completion,) = client.generate(request).completions
        reward = env.step(self.tokenizer.decode(completion.token_ids))[1]
        (sample,) = with_turn_rewards(client.samples(reward - 1), [1.0])
        sample = replace(sample, reward_parts={"own": 2.0}, metrics={"pid": float(os.getpid())})
        return replace(sample, token_rewards=sample.token_rewards * 0, reward=reward)


def with_tools(prompt, env, client, tools):
    return None


def hostile_agent(prompt, env, client, *, tokenizer, deed):
    env.reset(options={"data": prompt.data})
    request = GenerationRequest(f"r{prompt.member}", prompt.input_ids, 1, prompt.sampling)
    (completion,) = client.generate(request).completions
    reward = env.step(tokenizer.decode(completion.token_ids))[1]
    if prompt.member == 1:
        print("x" * 10_000_000)
        match deed:
            case "exits": os._exit(3)
            case "raises": raise ValueError("no such move")
            case "wants_10_gb": bytearray(10 << 30)
            case "breaks_unicode": return [replace(client.samples(1.0)[0], metrics={chr(0xD800): 1.0})]
            case "returns_text": return "a text"
            case "asks_for_more": client.close()
            case "hangs": time.sleep(1000)
            case "forks":
                for _ in range(20):
                    if os.fork() == 0:
                        time.sleep(1000)
                time.sleep(1000)
    return reward


async def two_arguments(prompt, env):
    return None


class PlainQueues(Agent):
    def __init__(self, *, tokenizer):
        pass

    def collect_trajectory(self, prompt, env, obs_queue, act_queue):
        return []
"""


class Policy:
    """Answers `1222`, `12`, `122` on the loop it was made for."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        assert asyncio.get_running_loop() is self._loop
        texts = ("1222", "12", "122")[: request.n]
        if request.request_id.startswith(("r", "p/")):  # an episode's own
            texts = (("1222", "12", "122")[int(request.request_id[-1])],)
        ids = [TOKENIZER.encode(text) for text in texts]
        return GenerationResult(
            request.request_id,
            tuple(Completion(each, [-0.5] * len(each), [0] * len(each), "stop") for each in ids),
        )


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> ExperimentConfig:
    (tmp_path / "mine.py").write_text(MINE)
    made = ExperimentConfig()
    made.model.path = str(tiny_model)
    made.reward.path = f"{tmp_path / 'mine.py'}:twos"
    return made


def part(config: ExperimentConfig, name: str, weight: float = 1.0, **others: Any) -> NamedRewardConfig:
    path = config.reward.path.replace(":twos", f":{name}")
    return NamedRewardConfig(path=path, name=name, weight=weight, **others)


def called_in() -> list[int]:
    """The threads in which the user's module was called last."""
    modules = [module for name, module in sys.modules.items() if name.startswith("asyncrl_plugin_mine")]
    found: list[int] = modules[-1].home
    return found


async def roll_out(config: ExperimentConfig, size: int = 3) -> tuple[Sequence[Sample], dict[str, float], list[int]]:
    components = UserComponents(config)
    prompt = Prompt("p", 0, {"prompt": "1"}, tuple(TOKENIZER.encode("1")), size, SamplingParams())
    async with components.runner, asyncio.timeout(LIMIT_S):
        with metered() as meter:
            samples, counted = await components.agent_setup.play(prompt, Policy())
    return samples, meter.metrics() | counted, called_in()


async def test_several_rewards_are_weighted_summed_and_reported_by_name(config: ExperimentConfig) -> None:
    config.rewards = [
        part(config, "twos", 0.5, args={"each": 2.0}),
        part(config, "later", 0.1),
        part(config, "in_process", 0.001),
        part(config, "Ranks", -1.0, args={"step": 0.25}),
    ]
    config.reward = ExperimentConfig().reward
    assert list(check(config)) == []
    samples, metrics, _ = await roll_out(config)
    # twos + later, then 0.1 for the one turn, 1 a token, and -0.25 a rank by what the environment gave
    expected = [3 + 1 + 0.1 + 4 - 0.5, 1 + 1 + 0.1 + 2, 2 + 1 + 0.1 + 3 - 0.25]
    assert [sample.reward for sample in samples] == pytest.approx(expected)
    assert samples[0].reward_parts == pytest.approx({"twos": 6.0, "later": 10.0, "in_process": 4100.0, "Ranks": 0.5})
    assert samples[1].reward_parts["twos"] == 2.0, "each sample has its own"
    assert metrics["reward/twos"] == 4.0
    assert metrics["reward/later"] == 10.0
    assert metrics["reward/in_process"] == 3100.0
    assert metrics["reward/Ranks"] == pytest.approx(0.25)
    assert metrics["rollout/reward_s"] > 0.0


@pytest.mark.parametrize("env", ["PlainEnv", "AwaitingEnv"])
@pytest.mark.parametrize(
    "agent", ["PlainAgent", "PlainGroup", "OwnAgent", "OwnEpisode", "plain_function", "function", ""]
)
async def test_agents_and_environments_in_either_form_get_the_same_rewards_off_the_loop(
    config: ExperimentConfig, agent: str, env: str
) -> None:
    config.env.path = config.reward.path.replace(":twos", f":{env}")
    if agent:
        config.agent.path = config.reward.path.replace(":twos", f":{agent}")
    samples, metrics, homes = await roll_out(config)
    assert [(sample.reward, sample.episode) for sample in samples] == [(3.0, 0), (1.0, 1), (2.0, 2)]
    assert homes
    assert threading.get_ident() not in homes
    assert metrics["rollout/env_s"] >= metrics["rollout/reward_s"] > 0.0


@pytest.mark.parametrize("env", ["PlainEnv", "AwaitingEnv"])
@pytest.mark.parametrize("agent", ["PlainAgent", "function", ""])
async def test_environments_in_processes_give_the_same_rewards(config: ExperimentConfig, agent: str, env: str) -> None:
    config.env.path, config.env.run_in = config.reward.path.replace(":twos", f":{env}"), RunIn.process
    if agent:
        config.agent.path = config.reward.path.replace(":twos", f":{agent}")
    assert list(check(config)) == []
    samples, metrics, homes = await roll_out(config)
    assert [(sample.reward, sample.episode) for sample in samples] == [(3.0, 0), (1.0, 1), (2.0, 2)]
    assert bool(homes) == bool(agent), "the environment's own is in another process"
    assert metrics["rollout/env_s"] >= metrics["rollout/reward_s"] > 0.0


@pytest.mark.parametrize("agent", ["PlainAgent", "plain_function", "Recorded"])
async def test_agents_in_processes_ask_the_worker_and_give_the_same(config: ExperimentConfig, agent: str) -> None:
    config.agent.path, config.agent.run_in = config.reward.path.replace(":twos", f":{agent}"), RunIn.process
    config.env.path = config.reward.path.replace(":twos", ":PlainEnv")
    assert list(check(config)) == []
    samples, metrics, _ = await roll_out(config)
    assert [(sample.reward, sample.episode) for sample in samples] == [(3.0, 0), (1.0, 1), (2.0, 2)]
    assert [TOKENIZER.decode(sample.tokens.tolist()) for sample in samples] == ["11222", "112", "1122"]
    assert [sample.loss_mask.tolist() for sample in samples] == [[0, 1, 1, 1, 1], [0, 1, 1], [0, 1, 1, 1]]
    assert samples[0].behave_logprobs.tolist() == [0.0, -0.5, -0.5, -0.5, -0.5]
    assert {"rollout/agent_wait_s", "rollout/env_s", "rollout/reward_s"} <= metrics.keys()
    if agent == "Recorded":
        assert {sample.metrics["pid"] for sample in samples} != {float(os.getpid())}
        assert samples[2].reward_parts == {"own": 2.0}
        assert samples[2].token_rewards is not None


@pytest.mark.parametrize(
    ("deed", "how"),
    [
        ("exits", "lost its process"),
        ("raises", "raised ValueError"),
        ("wants_10_gb", "raised MemoryError"),
        ("breaks_unicode", "returned what cannot travel"),
        ("returns_text", "raised TypeError"),
        ("asks_for_more", "raised AttributeError"),
        ("hangs", "did not return in time"),
        ("forks", "exceeded a limit of its process"),
    ],
)
async def test_what_an_agent_in_a_process_does_wrong_costs_its_episode(
    config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch, deed: str, how: str
) -> None:
    """Member 1 does it, the others play."""
    config.agent.path, config.agent.run_in = config.reward.path.replace(":twos", ":hostile_agent"), RunIn.process
    config.agent.args, config.rollout.user_code.process_children = {"deed": deed}, 4
    ask = PoolProcess.ask

    async def impatient_with_member_1(
        lease: PoolProcess, label: str, call: ChildCall, timeout_s: float, answer: Any
    ) -> Any:
        is_its_run = call.sees == USE and call.arguments[1][0].member == 1
        return await ask(lease, label, call, 1.0 if is_its_run else timeout_s, answer)

    if deed == "hangs":
        monkeypatch.setattr(PoolProcess, "ask", impatient_with_member_1)
    samples, metrics, _ = await roll_out(config)
    assert [(sample.reward, sample.episode) for sample in samples] == [(3.0, 0), (2.0, 2)]
    assert metrics[f"rollout/lost_episodes: agent {config.agent.path} {how}"] == 1.0


@pytest.mark.parametrize(
    ("agent", "run_in", "message"),
    [
        ("PlainGroup", RunIn.process, "agent PlainGroup is not a plain `def run"),
        ("function", RunIn.process, "agent function is not a plain `def run"),
        ("with_tools", RunIn.process, "it takes `tools`, which are the worker's"),
        ("function", RunIn.thread, ".*:function' is `async def`, which runs on an event loop"),
    ],
)
def test_where_an_agent_cannot_run_is_refused(
    config: ExperimentConfig, agent: str, run_in: RunIn, message: str
) -> None:
    config.agent.path, config.agent.run_in = config.reward.path.replace(":twos", f":{agent}"), run_in
    with pytest.raises(ConfigError, match=f"agent.run_in={run_in}: {message}"):
        UserComponents(config)
    config.agent.run_in = RunIn.loop
    assert any(problem.startswith("agent.run_in=loop") for problem in check(config))


def test_an_agent_in_a_process_is_refused_where_routing_is_replayed(config: ExperimentConfig) -> None:
    """The experts of its tokens would be lost on the way."""
    config.agent.path, config.agent.run_in = config.reward.path.replace(":twos", ":hostile_agent"), RunIn.process
    config.agent.args = {"deed": "answers"}
    UserComponents(config)
    config.moe.replay_routing = True
    with pytest.raises(ConfigError, match=r"agent.run_in=process: moe.replay_routing=true needs the experts"):
        UserComponents(config)


async def test_a_reward_of_episodes_that_fails_costs_the_episodes_it_fails_on(config: ExperimentConfig) -> None:
    config.rewards = [part(config, "twos"), part(config, "picky"), part(config, "Ranks")]
    config.reward = ExperimentConfig().reward
    samples, metrics, _ = await roll_out(config)
    assert [(sample.episode, sample.reward) for sample in samples] == [(0, 3.0 + 0.5), (2, 2.0)]
    (name,) = [name for name in metrics if name.startswith("rollout/lost_episodes: ")]
    assert re.fullmatch(r"rollout/lost_episodes: reward .*mine.py:picky raised ValueError", name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"run_in": RunIn.loop}, "env.run_in=loop: an environment is never called on the worker's own"),
        (
            {"run_in": RunIn.process, "vectorized": True, "path": "gymnasium:FrozenLake-v1"},
            "env.run_in=process: the games of env.vectorized=true are one object",
        ),
    ],
)
def test_where_an_environment_cannot_run_is_refused(
    config: ExperimentConfig, settings: dict[str, Any], message: str
) -> None:
    for name, value in settings.items():
        setattr(config.env, name, value)
    assert any(problem.startswith(message) for problem in check(config)), list(check(config))


def test_an_asynchronous_environment_in_a_thread_is_refused(config: ExperimentConfig) -> None:
    config.env.path, config.env.run_in = config.reward.path.replace(":twos", ":AwaitingEnv"), RunIn.thread
    with pytest.raises(ConfigError, match=r"env.run_in=thread: .*AwaitingEnv' has an `async def step`"):
        UserComponents(config)


@pytest.mark.parametrize("run_in", [RunIn.thread, RunIn.process])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("four", r"OddEnv.step returned .*; gymnasium's step returns 5 values"),
        ("text", r"OddEnv.step returned the reward '1.0', a str; a reward is a finite number"),
        ("none", "OddEnv.step returned the reward None"),
        ("nan", "OddEnv.step returned the reward nan"),
        ("reset", "OddEnv.reset returned ''; gymnasium's reset returns 2 values"),
    ],
)
async def test_an_environment_that_returns_something_else_is_named(
    config: ExperimentConfig, run_in: RunIn, kind: str, message: str
) -> None:
    config.env.path, config.env.run_in = config.reward.path.replace(":twos", ":OddEnv"), run_in
    config.env.args, config.env.processes = {"kind": kind}, 4
    with pytest.raises(UserCodeError, match=message):
        await roll_out(config)


@pytest.mark.parametrize("run_in", [RunIn.thread, RunIn.process])
async def test_numbers_of_numpy_are_rewards_and_extras_everywhere(config: ExperimentConfig, run_in: RunIn) -> None:
    config.env.path, config.env.run_in = config.reward.path.replace(":twos", ":OddEnv"), run_in
    config.env.args, config.env.processes = {"kind": "numpy"}, 4
    samples, _, _ = await roll_out(config)
    assert [sample.reward for sample in samples] == [0.5] * 3
    config.env, config.reward.run_in = EnvConfig(), run_in
    config.reward.path = config.reward.path.replace(":twos", ":with_extras")
    samples, metrics, _ = await roll_out(config)
    assert [dict(sample.reward_parts) for sample in samples] == [{"torch_like": 0.25, "numpy": 3.0}] * 3
    assert metrics["reward/numpy"] == 3.0


@pytest.mark.parametrize("env", ["PlainEnv", ""])
async def test_a_reward_that_does_not_apply_is_left_out_of_the_sum_and_of_its_metric(
    config: ExperimentConfig, env: str
) -> None:
    path = config.reward.path
    if env:
        config.env.path = path.replace(":twos", f":{env}")
    names = ("other_source", "group_none", "twos")
    config.rewards = [NamedRewardConfig(path=path.replace(":twos", f":{name}"), name=name) for name in names]
    before = [sample.reward for sample in (await roll_out(replace(config, rewards=config.rewards[2:])))[0]]
    samples, metrics, _ = await roll_out(config)
    assert [sample.reward for sample in samples] == [before[0], before[1] + 1.0, before[2]]
    assert "reward/other_source" not in metrics
    assert metrics["reward/group_none"] == 1.0
    config.rewards = config.rewards[:1]
    with pytest.raises(UserCodeError, match="other_source returned None, which leaves a row to other rewards"):
        await roll_out(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "reward .*mine.py:raises raised ValueError: no such row"),
        ("nothing", "reward .*mine.py:nothing returned None, which leaves a row to other rewards"),
        ("too_few", "reward .*mine.py:too_few returned 1 rewards for a group of 3 samples; return one for each"),
    ],
)
async def test_a_reward_that_fails_fails_its_rollout_unless_a_value_stands_in(
    config: ExperimentConfig, name: str, message: str
) -> None:
    config.reward.path = config.reward.path.replace(":twos", f":{name}")
    with pytest.raises(UserCodeError, match=message):
        await roll_out(config)
    config.reward.failure_reward = -2.0
    samples, metrics, _ = await roll_out(config)
    assert [sample.reward for sample in samples] == [-2.0] * 3
    assert metrics["rollout/failed_rewards"] == 3.0


async def test_an_environment_that_raises_or_forgets_to_await_its_reward_is_named(config: ExperimentConfig) -> None:
    config.env.path = config.reward.path.replace(":twos", ":BrokenEnv")
    with pytest.raises(UserCodeError, match=r"env .*mine.py:BrokenEnv.step raised OSError: no connection"):
        await roll_out(config)
    config.env.path = config.reward.path.replace(":twos", ":ForgetfulEnv")
    with pytest.raises(UserCodeError, match=r"a reward is awaited: `value = await self._reward"):
        await roll_out(config)


def test_a_plain_function_with_queues_and_a_coroutine_in_a_thread_are_refused(config: ExperimentConfig) -> None:
    config.agent.path = config.reward.path.replace(":twos", ":PlainQueues")
    with pytest.raises(ConfigError, match=r"PlainQueues: `collect_trajectory` is a plain `def`"):
        UserComponents(config)
    config.agent = ExperimentConfig().agent
    config.rewards = [part(config, "later", run_in="thread")]
    with pytest.raises(ConfigError, match=r"rewards\[0\].run_in=thread: .* is `async def`"):
        UserComponents(config)


def test_the_settings_of_rewards_are_checked(config: ExperimentConfig) -> None:
    config.rewards = [
        part(config, "twos", args={"eech": 1.0}),
        part(config, "in_process", float("nan"), args={"data": 1}),
        part(config, "Ranks", failure_reward=float("inf"), args={"step": 1.0, "stop": 2}),
        NamedRewardConfig(path="asyncrl.plugins.rewards.length:length_penalty", name="mean", args={}),
    ]
    problems = "\n".join([*check(config), *code_problems(config)])
    for message in (
        "reward: set together with rewards",
        "has no parameter 'eech', did you mean 'each'?",
        "rewards[1].weight=nan",
        "rewards[2].failure_reward=inf",
        "has no parameter 'stop'",
        "rewards[3].name='mean': names the metric",
        "needs args.per_token",
    ):
        assert message in problems, problems


def test_an_episode_is_what_the_policy_wrote_and_what_it_was_told() -> None:
    tokens = TOKENIZER.encode("1+2=3;42")[:6]
    mask = np.array([0, 0, 1, 1, 0, 1], np.uint8)
    versions = np.where(mask, np.arange(6), -1).astype(np.int32)
    frame = Picture.from_array(np.zeros((2, 2, 3), np.uint8))
    known: dict[str, Any] = {"metrics": {"success": 1.0}, "frames": (frame,)}
    sample = Sample(np.array(tokens, np.int32), mask, np.zeros(6, np.float32), versions, 0.5, episode=3, **known)
    prompt = Prompt("p", 0, {"answer": "3"}, tuple(tokens[:2]), 1, SamplingParams())
    text = [TOKENIZER.decode([token]) for token in tokens]
    assert episode_of(prompt, sample, TOKENIZER) == Episode(
        {"answer": "3"},
        text[0] + text[1],
        (text[2] + text[3], text[5]),
        "".join(text[2:]),
        3,
        False,
        0.5,
        3,
        5,
        **known,
    )


def test_an_agent_keeps_its_name_where_it_is_adapted(config: ExperimentConfig) -> None:
    config.agent.path = config.reward.path.replace(":twos", ":OwnAgent")
    config.rewards = [part(config, "Ranks")]
    agent: Agent = UserComponents(config).agent
    assert type(agent).__name__ == "OwnAgent"
