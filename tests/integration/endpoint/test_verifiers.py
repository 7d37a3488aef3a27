"""Environments of `verifiers`, of both its APIs and unmodified, each in an environment that has it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio

from asyncrl.api import Completion, FinishReason, GenerationRequest, GenerationResult, Prompt, Sample, SamplingParams
from asyncrl.chat.conversation import ChatLimits
from asyncrl.chat.episode_client import ChatPolicy
from asyncrl.chat.template import ChatFormat
from asyncrl.inference.openai.endpoint import Endpoint
from asyncrl.plugins.agents.verifiers_env import HOST, VerifiersAgent, VerifiersDataset, VerifiersError
from asyncrl.rollout.settings import ConversationConfig
from asyncrl.rollout.user_code.conversations import ServedEpisodeClient

from ...warm import Template, forked

CLASSIC = os.environ.get("ASYNCRL_VERIFIERS_CLASSIC_PYTHON", "")
V1 = os.environ.get("ASYNCRL_VERIFIERS_V1_PYTHON", "")
classic = [pytest.mark.verifiers, pytest.mark.skipif(not CLASSIC, reason="no verifiers 0.2")]
v1 = [pytest.mark.verifiers, pytest.mark.skipif(not V1, reason="no verifiers 0.4")]
IMPORTED = {
    CLASSIC: ("datasets", "verifiers.clients.openai_chat_completions_token_client"),
    V1: ("renderers", "verifiers.v1.clients", "verifiers.v1.configs.agent", "verifiers.v1.utils.loaders"),
}
"""By interpreter: modules that take eight seconds of a processor, once for all tests."""

CLASSIC_ENV = """
import os

import verifiers as vf
from datasets import Dataset


async def look(at: int) -> str:
    "Looks."
    return f"at {at}"


def text(completion):
    return "".join(message["content"] or "" for message in completion if message["role"] == "assistant")


def right(completion, answer, **kwargs):
    return float(answer in text(completion))


def length(completion, **kwargs):
    return float(len(text(completion)))


def half(completion, **kwargs):
    return 0.5


def of_group(completions, **kwargs):
    return [0.0 for _ in completions]


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        question = state["prompt"][-1]["content"]
        if question == "die":
            os._exit(3)
        if question == "raise":
            raise RuntimeError("the game is lost")
        return [{"role": "user", "content": "sure?"}]


def raises(completion, **kwargs):
    raise KeyError("boom")


def nothing(completion, **kwargs):
    return None


def nan(completion, **kwargs):
    return float("nan")


def load_environment(kind="single", rows=2):
    print("this does not go to the wire")
    asked = ["2+2?", "die", "raise", "3+3?"] if kind == "twice" else ["2+2?"] * rows
    table = Dataset.from_list([{"question": each, "answer": "4"} for each in asked])
    rubric = vf.Rubric(funcs=[right, half, length], weights=[1.0, 0.2, 0.0])
    if kind == "group":
        return vf.SingleTurnEnv(dataset=table, rubric=vf.Rubric(funcs=[of_group]))
    if kind == "raises":
        return vf.SingleTurnEnv(dataset=table, rubric=vf.Rubric(funcs=[right, raises, nothing, nan]))
    if kind == "tool":
        return vf.ToolEnv(dataset=table, tools=[look], rubric=rubric, max_turns=4)
    if kind == "twice":
        return Twice(dataset=table, rubric=rubric, max_turns=2)
    return vf.SingleTurnEnv(dataset=table, eval_dataset=table.select([0]), rubric=rubric)
"""
TASKSET = """
import os

import openai
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str = "4"


class Sums(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.prompt == "raise":
            raise RuntimeError("the judge is ill")
        return float(self.data.answer in (trace.nodes[-1].message.content or ""))

    @vf.reward(weight=0.2)
    async def half(self, trace: vf.Trace) -> float:
        return 0.5

    @vf.metric
    async def nodes(self, trace: vf.Trace) -> float:
        return float(len(trace.nodes))


class SumsTaskset(vf.Taskset[Sums, vf.TasksetConfig]):
    def load(self):
        return [Sums(Data(prompt=prompt), self.config.task) for prompt in ("2+2?", "raise")]


class LoopConfig(vf.HarnessConfig):
    pass


class Loop(vf.Harness[LoopConfig]):
    "Two turns, in this process."
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        assert not any(name.startswith("ASYNCRL_KEY") for name in os.environ)  # other episodes' processes inherit it
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as policy:
            for feedback in ("sure?", None):
                answer = await policy.chat.completions.create(model=ctx.model, messages=messages)
                messages.append(answer.choices[0].message.model_dump(exclude_none=True))
                if feedback:
                    messages.append({"role": "user", "content": feedback})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["SumsTaskset", "Loop"]
"""

PROPOSER_SOLVER = """
import sys

import openai
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str = ""


class Ask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.metric
    async def nodes(self, trace: vf.Trace) -> float:
        return float(len(trace.nodes))

    @vf.reward(weight=0.1)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 5)


class Problems(vf.Taskset[Ask, vf.TasksetConfig]):
    def load(self):
        return [Ask(Data(prompt="a sum?"), self.config.task)]


class OnceConfig(vf.HarnessConfig):
    pass


class Once(vf.Harness[OnceConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as policy:
            await policy.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": data.prompt}])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class GameConfig(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()
    referee: vf.AgentConfig = vf.AgentConfig()


class Game(vf.Env[GameConfig]):
    "A proposed sum, two solvers of it, and a referee whose word is the truth and who is not trained."

    async def start(self):
        print("its servers start", file=sys.stderr)

    async def setup(self, agents):
        agents.referee.trainable = False

    async def run(self, task, agents):
        proposed = await agents.proposer.run(task)
        problem = Ask(Data(prompt=proposed.last_reply), task.config)
        for agent in (agents.solver, agents.solver, agents.referee):
            await agent.run(problem)

    async def finalize(self, task, episode):
        (proposer,), (referee,), solvers = (episode.by_agent[name] for name in ("proposer", "referee", "solver"))
        solved = [float(each.last_reply == referee.last_reply) for each in solvers]
        for each, right in zip(solvers, solved):
            each.record_reward("right", right)
        proposer.record_reward("hard", 1.0 - abs(sum(solved) - 1.0))


__all__ = ["Problems", "Once", "Game"]
"""


@dataclass
class Speaker:
    """Says `texts` in turn, each token under another log-probability."""

    chat: ChatFormat
    texts: list[str]
    gate: asyncio.Event

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        await self.gate.wait()
        print("ASKED", self.chat.tokenizer.decode_all(request.input_ids), self.texts)
        assert self.chat.findings.end_id is not None
        ids = [*self.chat.tokenizer.encode(self.texts.pop(0)), self.chat.findings.end_id]
        completion = Completion(ids, [-0.1 * at for at in range(len(ids))], [3] * len(ids), FinishReason.stop)
        return GenerationResult(request.request_id, (completion,))


class World:
    def __init__(self, chat: ChatFormat, endpoint: Endpoint) -> None:
        self.chat, self.endpoint, self.agents = chat, endpoint, list[VerifiersAgent]()
        self.gate = asyncio.Event()
        self.gate.set()
        self.rules: ChatPolicy | None = None

    def agent(self, python: str, env: Path, **more: Any) -> VerifiersAgent:
        self.agents.append(VerifiersAgent(python=python, env=str(env), **more))
        return self.agents[-1]

    def client(self, prompt: Prompt, *texts: str) -> ServedEpisodeClient:
        speaker = Speaker(self.chat, list(texts), self.gate)
        return ServedEpisodeClient(speaker, prompt, self.chat, self.rules, endpoint=lambda: self.endpoint)

    async def run(self, agent: VerifiersAgent, env: Path, row: int, *texts: str, split: str = "train") -> list[Sample]:
        data = {"prompt": "?", "verifiers": {"env": str(env), "split": split, "row": row}}
        prompt = Prompt("p0", 0, data, (1,), 1, SamplingParams(max_new_tokens=64, seed=1))
        client, nothing = self.client(prompt, *texts), Any
        try:
            return list(await agent.run(prompt, nothing, client))  # type: ignore[arg-type]
        finally:
            client.close()

    def says(self, sample: Sample) -> list[str]:
        """The sample's text, sampled stretches apart."""
        stretches: list[list[int]] = [[]]
        for token, masked in zip(sample.tokens.tolist(), sample.loss_mask.tolist(), strict=True):
            if masked != (len(stretches) % 2 == 0):
                stretches.append([])
            stretches[-1].append(token)
        return [self.chat.tokenizer.decode_all(each) for each in stretches]


@pytest.fixture(scope="module")
def python(
    request: pytest.FixtureRequest, template: Template | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """An interpreter with `verifiers` in it, whose programs begin where that is imported."""
    with forked(template, request.param, IMPORTED[request.param], tmp_path_factory.mktemp("python")) as python:
        yield python


@pytest_asyncio.fixture
async def world(chat: ChatFormat, endpoint: Endpoint) -> AsyncIterator[World]:
    made = World(chat, endpoint)
    yield made
    for agent in made.agents:
        await agent.close()


@pytest.fixture
def classic_env(tmp_path: Path) -> Path:
    file = tmp_path / "my_env.py"
    file.write_text(CLASSIC_ENV)
    return file


async def assert_scored(world: World, agent: VerifiersAgent, env: Path, row: int, *texts: str) -> None:
    """A conversation that ends in "4" is sampled and scored by the rubric, and one that does not as well."""
    (sample,) = await world.run(agent, env, row, *texts)
    assert [turns.removesuffix("<|im_end|>") for turns in world.says(sample)[1::2]] == list(texts)
    assert sample.reward == pytest.approx(1.1)
    assert sample.reward_parts == {"right": 1.0, "half": 0.5}
    assert sample.metrics["length"] > 0
    (sample,) = await world.run(agent, env, row, *["who?"] * 2)
    assert sample.reward == pytest.approx(0.1)


@pytest.mark.parametrize("python", [pytest.param(CLASSIC, marks=classic)], indirect=True)
async def test_a_classic_environment_with_tools_is_rolled_out_and_scored(
    world: World, classic_env: Path, python: str
) -> None:
    agent = world.agent(python, classic_env, args={"kind": "tool"})
    await assert_scored(world, agent, classic_env, 0, "a", "so 4")


@pytest.mark.parametrize("python", [pytest.param(CLASSIC, marks=classic)], indirect=True)
async def test_a_classic_rollout_ends_where_the_context_has_no_room_and_is_scored(
    world: World, classic_env: Path, python: str
) -> None:
    """The environment knows the error's words, and takes an empty answer for a failure of the model."""
    agent = world.agent(python, classic_env, args={"kind": "twice"})
    asked = world.chat.begin([{"role": "user", "content": "3+3?"}]).ids
    said = world.chat.tokenizer.encode("it is 4")
    world.rules = ChatPolicy(ChatLimits(max_context=len(asked) + len(said) + 3))
    (sample,) = await world.run(agent, classic_env, 3, "it is 4")
    assert world.says(sample)[1::2] == ["it is 4<|im_end|>"]
    assert (sample.truncated, sample.reward) == (True, pytest.approx(1.1))
    assert world.endpoint.refused == {"context_length_exceeded": 1}
    world.rules = ChatPolicy(ChatLimits(max_context=len(asked)))
    with pytest.raises(
        VerifiersError, match=r"its first prompt of \d+ tokens does not fit in generation\.context_length"
    ):
        await world.run(agent, classic_env, 3)


@pytest.mark.parametrize("python", [pytest.param(CLASSIC, marks=classic)], indirect=True)
async def test_a_function_of_the_rubric_that_raises_counts_as_0_and_is_counted_by_its_name(
    world: World, classic_env: Path, python: str
) -> None:
    agent = world.agent(python, classic_env, args={"kind": "raises"})
    (sample,) = await world.run(agent, classic_env, 0, "so 4")
    assert sample.reward == 1.0
    assert sample.reward_parts == {"right": 1.0, "raises": 0.0, "nothing": 0.0, "nan": 0.0}
    failed = {name: value for name, value in sample.metrics.items() if name.startswith("rubric_failed/")}
    assert failed == {f"rubric_failed/{name}": 1.0 for name in ("raises", "nothing", "nan")}


@pytest.mark.parametrize("python", [pytest.param(CLASSIC, marks=classic)], indirect=True)
async def test_a_rollout_that_fails_is_no_sample_and_a_process_that_dies_costs_its_rollouts_and_is_started_again(
    world: World, classic_env: Path, python: str
) -> None:
    agent = world.agent(python, classic_env, args={"kind": "twice"})
    await assert_scored(world, agent, classic_env, 3, "it is 5", "no, 4")
    good = world.run(agent, classic_env, 3, "it is 4", "yes, 4")
    bad = world.run(agent, classic_env, 2, "it is 4", "yes, 4")
    samples, error = await asyncio.gather(good, bad, return_exceptions=True)
    assert isinstance(samples, list)
    assert samples[0].reward == pytest.approx(1.1)
    assert isinstance(error, VerifiersError)
    assert "the game is lost" in str(error)
    with pytest.raises(VerifiersError, match="ended"):
        await world.run(agent, classic_env, 1, "it is 4")
    (sample,) = await world.run(agent, classic_env, 3, "it is 4", "yes, 4")
    assert sample.reward == pytest.approx(1.1)


@pytest.mark.parametrize("python", [pytest.param(CLASSIC, marks=classic)], indirect=True)
async def test_the_process_is_renewed_when_its_last_rollout_is_done(
    world: World, classic_env: Path, python: str, until: Any
) -> None:
    agent = world.agent(python, classic_env, max_episodes=1)
    world.gate.clear()
    first = asyncio.create_task(world.run(agent, classic_env, 0, "4"))
    await until(lambda: agent._host is not None and agent._host._waiting)
    host: Any = agent._host
    second = asyncio.create_task(world.run(agent, classic_env, 1, "4"))
    await until(lambda: agent._host is not host)
    assert not host.has_ended
    world.gate.set()
    assert [sample.reward for samples in await asyncio.gather(first, second) for sample in samples] == [1.1, 1.1]
    assert await host._process.wait() == 0


@pytest.mark.parametrize("python", [pytest.param(CLASSIC, marks=classic)], indirect=True)
async def test_rollouts_are_scored_one_that_is_cancelled_asks_no_more_and_an_orphan_ends(
    world: World, classic_env: Path, python: str, until: Any
) -> None:
    agent = world.agent(python, classic_env)
    await assert_scored(world, agent, classic_env, 0, "it is 4")
    world.gate.clear()
    running = asyncio.create_task(world.run(agent, classic_env, 0, "4"))
    await until(lambda: agent._host is not None and agent._host._waiting)
    host: Any = agent._host
    running.cancel()
    await asyncio.wait({running})
    assert not host._waiting
    assert len(world.endpoint) == 0
    host._process.stdin.close()  # as the end of the RolloutWorker does
    async with asyncio.timeout(300):
        assert await host._process.wait() in (0, -signal.SIGTERM)


@pytest.mark.parametrize("python", [pytest.param(CLASSIC, marks=classic)], indirect=True)
def test_what_cannot_be_trained_is_refused_by_its_reason(classic_env: Path, python: str) -> None:
    def load(split: str = "train", **more: Any) -> VerifiersDataset:
        return VerifiersDataset(**{"split": split, "seed": 0, "python": python, "env": str(classic_env)} | more)

    rows = load("held_out", python=CLASSIC)
    assert len(rows) == 1
    assert rows.row(0)["prompt"][-1] == {"role": "user", "content": "2+2?"}
    assert rows.row(0)["verifiers"] == {"env": str(classic_env), "split": "held_out", "row": 0}
    for more, why in (
        ({"args": {"kind": "group"}}, "scores groups"),
        ({"args": {"kind": "twice"}, "split": "held_out"}, "no eval_dataset"),
        ({"python": "/no/such/python"}, "cannot be started"),
    ):
        with pytest.raises(ValueError, match=why):
            load(**more)


@pytest.mark.parametrize("python", [pytest.param(V1, marks=v1)], indirect=True)
async def test_v1_tasks_are_run_by_their_harness_and_scored(
    world: World, tmp_path: Path, python: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sums_v1.py"
    file.write_text(TASKSET)
    with pytest.raises(ValueError, match="no held-out rows"):
        VerifiersDataset(split="held_out", seed=0, python=python, env=str(file))
    rows = VerifiersDataset(split="train", seed=0, python=python, env=str(file))
    assert (len(rows), rows.row(0)["prompt"]) == (2, "2+2?")
    assert "Traceback" not in capfd.readouterr().err
    agent = world.agent(python, file)
    runs = [world.run(agent, file, 0, "it is 5", "no, 4"), world.run(agent, file, 0, "it is 4", "or 5")]
    (right,), (wrong,) = await asyncio.gather(*runs)
    assert [turns.removesuffix("<|im_end|>") for turns in world.says(right)[1::2]] == ["it is 5", "no, 4"]
    assert (right.reward, wrong.reward) == (pytest.approx(1.1), pytest.approx(0.1))
    assert right.reward_parts == {"right": 1.0, "half": 0.5}
    assert right.metrics["nodes"] == 4.0
    with pytest.raises(VerifiersError, match="the judge is ill"):
        await world.run(agent, file, 1, "4", "4")


@pytest.mark.parametrize("python", [pytest.param(V1, marks=v1)], indirect=True)
async def test_each_agent_of_a_v1_environment_has_its_own_reward_and_comparison_group(
    world: World, tmp_path: Path, python: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same prompt is asked by two solvers and the referee: their runs are told apart by the trace alone."""
    file = tmp_path / "game_v1.py"
    file.write_text(PROPOSER_SOLVER)
    assert len(VerifiersDataset(split="train", seed=0, python=python, env=str(file))) == 1
    assert "its servers start" not in capfd.readouterr().err
    agent = world.agent(python, file, within=["solver"])
    first, second = await asyncio.gather(
        world.run(agent, file, 0, "2+2?", "4", "it is 5", "4"), world.run(agent, file, 0, "1+1?", "3", "no", "2")
    )
    assert "its servers start" in capfd.readouterr().err
    assert [[turns.removesuffix("<|im_end|>") for turns in world.says(sample)[1::2]] for sample in first] == [
        ["2+2?"],
        ["4"],
        ["it is 5"],
    ]
    assert [sample.group for sample in first] == ["proposer", "solver/0", "solver/0"]
    assert [sample.reward for sample in first] == pytest.approx([1.1, 1.1, 0.0])
    assert [sample.reward for sample in second] == pytest.approx([0.1, 0.1, 0.1])
    assert first[0].reward_parts == {"short": 1.0, "hard": 1.0}
    assert first[1].reward_parts == {"short": 1.0, "right": 1.0}
    assert [sample.metrics["nodes"] for sample in first] == [2.0] * 3
    assert world.endpoint.refused == {}


@pytest.mark.parametrize("python", [pytest.param(V1, marks=v1)], indirect=True)
async def test_the_attempts_of_verifiers_own_best_of_n_are_samples_of_one_group(
    world: World, tmp_path: Path, python: str
) -> None:
    file = tmp_path / "sums_v1.py"
    file.write_text(TASKSET)
    agent = world.agent(python, file, args={"id": "best-of-n", "n": 2})
    samples = await world.run(agent, file, 0, "it is 5", "no, 4", "it is 4", "or 5")
    assert [sample.reward for sample in samples] == pytest.approx([1.1, 0.1])
    assert [sample.metrics["best"] for sample in samples] == [1.0, 0.0]
    assert {sample.group for sample in samples} == {""}


async def test_side_conversations_of_a_run_are_in_a_group_below_its_agents(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Host:
        """As the v1 API's: the calls of a run have its trace's id, and the harness' own headers."""

        async def __aenter__(self) -> None: ...
        async def __aexit__(self, *_: object) -> None: ...

        async def run(self, row: int, split: str, base_url: str, api_key: str) -> dict[str, Any]:
            policy = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
            for more in ({}, {"x-claude-code-agent-id": "a1"}):
                await policy.chat.completions.create(
                    model="policy",
                    messages=[{"role": "user", "content": "2+2?"}],
                    extra_headers={"X-Session-ID": "trace7", **more},
                )
            run = {"trace": "trace7", "agent": "solver", "trained": True, "reward": 0.5, "parts": {}, "metrics": {}}
            return {"runs": [run]}

    async def ready(_: VerifiersAgent) -> Host:
        return Host()

    monkeypatch.setattr(VerifiersAgent, "_ready", ready)
    rule = ConversationConfig(header="x-claude-code-agent-id", group="sub")
    world.endpoint = Endpoint(conversations=[rule])
    samples = await world.run(
        world.agent("python", tmp_path / "a.py", within=["solver"]), tmp_path / "a.py", 0, "4", "5"
    )
    assert [(sample.group, sample.reward) for sample in samples] == [("solver/0", 0.5), ("solver/0/sub", 0.5)]
    assert [world.says(sample)[1::2] for sample in samples] == [["4<|im_end|>"], ["5<|im_end|>"]]
    await world.endpoint.close()


async def test_rows_of_another_dataset_are_refused_before_anything_starts(world: World, tmp_path: Path) -> None:
    agent = world.agent("/no/such/python", tmp_path / "a.py")
    with pytest.raises(VerifiersError, match=r"set dataset\.path"):
        await world.run(agent, tmp_path / "b.py", 0)
    with pytest.raises(VerifiersError, match="cannot be started"):
        await world.run(agent, tmp_path / "a.py", 0)


CLASSIC_TOKEN_CLIENT = """
import asyncio, json, sys
from openai import AsyncOpenAI
from verifiers.clients.openai_chat_completions_token_client import OpenAIChatCompletionsTokenClient

async def main():
    folder, base_url, api_key, env, args = json.loads(sys.argv[1])
    sys.path.append(folder)
    from verifiers_host import Classic

    world = Classic(env, args)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as policy:
        client = OpenAIChatCompletionsTokenClient(policy)
        row, kept = world._table("train")[0], ["trajectory"]
        made = await world._env.run_rollout(row, client, "policy", {}, state_columns=kept)
    assert not made.get("error"), made["error"]
    print(json.dumps([[list(step["tokens"][key]) for key in KEYS] for step in made["trajectory"]]))

KEYS = ("prompt_ids", "completion_ids", "completion_logprobs")
asyncio.run(main())
"""
V1_TRAIN_CLIENT = """
import asyncio, functools, json, sys
from renderers import Qwen3RendererConfig
from verifiers.v1 import clients

async def main():
    folder, base_url, api_key, env, tokenizer, thinks = json.loads(sys.argv[1])
    sys.path.append(folder)
    from verifiers_host import V1

    world, traces = V1(env, {}), []
    config = {"renderer": Qwen3RendererConfig(enable_thinking=thinks), "renderer_model_name": tokenizer}
    world._client = functools.partial(clients.TrainClientConfig, **config)
    run_episode = world._env.run_episode

    async def kept(*given):
        episode = await run_episode(*given)
        traces.extend(episode.traces)
        return episode

    world._env.run_episode = kept
    async with world.serving():
        await world.run(0, "train", base_url, api_key)
    nodes = [node for trace in traces for node in trace.nodes]
    ids = [token for node in nodes for token in node.token_ids]
    print(json.dumps([[ids, [each for node in nodes for each in node.logprobs], [node.sampled for node in nodes]]]))

asyncio.run(main())
"""


class Spells(Speaker):
    """Says each letter as a token of its own, which no tokenizer would."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        assert self.chat.findings.end_id is not None
        text = self.texts.pop(0)
        ids = [*(token for letter in text for token in self.chat.tokenizer.encode(letter)), self.chat.findings.end_id]
        assert len(ids) > len(self.chat.tokenizer.encode(text)) + 1
        completion = Completion(ids, [-0.25 * at for at in range(len(ids))], [3] * len(ids), FinishReason.stop)
        return GenerationResult(request.request_id, (completion,))


async def reported_by(
    python: str, program: str, world: World, what: Sequence[Any], texts: Sequence[str]
) -> tuple[Any, ServedEpisodeClient]:
    """Return what `program` prints of an episode in which the policy spells `texts`, and the episode's client."""
    prompt = Prompt("p0", 0, {"prompt": "?"}, (1,), 1, SamplingParams(max_new_tokens=64, seed=1))
    policy = Spells(world.chat, list(texts), world.gate)
    client = ServedEpisodeClient(policy, prompt, world.chat, endpoint=lambda: world.endpoint)
    session = await client.endpoint()
    given = [str(HOST.parent), session.base_url, session.api_key, *what]
    process = await asyncio.create_subprocess_exec(
        *(python, "-c", program, json.dumps(given)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    async with asyncio.timeout(300):
        printed, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(printed.splitlines()[-1]), client


@pytest.mark.parametrize(
    ("kind", "texts"), [("twice", ["it is 5", "the answer is 4"]), ("tool", ["sure? a", "more th 4"])]
)
@pytest.mark.parametrize("python", [pytest.param(CLASSIC, marks=classic)], indirect=True)
async def test_the_token_client_of_the_classic_api_extends_what_was_sampled(
    world: World, classic_env: Path, python: str, kind: str, texts: list[str]
) -> None:
    """It stitches a conversation's ids itself, from what /tokenize says of the new messages."""
    steps, client = await reported_by(python, CLASSIC_TOKEN_CLIENT, world, [str(classic_env), {"kind": kind}], texts)
    (sample,) = client.samples()
    assert client.metrics["chat/extended"] == 1
    assert world.endpoint.refused == {}
    (_, _, _), (prompt_ids, completion_ids, logprobs) = steps
    assert sample.tokens.tolist() == [*prompt_ids, *completion_ids]
    assert (
        steps[0][1]
        == [token for token, mine in zip(sample.tokens, sample.loss_mask, strict=True) if mine][: len(steps[0][1])]
    )
    np.testing.assert_allclose(sample.behave_logprobs[sample.loss_mask == 1], [*steps[0][2], *logprobs], atol=1e-6)


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("python", [pytest.param(V1, marks=v1)], indirect=True)
async def test_the_train_client_of_the_v1_api_is_recorded_in_the_ids_that_it_sends(
    world: World, tmp_path: Path, tokenizer_folder: Path, python: str, thinks: bool
) -> None:
    """It renders conversations itself; one of a thinking model it renders anew at each question, which forks it."""
    file = tmp_path / "sums_v1.py"
    file.write_text(TASKSET)
    what, texts = [str(file), str(tokenizer_folder), thinks], ["the answer is 5", "the answer is 4"]
    ((ids, logprobs, sampled),), client = await reported_by(python, V1_TRAIN_CLIENT, world, what, texts)
    assert world.endpoint.refused == {}
    first, *others = client.samples()
    spelt = [world.says(sample)[1::2] for sample in (first, *others)]
    if thinks:
        assert spelt == [[f"{text}<|im_end|>"] for text in texts]
        return
    assert spelt == [[f"{text}<|im_end|>" for text in texts]]
    assert sampled == [False, True, False, True]
    assert first.tokens.tolist() == ids
    np.testing.assert_allclose(first.behave_logprobs[first.loss_mask == 1], logprobs, atol=1e-6)
