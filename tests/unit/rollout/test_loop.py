"""The RolloutWorker's loop against a gate, a policy and a trainer that live in the test."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from simulator.simulated_code import FakeComponents

from asyncrl.api import (
    Agent,
    ChatClient,
    Environment,
    EpisodeError,
    GenerationClient,
    GenerationRequest,
    GenerationResult,
    Prompt,
    Sample,
    SamplingParams,
    Tokenizer,
    Trajectory,
)
from asyncrl.api.generation import Completion
from asyncrl.api.trajectory import FINISHED_AT
from asyncrl.comm.ended_rollouts import failure, is_filter_reason
from asyncrl.config.setting import ChoiceConfig
from asyncrl.data.datasets import Dataset
from asyncrl.data.prompt_format import InvalidPrompt, OverlongPrompt, PromptFormat, make_prompt
from asyncrl.data.prompt_queue import DataOrder, PromptRef
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.messages import (
    AllocateReply,
    AllocateRequest,
    FinishedRollout,
    FinishRequest,
    GrantedRollout,
    ReceivedReport,
    ReceivedRollout,
    Route,
    RunBegin,
)
from asyncrl.manager.service import ManagerService
from asyncrl.rollout.group_rules import GroupRules
from asyncrl.rollout.loop import MAX_ATTEMPTS, MAX_FAILURES_IN_A_ROW, RolloutLoop
from asyncrl.rollout.rollout_client import RolloutClient
from asyncrl.rollout.settings import RolloutConfig, SamplingConfig
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code_pool.call_records import UserCodeError, current_meter

GROUP = 2
ORDER = DataOrder(1000, 0)
LIMIT_S = 300.0


class EchoAgent(Agent):
    """Asks the policy once; rewards are what `rewards` says of the prompt's row."""

    def __init__(self, rewards: Callable[[str], Sequence[float]]) -> None:
        self._rewards = rewards

    async def run_group(self, prompt: Prompt, make_env: Any, client: GenerationClient) -> Sequence[Sample]:
        request = GenerationRequest(prompt.prompt_id, prompt.input_ids, prompt.group_size, prompt.sampling)
        result = await client.generate(request)
        return [
            sample(reward, c) for reward, c in zip(self._rewards(prompt.prompt_id), result.completions, strict=False)
        ]


def sample(reward: float, completion: Completion) -> Sample:
    length = len(completion.token_ids)
    return Sample(
        tokens=np.array([1, *completion.token_ids], dtype=np.int32),
        loss_mask=np.array([0] + [1] * length, dtype=np.uint8),
        behave_logprobs=np.array([0.0, *completion.logprobs], dtype=np.float32),
        versions=np.array([-1, *completion.versions], dtype=np.int32),
        reward=reward,
    )


def made_prompt(ref: PromptRef) -> Prompt:
    return Prompt(ref.prompt_id, ref.order, {}, (1,), GROUP, SamplingParams())


def components_of(agent: Agent, train_prompt: Callable[[PromptRef], Prompt] = made_prompt) -> UserComponents:
    """The agent with prompts whose rows hold the version."""

    def train(ref: PromptRef, version: int) -> Prompt:
        return replace(train_prompt(ref), data={"version": version})

    return cast(UserComponents, FakeComponents(agent, train))


@dataclass
class FakeGate:
    """Admits `admit` rollouts in all, in the data order; `failures`: of the prompts' tries before, one by one."""

    admit: int
    asked: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    finished: dict[str, FinishedRollout] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)
    version: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    goal: int = 0
    skipped: set[str] = field(default_factory=set)
    failures: list[int] = field(default_factory=list)

    async def allocate(self, rollouts: Sequence[str], *, timeout_s: float) -> AllocateReply:
        granted = rollouts[: self.admit]
        self.admit -= len(granted)
        if not granted:
            await asyncio.Event().wait()
        return AllocateReply([self._grant(rollout_id) for rollout_id in granted], 0, False)

    def _grant(self, rollout_id: str) -> GrantedRollout:
        ref = ORDER.ref(len(self.asked))
        self.asked.append(ref.prompt_id)
        self.prompts[rollout_id] = ref.prompt_id
        self.running.add(rollout_id)
        failures = self.failures.pop(0) if self.failures else 0
        route, skips = Route(f"http://{ref.prompt_id}", 0), ref.prompt_id in self.skipped
        return GrantedRollout(rollout_id, ref.prompt_id, ref.order, ref.row, 0, failures, self.version, route, skips)

    def finish(self, rollouts: Sequence[FinishedRollout]) -> None:
        for rollout in rollouts:
            self.running.discard(rollout.rollout_id)
            self.finished[rollout.rollout_id] = rollout
        if len(self.finished) >= self.goal:
            self.done.set()

    def outcome_of(self, prompt_id: str) -> list[FinishedRollout]:
        return [ended for rollout_id, ended in self.finished.items() if self.prompts[rollout_id] == prompt_id]


async def answer(request: GenerationRequest, rollout_id: str, *, route: Route | None = None) -> GenerationResult:
    completion = Completion([2, 3], [-0.5, -0.5], [0, 0], "stop")
    return GenerationResult(request.request_id, (completion,) * request.n)


async def run(
    gate: FakeGate,
    agent: Agent,
    *,
    config: RolloutConfig | None = None,
    generate: Callable[..., Awaitable[GenerationResult]] = answer,
    train_prompt: Callable[[PromptRef], Prompt] = made_prompt,
    right_at: float | None = None,
    least_episodes: int = 1,
) -> list[Trajectory]:
    """Run the loop until `gate.goal` rollouts have ended; returns what was pushed."""
    pushed: list[Trajectory] = []

    async def push(trajectory: Trajectory) -> None:
        assert trajectory.rollout_id in gate.running, "reported as finished before the trainer had it"
        pushed.append(trajectory)

    gate.goal = gate.goal or gate.admit
    manager, client = cast(ManagerClient, gate), cast(RolloutClient, SimpleNamespace(generate=generate))
    config = config or RolloutConfig(max_concurrent=8)
    parts = components_of(agent, train_prompt), manager, client, push, config
    loop = RolloutLoop(*parts, GroupRules.of(config, right_at=right_at), least_episodes)
    working = asyncio.create_task(loop.run())
    done = asyncio.create_task(gate.done.wait())
    try:
        await asyncio.wait({working, done}, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        failed = working.done()
        working.cancel()
        done.cancel()
        await asyncio.gather(working, done, return_exceptions=True)
    if failed:
        working.result()
    assert gate.done.is_set(), f"only {len(gate.finished)} of {gate.goal} rollouts ended within {LIMIT_S} s"
    return pushed


def always(*rewards: float) -> EchoAgent:
    return EchoAgent(lambda prompt_id: rewards)


async def test_every_admitted_rollout_is_pushed_and_then_reported_in_data_order() -> None:
    gate = FakeGate(admit=20)
    pushed = await run(gate, always(1.0, 0.0))
    assert len(pushed) == 20
    assert sorted(t.order for t in pushed) == list(range(20))
    assert all(ended.accepted for ended in gate.finished.values())


async def test_a_curriculum_hears_the_share_of_right_answers_and_what_rests_is_dropped_without_a_rollout() -> None:
    first, second = ORDER.ref(0).prompt_id, ORDER.ref(1).prompt_id
    gate = FakeGate(admit=3, skipped={second})
    filters = RolloutConfig(max_concurrent=8, filters=[ChoiceConfig(name="zero_variance")])
    agent = EchoAgent(lambda prompt_id: (1.0, 0.5) if prompt_id == first else (2.0, 2.0))
    pushed = await run(gate, agent, config=filters, right_at=1.0)
    assert [trajectory.prompt_id for trajectory in pushed] == [first]
    (ended,) = gate.outcome_of(first)
    assert (ended.accepted, ended.success) == (True, 0.5)
    (ended,) = gate.outcome_of(second)
    assert (ended.accepted, ended.reason, ended.return_prompt, ended.success) == (False, "curriculum", False, None)
    (filtered,) = (each for each in gate.finished.values() if each.reason not in ("", "curriculum"))
    assert filtered.success == 1.0, "what a filter rejects is measured too"


async def test_a_prompt_is_of_the_version_at_which_its_rollout_was_admitted() -> None:
    """By it the longest answer may change over a run."""
    seen: list[int] = []

    class Seeing(EchoAgent):
        async def run_group(self, prompt: Prompt, make_env: Any, client: GenerationClient) -> Sequence[Sample]:
            seen.append(prompt.data["version"])
            return await super().run_group(prompt, make_env, client)

    await run(FakeGate(admit=3, version=7), Seeing(lambda prompt_id: (1.0, 0.0)))
    assert seen == [7, 7, 7]
    sampling = SamplingConfig(max_new_tokens=96, max_new_tokens_from={20: 64, 3: 32, 50: 96})
    limits = [sampling.max_new_tokens_at(version) for version in (0, 2, 3, 19, 20, 49, 50, 99)]
    assert limits == [96, 96, 32, 32, 64, 64, 96, 96]
    assert SamplingConfig(max_new_tokens=96).max_new_tokens_at(5) == 96


async def test_no_more_rollouts_run_at_a_time_than_max_concurrent() -> None:
    running = most = 0

    async def count(request: GenerationRequest, rollout_id: str, *, route: Route | None = None) -> GenerationResult:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return await answer(request, rollout_id)

    await run(FakeGate(admit=30), always(1.0, 0.0), config=RolloutConfig(max_concurrent=3), generate=count)
    assert most == 3


async def test_a_filter_rejects_a_group_with_its_reason_and_nothing_is_pushed() -> None:
    gate = FakeGate(admit=4)
    config = RolloutConfig(filters=[ChoiceConfig(name="zero_variance", params={"return_prompt": True})])
    assert await run(gate, always(1.0, 1.0), config=config) == []
    assert {(e.accepted, e.reason, e.return_prompt) for e in gate.finished.values()} == {
        (False, "filter: zero_variance", True)
    }


class ServiceGate:
    """The manager's own state machines, as the loop's gate. One RolloutWorker, one server at version 0, and a trainer
    that receives and never trains.
    """

    def __init__(self, batch_size: int, rows: int) -> None:
        self.service = ManagerService(
            batch_size=batch_size, max_staleness=1, routing="least_requests", lease_s=60.0, order=DataOrder(rows, 1)
        )
        self.service.router.update(0, "http://server", 0, True)
        self.service.routes_changed(0)
        self.service.begin(RunBegin())
        self.ended: list[FinishedRollout] = []
        self.seen: list[str] = []

    async def allocate(self, rollouts: Sequence[str], *, timeout_s: float) -> AllocateReply:
        ended, self.ended = self.ended, []
        request = AllocateRequest(worker="w", rollouts=list(rollouts), timeout_s=0.01, finished=ended)
        reply = await self.service.allocate_rollout(request)
        self.seen += [granted.prompt_id for granted in reply.granted]
        return reply

    def finish(self, rollouts: Sequence[FinishedRollout]) -> None:
        self.ended += rollouts

    async def push(self, trajectory: Trajectory) -> None:
        tokens = sum(len(made.tokens) for made in trajectory.samples)
        received = ReceivedRollout(trajectory.rollout_id, trajectory.prompt_id, trajectory.order, 0, tokens)
        assert (await self.service.received(ReceivedReport([received]))).refused == []


class Judged(Agent):
    """A group whose seed is `flat` has no variance."""

    def __init__(self, flat: Callable[[int], bool]) -> None:
        self._flat = flat

    async def run_group(self, prompt: Prompt, make_env: Any, client: GenerationClient) -> Sequence[Sample]:
        assert prompt.sampling.seed is not None
        rewards = (0.0, 0.0) if self._flat(prompt.sampling.seed) else (0.0, 1.0)
        return [sample(reward, Completion([2, 3], [-0.5, -0.5], [0, 0], "stop")) for reward in rewards]


async def roll_out_until(enough: Callable[[], bool], gate: ServiceGate, flat: Callable[[int], bool]) -> None:
    """Run the loop, with a filter that returns the prompts of groups without variance."""
    agent = Judged(flat)
    tokenizer = SimpleNamespace(encode=lambda text: [1], eos_token_id=0)
    dataset = SimpleNamespace(row=lambda row: {"prompt": str(row)})

    def train_prompt(ref: PromptRef) -> Prompt:
        prompt_format = PromptFormat(cast(Tokenizer, tokenizer), None)
        return make_prompt(ref, cast(Dataset, dataset), prompt_format, GROUP, SamplingParams(), 1)

    config = RolloutConfig(max_concurrent=8, filters=[ChoiceConfig("zero_variance", {"return_prompt": True})])
    components, manager = components_of(agent, train_prompt), cast(ManagerClient, gate)
    loop = RolloutLoop(components, manager, cast(RolloutClient, None), gate.push, config, GroupRules.of(config))
    working = asyncio.create_task(loop.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            while not enough():  # noqa: ASYNC110  # what is waited for is the loop itself
                await asyncio.sleep(0)
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def test_prompts_that_a_filter_returns_do_not_take_every_place_for_ever() -> None:
    """Nine in ten groups have no variance, and no newer version comes before a batch is full."""
    gate = ServiceGate(batch_size=8, rows=1000)
    counts = gate.service.gate.counts
    await roll_out_until(lambda: counts().finished_untrained >= 8, gate, lambda seed: seed % 10 > 0)


async def test_a_prompt_that_a_filter_returns_is_tried_with_other_seeds_and_dropped_by_name_at_last() -> None:
    gate = ServiceGate(batch_size=64, rows=10)
    seeds: list[int] = []

    def note(seed: int) -> bool:
        seeds.append(seed)
        return True

    await roll_out_until(lambda: len(seeds) >= 80, gate, note)
    assert len(set(seeds)) == len(seeds)
    each_once = [DataOrder(10, 1).ref(order).prompt_id for order in range(10)]
    assert gate.seen[:10] == each_once, "before any is tried again"
    tries = Counter(gate.seen)
    assert tries[gate.seen[0]] == max(tries.values()) == RolloutConfig().filter_tries
    dropped = gate.service.gate.counts().dropped
    assert dropped.keys() == {"filter: zero_variance", "filter: zero_variance_exhausted"}


async def test_shaping_changes_the_rewards_that_are_trained() -> None:
    gate = FakeGate(admit=1)
    config = RolloutConfig(shaping=[ChoiceConfig(name="overlong", params={"max_length": 2, "margin": 1})])
    (trajectory,) = await run(gate, always(1.0, 0.0), config=config)
    assert [s.reward for s in trajectory.samples] == [0.0, -1.0]


class AskingTwice(EchoAgent):
    """Asks the policy twice, the second time once it has the first answer."""

    async def run_group(self, prompt: Prompt, make_env: Any, client: GenerationClient) -> Sequence[Sample]:
        await super().run_group(prompt, make_env, client)
        return await super().run_group(prompt, make_env, client)


async def test_the_first_request_of_a_rollout_goes_where_its_admission_says() -> None:
    gate = FakeGate(admit=3)
    routes: dict[str, list[str | None]] = {}

    async def note(request: GenerationRequest, rollout_id: str, *, route: Route | None = None) -> GenerationResult:
        routes.setdefault(request.request_id, []).append(None if route is None else route.url)
        return await answer(request, rollout_id)

    await run(gate, AskingTwice(lambda _: [1.0, 0.0]), generate=note)
    assert routes == {prompt_id: [f"http://{prompt_id}", None] for prompt_id in gate.asked}


async def test_a_prompt_that_cannot_be_made_fails_its_rollout_alone() -> None:
    gate = FakeGate(admit=3)
    agent = always(1.0, 0.0)
    made = 0

    def damaged_once(ref: PromptRef) -> Prompt:
        nonlocal made
        made += 1
        if made == 2:
            raise ValueError("row 7 is damaged")
        return made_prompt(ref)

    await run(gate, agent, train_prompt=damaged_once)
    assert [ended.reason for ended in gate.finished.values()].count("failed") == 1
    assert sum(ended.accepted for ended in gate.finished.values()) == 2


async def test_a_row_that_makes_no_prompt_is_dropped_for_good_at_once() -> None:
    gate = FakeGate(admit=3)

    def too_long(ref: PromptRef) -> Prompt:
        if ref.order == 1:
            raise InvalidPrompt("row 7 is too long")
        return made_prompt(ref)

    await run(gate, always(1.0, 0.0), train_prompt=too_long)
    (dropped,) = [ended for ended in gate.finished.values() if not ended.accepted]
    assert (dropped.reason, dropped.return_prompt) == ("invalid_prompt", False)


async def test_a_row_that_is_too_long_is_left_out_and_is_no_failure() -> None:
    gate = FakeGate(admit=3)

    def too_long(ref: PromptRef) -> Prompt:
        if ref.order == 1:
            raise OverlongPrompt("row 7 is too long")
        return made_prompt(ref)

    await run(gate, always(1.0, 0.0), train_prompt=too_long)
    (dropped,) = [ended for ended in gate.finished.values() if not ended.accepted]
    assert (dropped.reason, dropped.return_prompt) == ("overlong_prompt", False)
    assert failure("overlong_prompt") is None, "nobody has to look into what the settings ask for"
    assert failure("invalid_prompt") is not None


async def test_bad_rows_that_come_before_the_first_answer_end_nothing() -> None:
    """They fail at once, one after the other; the good ones take their time."""
    gate = FakeGate(admit=100)
    failed = asyncio.Event()

    def first_are_bad(ref: PromptRef) -> Prompt:
        if 4 <= ref.order < 4 + MAX_FAILURES_IN_A_ROW + 4:
            raise InvalidPrompt(f"row {ref.row} is too long")
        return made_prompt(ref)

    async def slow(request: GenerationRequest, rollout_id: str, *, route: Route | None = None) -> GenerationResult:
        if not failed.is_set() and len(gate.finished) < MAX_FAILURES_IN_A_ROW + 4:
            await failed.wait()
        return await answer(request, rollout_id)

    original = gate.finish

    def finish(rollouts: Sequence[FinishedRollout]) -> None:
        original(rollouts)
        if len(gate.finished) == MAX_FAILURES_IN_A_ROW + 4:
            failed.set()

    gate.finish = finish  # type: ignore[method-assign]
    config = RolloutConfig(max_concurrent=64)
    pushed = await run(gate, always(1.0, 0.0), config=config, generate=slow, train_prompt=first_are_bad)
    assert len(pushed) == 100 - MAX_FAILURES_IN_A_ROW - 4


async def test_a_reward_that_raises_is_told_from_other_failures() -> None:
    class Scoring(EchoAgent):
        async def run_group(self, prompt: Prompt, make_env: Any, client: GenerationClient) -> Sequence[Sample]:
            if prompt.order == 0:
                raise UserCodeError("reward my.py:score", "raised KeyError: 'answer'")
            return await super().run_group(prompt, make_env, client)

    gate = FakeGate(admit=2)
    await run(gate, Scoring(lambda _: [1.0, 0.0]))
    (dropped,) = [ended for ended in gate.finished.values() if not ended.accepted]
    assert (dropped.reason, dropped.return_prompt) == ("failed: reward my.py:score", True)


async def test_an_agent_that_rejects_a_prompt_is_counted() -> None:
    gate = FakeGate(admit=2)
    assert await run(gate, always()) == []
    assert {ended.reason for ended in gate.finished.values()} == {"agent_rejected"}


async def test_what_was_given_up_while_its_grant_was_under_way_is_not_asked_for_again() -> None:
    gate = FakeGate(admit=3)
    original = gate.allocate
    gone: list[str] = []

    async def allocate(rollouts: Sequence[str], *, timeout_s: float) -> AllocateReply:
        if not gone:
            gone.append(rollouts[0])
            return AllocateReply([], 0, False, gone)
        assert not set(rollouts) & set(gone)
        return await original(rollouts, timeout_s=timeout_s)

    gate.allocate = allocate  # type: ignore[method-assign]
    pushed = await run(gate, always(1.0, 0.0), config=RolloutConfig(max_concurrent=1))
    assert sorted(trajectory.order for trajectory in pushed) == [0, 1, 2]


async def test_a_failing_rollout_is_tried_again_and_given_up_after_its_attempts() -> None:
    """This holds across workers: the grant carries the number of failed attempts."""
    gate = FakeGate(admit=MAX_ATTEMPTS, failures=list(range(MAX_ATTEMPTS)))

    async def broken(request: GenerationRequest, rollout_id: str, *, route: Route | None = None) -> GenerationResult:
        raise ConnectionError("the server went away")

    await run(gate, always(1.0, 0.0), config=RolloutConfig(max_concurrent=1), generate=broken)
    outcomes = list(gate.finished.values())
    assert [ended.reason for ended in outcomes] == ["failed"] * MAX_ATTEMPTS
    assert [ended.return_prompt for ended in outcomes] == [True] * (MAX_ATTEMPTS - 1) + [False]


async def test_when_every_rollout_fails_the_loop_fails_with_the_agents_own_error() -> None:
    class Broken(Agent):
        async def run_group(self, prompt: Prompt, make_env: Any, client: GenerationClient) -> Sequence[Sample]:
            raise KeyError("no such field")

    with pytest.raises(ExceptionGroup) as caught:
        await run(FakeGate(admit=MAX_FAILURES_IN_A_ROW + 5), Broken())
    assert caught.group_contains(KeyError, match="no such field")


def answered(reward: float, episode: int = 0, **others: Any) -> Sample:
    made = sample(reward, Completion([2, 3], [-0.5, -0.5], [0, 0], "stop"))
    return replace(made, episode=episode, **others)


class Returning(Agent):
    """A group of these samples, or whatever they are."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    async def run_group(self, prompt: Prompt, make_env: Any, client: GenerationClient) -> Any:
        return self._samples


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([answered(1.0)] * 3, r"returned 3 samples for a group of group_size=2 without their episode numbers"),
        ([answered(1.0), answered(0.0, 2)], r"a sample of episode 2; a group of 2 has episodes 0 to 1"),
        ([answered(1.0), "a text"], r"returned \[.*; return a Sample, several, or none"),
        (1.0, r"returned 1.0; return a Sample"),
    ],
)
async def test_what_is_no_group_names_the_agent_and_what_it_did(samples: Any, message: str) -> None:
    gate = FakeGate(admit=MAX_FAILURES_IN_A_ROW)
    with pytest.raises(ExceptionGroup) as caught:
        await run(gate, Returning(samples))
    assert caught.group_contains(EpisodeError, match=f"agent Returning .*{message}")


@pytest.mark.parametrize(
    ("samples", "episodes"),
    [
        ([answered(1.0), answered(0.0)], [0, 1]),
        ([answered(1.0)], [0]),
        ([answered(1.0, 1), answered(0.0, 0), answered(1.0, 1)], [1, 0, 1]),
        ([answered(1.0, 1), answered(1.0, 1)], [1, 1]),
    ],
)
async def test_a_group_may_have_any_number_of_samples_of_its_episodes(
    samples: list[Sample], episodes: list[int]
) -> None:
    (trajectory,) = await run(FakeGate(admit=1), Returning(samples))
    assert [made.episode for made in trajectory.samples] == episodes


async def test_filters_and_shaping_see_an_episode_once_and_its_samples_share_what_it_gains() -> None:
    """Episode 0 has two samples of 2 tokens each and is 2 tokens too long; episode 1 has one, 2 below the limit."""
    samples = [answered(1.0), answered(0.5), answered(0.0, 1)]
    config = RolloutConfig(
        shaping=[ChoiceConfig(name="overlong", params={"max_length": 4, "margin": 2, "penalty": 0.25})],
        filters=[ChoiceConfig(name="success_rate", params={"low": 0.5, "high": 0.5})],
    )
    (trajectory,) = await run(FakeGate(admit=1), Returning(samples), config=config)
    assert [made.reward for made in trajectory.samples] == [0.75, 0.25, 0.0]


async def test_reward_parts_and_the_agents_own_metrics_are_means_over_the_samples_that_have_them() -> None:
    samples = [
        answered(1.0, reward_parts={"format": 1.0}, metrics={"turns": 2.0}),
        answered(0.0, 1, reward_parts={"format": 0.0, "length": -1.0}),
    ]
    (trajectory,) = await run(FakeGate(admit=1), Returning(samples))
    assert 0.0 < trajectory.metrics.pop(FINISHED_AT) <= time.time()
    assert trajectory.metrics == {"agent/turns": 2.0, "reward/format": 0.5, "reward/length": -1.0}


async def test_a_rollout_beyond_its_time_limit_is_dropped_as_timeout() -> None:
    async def never(request: GenerationRequest, rollout_id: str, *, route: Route | None = None) -> GenerationResult:
        await asyncio.Event().wait()
        raise AssertionError

    gate = FakeGate(admit=1)
    await run(gate, always(1.0, 0.0), config=RolloutConfig(rollout_timeout_s=0.05), generate=never)
    assert [ended.reason for ended in gate.finished.values()] == ["timeout"]


class Raising(EchoAgent):
    """Fails on the first prompt with what `fail` raises, and answers the others."""

    def __init__(self, fail: Callable[[], Awaitable[None]]) -> None:
        super().__init__(lambda _: [1.0, 0.0])
        self._fail = fail

    async def run_group(self, prompt: Prompt, make_env: Any, client: GenerationClient) -> Sequence[Sample]:
        if prompt.order == 0:
            await self._fail()
        return await super().run_group(prompt, make_env, client)


async def await_a_cancelled_task() -> None:
    """As where a tool server's session was closed."""
    task = asyncio.create_task(asyncio.sleep(10))
    await asyncio.sleep(0)
    task.cancel()
    await task


async def give_up_waiting() -> None:
    raise TimeoutError("the tool server did not answer")


async def fail_in_a_task_group() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(give_up_waiting())


@pytest.mark.parametrize("fail", [await_a_cancelled_task, give_up_waiting, fail_in_a_task_group])
async def test_what_user_code_raises_of_asyncio_is_a_failure_whose_place_is_free_again(
    fail: Callable[[], Awaitable[None]],
) -> None:
    gate = FakeGate(admit=4)
    await run(gate, Raising(fail), config=RolloutConfig(max_concurrent=1))
    (failed,) = gate.outcome_of(gate.asked[0])
    assert (failed.accepted, failed.reason, failed.return_prompt) == (False, "failed: agent Raising", True)
    assert sum(ended.accepted for ended in gate.finished.values()) == 3
    assert gate.running == set()


async def test_cancelling_the_loop_is_no_failure_of_its_rollouts() -> None:
    started = asyncio.Event()

    async def never(request: GenerationRequest, rollout_id: str, *, route: Route | None = None) -> GenerationResult:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    gate = FakeGate(admit=1, goal=1)
    working = asyncio.create_task(run(gate, always(1.0, 0.0), generate=never))
    await started.wait()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    assert gate.finished == {}


@pytest.mark.parametrize(("rewards", "logprob"), [([float("nan"), 0.0], -0.5), ([1.0, 0.0], None)])
async def test_a_group_with_a_number_that_is_none_fails_before_it_is_pushed(
    rewards: list[float], logprob: float | None
) -> None:
    async def respond(request: GenerationRequest, rollout_id: str, *, route: Route | None = None) -> GenerationResult:
        completion = Completion([2, 3], [-0.5, logprob], [0, 0], "stop")  # type: ignore[list-item]
        return GenerationResult(request.request_id, (completion,) * request.n)

    gate = FakeGate(admit=2)
    assert await run(gate, always(*rewards), generate=respond) == []
    assert {ended.reason for ended in gate.finished.values()} == {"failed: agent EchoAgent"}


async def test_a_failure_of_users_code_is_counted_under_its_name_and_is_no_filters() -> None:
    async def hang() -> None:
        try:
            raise UserCodeError("reward my.py:score", "did not return within 60 s")
        except UserCodeError as error:
            raise ExceptionGroup("of a group", [error]) from error

    gate = FakeGate(admit=3)
    await run(gate, Raising(hang), config=RolloutConfig(max_concurrent=1))
    (failed,) = gate.outcome_of(gate.asked[0])
    assert (failed.reason, failed.return_prompt) == ("failed: reward my.py:score", True)
    assert not is_filter_reason(failed.reason)
    assert is_filter_reason("filter: zero_variance")


class Playing(Agent):
    """One episode per member: those for which `fails` says so raise ValueError, at each try."""

    def __init__(self, fails: Callable[[Prompt], bool]) -> None:
        self._fails = fails
        self.played: Counter[tuple[str, int]] = Counter()

    async def run(self, prompt: Prompt, env: Environment, client: ChatClient) -> Sample:
        self.played[prompt.prompt_id, prompt.member] += 1
        if self._fails(prompt):
            raise ValueError("a broken row")
        await client.generate(GenerationRequest("r", prompt.input_ids, 1, prompt.sampling))
        return answered(float(prompt.member), prompt.member)


LOST = "rollout/lost_episodes: agent Playing raised ValueError"


async def test_an_episode_that_fails_is_tried_again_alone_then_counted_and_the_group_is_the_others() -> None:
    agent, gate = Playing(lambda prompt: prompt.order == 1 and prompt.member == 1), FakeGate(admit=3)
    pushed = {trajectory.order: trajectory for trajectory in await run(gate, agent)}
    assert {order: [made.episode for made in each.samples] for order, each in pushed.items()} == {
        0: [0, 1],
        1: [0],
        2: [0, 1],
    }
    assert pushed[1].metrics[LOST] == 1.0
    assert sum(each.metrics.get(LOST, 0.0) for each in pushed.values()) == 1.0
    assert set(agent.played.values()) == {1, MAX_ATTEMPTS}
    assert agent.played[pushed[1].prompt_id, 0] == 1, "what did not fail is played once"
    assert len(gate.finished) == 3, "a rollout has one place and one end"


async def test_a_group_with_too_few_episodes_left_fails_as_a_whole_and_its_prompt_is_tried_again() -> None:
    agent, gate = Playing(lambda prompt: prompt.order == 1 and prompt.member == 1), FakeGate(admit=3)
    pushed = await run(gate, agent, least_episodes=2)
    assert sorted(each.order for each in pushed) == [0, 2]
    (failed,) = [ended for ended in gate.finished.values() if not ended.accepted]
    assert (failed.reason, failed.return_prompt) == ("failed: agent Playing", True)


async def test_what_was_lost_of_groups_that_are_not_pushed_is_counted_with_the_next_one_that_is() -> None:
    class Flat(Playing):
        """The first prompt's group has no variance."""

        async def run(self, prompt: Prompt, env: Environment, client: ChatClient) -> Sample:
            made = await super().run(prompt, env, client)
            return made if prompt.order else replace(made, reward=0.0)

    filters = RolloutConfig(max_concurrent=1, filters=[ChoiceConfig(name="zero_variance")])
    agent, gate = Flat(lambda prompt: prompt.order == 0 and prompt.member == 1), FakeGate(admit=3)
    first, second = await run(gate, agent, config=filters)
    assert (first.order, second.order) == (1, 2)
    name = LOST.replace("Playing", "Flat")
    assert (first.metrics[name], second.metrics.get(name)) == (1.0, None)


async def test_an_episode_that_plays_beyond_the_rollouts_time_is_given_up_and_the_others_are_trained() -> None:
    class Hanging(Agent):
        async def run(self, prompt: Prompt, env: Environment, client: ChatClient) -> Sample:
            if prompt.member == 1:
                await asyncio.Event().wait()
            return answered(1.0, prompt.member)

    (trajectory,) = await run(FakeGate(admit=1), Hanging(), config=RolloutConfig(rollout_timeout_s=0.05))
    assert [made.episode for made in trajectory.samples] == [0]
    name = "rollout/lost_episodes: agent Hanging exceeded rollout.rollout_timeout_s"
    assert trajectory.metrics[name] == 1.0
    gate = FakeGate(admit=1)
    await run(gate, Hanging(), config=RolloutConfig(rollout_timeout_s=0.05), least_episodes=2)
    assert [ended.reason for ended in gate.finished.values()] == ["timeout"]


class Measured(EchoAgent):
    async def run_group(self, prompt: Prompt, make_env: Any, client: GenerationClient) -> Sequence[Sample]:
        current_meter().rewards["right"].append(float(prompt.order))
        return await super().run_group(prompt, make_env, client)


async def test_a_trajectory_carries_the_times_and_rewards_of_its_own_rollout() -> None:
    pushed = await run(FakeGate(admit=3), Measured(lambda _: [1.0, 0.0]))
    assert [trajectory.metrics["reward/right"] for trajectory in pushed] == [t.order for t in pushed]
    assert all(trajectory.metrics["rollout/generate_s"] > 0.0 for trajectory in pushed)


class SharedGate:
    """The manager's own state machines, as the gate of one worker of several."""

    def __init__(self, service: ManagerService, worker: str) -> None:
        self.service, self.worker = service, worker
        self.played: list[int] = []
        self.telling: set[asyncio.Task[Any]] = set()

    async def allocate(self, rollouts: Sequence[str], *, timeout_s: float) -> AllocateReply:
        request = AllocateRequest(worker=self.worker, rollouts=list(rollouts), timeout_s=timeout_s)
        reply = await self.service.allocate_rollout(request)
        self.played += [granted.order for granted in reply.granted]
        return reply

    def finish(self, rollouts: Sequence[FinishedRollout]) -> None:
        request = FinishRequest(worker=self.worker, finished=list(rollouts))
        task = asyncio.get_running_loop().create_task(self.service.finish_rollout(request))
        self.telling.add(task)
        task.add_done_callback(self.telling.discard)


async def test_two_workers_play_the_data_order_between_them() -> None:
    """Both are mostly full, and the gate has room for both."""
    service = ManagerService(
        batch_size=8, max_staleness=1, routing="least_requests", lease_s=60.0, order=DataOrder(10, 0)
    )
    service.begin(RunBegin())
    gates = [SharedGate(service, f"rollout_worker/{index}") for index in range(2)]
    config = RolloutConfig(max_concurrent=2, filters=[ChoiceConfig("zero_variance")])
    client = cast(RolloutClient, SimpleNamespace(generate=answer))
    components = components_of(always(1.0, 1.0))

    async def push(trajectory: Trajectory) -> None:
        raise AssertionError("all groups are without variance")

    loops = [
        RolloutLoop(components, cast(ManagerClient, gate), client, push, config, GroupRules.of(config))
        for gate in gates
    ]
    working = [asyncio.create_task(loop.run()) for loop in loops]
    try:
        async with asyncio.timeout(LIMIT_S):
            while min(len(gate.played) for gate in gates) < 20 and not any(task.done() for task in working):  # noqa: ASYNC110
                await asyncio.sleep(0)
    finally:
        for task in working:
            task.cancel()
        ends = await asyncio.gather(*working, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
    played = sorted(gates[0].played + gates[1].played)
    assert played == list(range(len(played)))
