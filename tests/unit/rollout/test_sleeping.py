"""Environments and rewards that sleep synchronously: as many at a time as is set, the loop free, the cause named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncrl.api import Completion, GenerationRequest, GenerationResult, RunIn, Trajectory
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.messages import AllocateReply, FinishedRollout, GrantedRollout
from asyncrl.manager.rollouts.workers import Workers
from asyncrl.rollout.loop import RolloutLoop
from asyncrl.rollout.rollout_client import RolloutClient
from asyncrl.rollout.user_code.components import UserComponents

MINE = '''
import os
import time
import uuid
from pathlib import Path

from asyncrl.api import Environment

HERE = Path(__file__).parent


def sleep_until_told(what):
    """Sleeps, without a word to any event loop, until the file `go` is there."""
    (HERE / f"{what}-{uuid.uuid4().hex}").touch()
    while not (HERE / "go").exists():
        time.sleep(0.01)


class Sleeps(Environment):
    def __init__(self, *, reward):
        self._reward = reward

    def reset(self, *, seed=None, options=None):
        return "", {}

    def step(self, action):
        sleep_until_told("step")
        return "", self._reward({}, action), True, False, {}


def sleeps(data, completion):
    if "SLEEPING_REWARD" in (HERE / "what").read_text():
        sleep_until_told("reward")
    return 1.0


class Quick(Sleeps):
    def step(self, action):
        return "", self._reward({}, action), True, False, {}
'''
ROLLOUTS, GROUP = 3, 2
BEATS = 20


class Gate:
    """Admits `ROLLOUTS` rollouts."""

    def __init__(self) -> None:
        self.admit, self.ended, self.all_ended = ROLLOUTS, list[FinishedRollout](), asyncio.Event()

    async def allocate(self, rollouts: Sequence[str], *, timeout_s: float) -> AllocateReply:
        granted = rollouts[: self.admit]
        if not granted:
            await asyncio.Event().wait()
        orders = range(ROLLOUTS - self.admit, ROLLOUTS)
        self.admit -= len(granted)
        refs = [(name, DataOrder(100, 0).ref(order)) for name, order in zip(granted, orders, strict=False)]
        grants = [GrantedRollout(name, ref.prompt_id, ref.order, ref.row, 0, 0, 0) for name, ref in refs]
        return AllocateReply(grants, 0, False)

    def finish(self, rollouts: Sequence[FinishedRollout]) -> None:
        self.ended += rollouts
        if len(self.ended) == ROLLOUTS:
            self.all_ended.set()


async def answer(request: GenerationRequest, rollout_id: str, **_: Any) -> GenerationResult:
    return GenerationResult(request.request_id, (Completion([2, 3], [-0.5, -0.5], [0, 0], "stop"),) * request.n)


@pytest.mark.parametrize(
    ("sleeper", "run_in", "at_a_time"),
    [
        ("step", RunIn.thread, ROLLOUTS * GROUP),
        ("step", RunIn.process, 2),
        ("reward", RunIn.thread, ROLLOUTS * GROUP),
        ("reward", RunIn.process, 2),
    ],
)
async def test_what_sleeps_holds_up_nothing_but_itself_and_is_named(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, sleeper: str, run_in: RunIn, at_a_time: int
) -> None:
    module = tmp_path / "mine.py"
    module.write_text(MINE)
    (tmp_path / "what").write_text("SLEEPING_REWARD" if sleeper == "reward" else "")
    config = ExperimentConfig()
    config.model.path, config.group_size = str(tiny_model), GROUP
    config.env.path, config.reward.path = f"{module}:{'Sleeps' if sleeper == 'step' else 'Quick'}", f"{module}:sleeps"
    config.rollout.user_code.slow_call_s, config.rollout.user_code.processes, config.env.processes = 0.001, 2, 2
    (config.env if sleeper == "step" else config.reward).run_in = run_in
    components, gate, pushed = UserComponents(config), Gate(), list[Trajectory]()

    async def push(trajectory: Trajectory) -> None:
        pushed.append(trajectory)

    def sleeping() -> int:
        return len(list(tmp_path.glob(f"{sleeper}-*")))

    parts: Any = components, cast(ManagerClient, gate)
    client = cast(RolloutClient, SimpleNamespace(generate=answer))
    loop = RolloutLoop(*parts, client, push, config.rollout)
    beats, leases = 0, Workers(lease_s=60.0)
    async with components.runner, asyncio.timeout(300):
        working = asyncio.create_task(loop.run())
        while beats < BEATS or sleeping() < at_a_time:  # as the manager's client, which renews the lease
            leases.renew("rollout_worker/0", asyncio.get_running_loop().time())
            beats += sleeping() >= at_a_time
            await asyncio.sleep(0.01)
        assert sleeping() == at_a_time, "as many as are configured, no more"
        assert not pushed
        assert leases.expire(asyncio.get_running_loop().time()) == []
        (tmp_path / "go").touch()
        await gate.all_ended.wait()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    assert all(ended.accepted for ended in gate.ended)
    assert len(pushed) == ROLLOUTS
    activity = "rollout/env_s" if sleeper == "step" else "rollout/reward_s"
    assert max(trajectory.metrics[activity] for trajectory in pushed) > 0.01 * BEATS / 2
    label = f"env {module}:Sleeps.step took " if sleeper == "step" else f"reward {module}:sleeps took "
    assert any(message.startswith(label) for message in caplog.messages)
