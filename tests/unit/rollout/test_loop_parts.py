"""The parts of the rollout loop, each alone: places, failures, and the counts that travel with a trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncrl.api import (
    ChatClient,
    Completion,
    Environment,
    EpisodeTimeout,
    GenerationRequest,
    GenerationResult,
    Prompt,
    SamplingParams,
    Trajectory,
)
from asyncrl.api.agent import agent_of
from asyncrl.api.trajectory import GENERATED
from asyncrl.comm.ended_rollouts import LOST_EPISODES, DropReason
from asyncrl.data.prompt_format import InvalidPrompt, OverlongPrompt
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.messages import AllocateReply, GrantedRollout, Route
from asyncrl.rollout.episode import RetryLimits, run_group
from asyncrl.rollout.loop import MAX_ATTEMPTS, MAX_FAILURES_IN_A_ROW, RolloutLoop, RolloutSlots
from asyncrl.rollout.policy_answers import PolicyAnswers
from asyncrl.rollout.rollout_client import RolloutClient, RolloutPolicy
from asyncrl.rollout.settings import RolloutConfig
from asyncrl.rollout.user_code_pool.call_records import Activity, current_meter, metered, timed

GRANTED = GrantedRollout("r", "p", 0, 0, 0, 0, 0)
LOST = f"{LOST_EPISODES}env my.py:Game raised ValueError"


class Gate:
    """Grants one rollout of each request, and keeps the ids that it was asked for."""

    def __init__(self) -> None:
        self.asked: list[Sequence[str]] = []

    async def allocate(self, ids: Sequence[str], *, timeout_s: float) -> AllocateReply:
        self.asked.append(list(ids))
        return AllocateReply([GrantedRollout(ids[0], "p", 0, 0, 0, 0, 0)], 0, False)


async def test_a_granted_rollout_takes_a_place_and_the_other_ids_are_asked_for_again() -> None:
    gate = Gate()
    slots = RolloutSlots(cast(ManagerClient, gate), 3)
    assert len(await slots.granted()) == 1
    assert (slots.running, slots.figures()) == (1, {"rollouts": 1, "slots": 3})
    await slots.granted()
    assert gate.asked[1] == gate.asked[0][1:], "ids without an answer are repeated"
    slots.free()
    assert slots.running == 1


def loop_of(running: int, push: Any = None) -> RolloutLoop:
    """A loop in which so many rollouts run."""
    loop = RolloutLoop(cast(Any, None), cast(Any, None), cast(Any, None), push, RolloutConfig())
    loop.slots._free -= running
    return loop


def test_a_failed_rollout_is_tried_again_until_its_attempts_are_used() -> None:
    loop = loop_of(running=4)
    again = loop._failed(GRANTED, RuntimeError("x"), "reward my.py:score")
    assert (again.reason, again.return_prompt) == ("failed: reward my.py:score", True)
    last = GrantedRollout("r", "p", 0, 0, 0, MAX_ATTEMPTS - 1, 0)
    assert not loop._failed(last, RuntimeError("x"), None).return_prompt
    invalid = loop._failed(GRANTED, InvalidPrompt("no prompt"), None)
    assert (invalid.reason, invalid.return_prompt) == (DropReason.invalid_prompt, False)


@pytest.mark.parametrize("running", [1, MAX_FAILURES_IN_A_ROW + 3])
def test_the_loop_ends_if_all_fail_and_these_outnumber_the_running_rollouts(running: int) -> None:
    loop, most = loop_of(running), max(MAX_FAILURES_IN_A_ROW, running)
    for _ in range(most - 1):
        loop._failed(GRANTED, RuntimeError("x"), None)
    loop._failed(GRANTED, OverlongPrompt("too long"), None)  # it does not count
    with pytest.raises(RuntimeError, match="the last"):
        loop._failed(GRANTED, RuntimeError("the last"), None)


async def test_rollouts_that_fail_now_and_then_do_not_end_the_loop() -> None:
    fails = [*[True] * (MAX_FAILURES_IN_A_ROW - 1), False] * 3
    ends: list[Any] = []

    async def play_to_train(*_: object) -> tuple[list[Any], dict[str, float]]:
        if fails.pop(0):
            raise RuntimeError("x")
        return [], {}

    loop = loop_of(running=1)
    prompts = SimpleNamespace(train=lambda *_: SimpleNamespace())
    loop._components = cast(Any, SimpleNamespace(prompts=prompts, play_to_train=play_to_train, agent=object()))
    loop._gate = cast(Any, SimpleNamespace(finish=ends.extend))
    while fails:
        await loop._roll_out(GRANTED)
        loop.slots._free -= 1  # the next one runs
    assert len(ends) == 3 * MAX_FAILURES_IN_A_ROW


async def test_lost_episodes_travel_with_the_next_trajectory_that_arrives() -> None:
    arrived: list[dict[str, float]] = []
    fails = [True, False, False]

    async def push(trajectory: Trajectory) -> None:
        if fails.pop(0):
            raise ConnectionError("no rank")
        arrived.append(dict(trajectory.metrics))

    async def play_to_train(*_: object) -> tuple[list[Any], dict[str, float]]:
        return [], {LOST: lost.pop(0), "chat/calls": 5.0}

    loop, lost = loop_of(1, push), [2.0, 1.0]
    loop._components = cast(Any, SimpleNamespace(play_to_train=play_to_train))
    policy = cast(Any, SimpleNamespace(answers=None))
    _, metrics = await loop._episodes(cast(Any, None), policy)
    assert metrics == {"chat/calls": 5.0}
    with pytest.raises(ConnectionError):
        await loop._send(Trajectory("r0", "p", 0, (), {}))
    await loop._episodes(cast(Any, None), policy)
    await loop._send(Trajectory("r1", "p", 0, (), {}))
    await loop._send(Trajectory("r2", "p", 0, (), {}))
    assert [metrics.get(LOST) for metrics in arrived] == [3.0, None]


async def test_a_rollouts_first_own_request_goes_to_its_route_and_opponents_are_counted_by_version() -> None:
    routes: list[Route | None] = []

    class Client:
        async def generate(self, request: GenerationRequest, _: str, *, route: Route | None) -> GenerationResult:
            routes.append(route)
            return GenerationResult(request.request_id, (Completion([1, 2, 3], [-1.0] * 3, [4, 4, 7], "stop"),))

    route = Route("http://server", 0)
    policy = RolloutPolicy(cast(RolloutClient, cast(Any, Client())), "r", route, PolicyAnswers(("judge",)))
    for name in ("past", "", "", "judge"):
        await policy.generate(GenerationRequest("q", (1,), 1, SamplingParams(), policy=name))
    assert routes == [None, route, None, None]
    assert policy.answers is not None
    found = policy.answers.metrics()
    assert found["policy_server/past/version"] == 5.0
    assert (found["policy_server/past/oldest_version"], found["policy_server/past/newest_version"]) == (4.0, 7.0)
    assert not any(name.startswith("policy_server/judge") for name in found)
    generated = {name.removeprefix(GENERATED): count for name, count in found.items() if name.startswith(GENERATED)}
    assert generated == {"actor": 6.0, "judge": 3.0}


async def test_a_rollouts_time_stands_still_while_something_works_that_has_a_limit_of_its_own() -> None:
    """A server that decodes, an environment, a reward, a tool; an answer may take longer than `rollout_timeout_s`."""
    with metered() as meter:
        before = meter.own_s
        with meter.limited(), timed(Activity.reward):
            await asyncio.sleep(0.05)
        elsewhere = meter.own_s - before
        with timed(Activity.generate):  # which may also wait for a server
            await asyncio.sleep(0.05)
    assert elsewhere < 0.04
    assert meter.own_s - before >= 0.05


async def test_an_episode_is_ended_by_its_own_time_alone() -> None:
    limits = RetryLimits(limit_s=0.1)

    async def slow(prompt: Prompt, env: Environment, client: ChatClient) -> None:
        with current_meter().limited():
            await asyncio.sleep(0.3)

    async def hanging(prompt: Prompt, env: Environment, client: ChatClient) -> None:
        await slow(prompt, env, client)
        await asyncio.Event().wait()

    def client(policy: Any, prompt: Prompt) -> Any:
        return SimpleNamespace(metrics={}, close=lambda: None)

    async def close() -> None:
        return

    env = cast(Environment, SimpleNamespace(close=close))

    async def play(run: Any) -> Any:
        prompt = Prompt("e0-0", 0, {}, (1,), 1, SamplingParams())
        with metered():
            return await run_group(agent_of(run, {}), lambda: env, prompt, cast(Any, None), client, limits)

    assert await play(slow) == ([], {})
    with pytest.raises(EpisodeTimeout):
        await play(hanging)
