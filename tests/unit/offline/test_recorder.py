"""The Recorder keeps what the manager counts, and ends at once if no manager can be told of the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.api import Sample, Trajectory
from asyncrl.comm.ended_rollouts import RolloutCounts
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager import messages as m
from asyncrl.offline import masters as module
from asyncrl.offline.masters import Recorder
from tests.statuses import status_reply


class Manager:
    """A manager that gave up the rollout `lost`."""

    def __init__(self) -> None:
        self.reported: list[str] = []
        self.received_tokens: dict[str, int] = {}

    async def call(self, request: m.Request[Any]) -> Any:
        match request:
            case m.RunBegin():
                self.reported.append("run")
            case m.ReceivedReport(rollouts=rollouts):
                assert self.reported == ["run"]
                self.received_tokens |= {each.rollout_id: each.tokens for each in rollouts}
                return m.ReceivedReply([each.rollout_id for each in rollouts if each.rollout_id == "lost"])
            case m.StatusRequest():
                return status_reply()
            case m.CloseGate():
                self.reported.append("close")
            case m.EndReport(version=version):
                self.reported.append(f"end at {version}")
                return RolloutCounts(2, 0, {}, 2)
        return m.Done()

    async def close(self) -> None:
        self.reported.append("gone")


@pytest.fixture
def make_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def make(manager: Manager, *trajectories: Trajectory) -> Any:
        """A Recorder with only what `main` uses, which receives `trajectories` once it listens."""

        def listen(*_: object, on_message: Callable[[Trajectory], None]) -> Any:
            for each in trajectories:
                on_message(each)
            return SimpleNamespace(endpoint="tcp://here", close=lambda: None)

        monkeypatch.setattr(module, "load_tokenizer", lambda path: SimpleNamespace(decode=str))
        monkeypatch.setattr(module, "ManagerClient", lambda *_, **__: manager)
        monkeypatch.setattr(module, "TrajectoryPuller", listen)
        monkeypatch.setattr(module, "NameBoard", lambda resolver: SimpleNamespace(producers_start=lambda: False))
        monkeypatch.setattr(module, "LONGEST_WAIT_S", 0.01)

        async def registered(*_: object) -> str:
            return "http://manager"

        recorder: Any = Recorder.__new__(Recorder)
        recorder.spec = SimpleNamespace(run_dir=tmp_path, name="recorder/0")
        recorder.config = ExperimentConfig(total_train_steps=1, train_batch_size=2)
        recorder.config.system.stall_timeout_s = 2.0
        recorder.resolver = SimpleNamespace(add=lambda *_, **__: None, get=lambda key: "")
        recorder.registered, recorder.ready = registered, lambda: None
        recorder.http_security = recorder.security = None
        recorder.stop, recorder.log = asyncio.Event(), logging.getLogger("recorder")
        return recorder

    return make


def trajectory(name: str) -> Trajectory:
    tokens, mask = np.arange(4, dtype=np.int32), np.array([0, 1, 1, 1], np.uint8)
    sample = Sample(tokens, mask, np.zeros(4, np.float32), np.zeros(4, np.int32), 1.0)
    return Trajectory(name, f"e0-{name[-1]}", 0, (sample, sample))


async def test_a_report_that_fails_ends_the_recorder(make_recorder: Callable[..., Any]) -> None:
    manager: Any = Manager()

    async def fail(begin: m.RunBegin) -> None:
        raise KeyError("a defect")

    manager.call = fail
    with pytest.raises(KeyError, match="a defect"):
        await make_recorder(manager).main()
    assert manager.reported == ["gone"]


async def test_what_a_given_up_worker_delivers_late_is_not_kept(
    make_recorder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt is played again, and no file may have it twice."""
    kept: list[str] = []
    monkeypatch.setattr(module, "rows_of", lambda trajectory, *_: [trajectory.rollout_id])
    monkeypatch.setattr(module, "write_samples", lambda folder, step, name, rows, max_bytes: kept.extend(rows))
    manager = Manager()
    async with asyncio.timeout(300):
        await make_recorder(manager, *map(trajectory, ("r1", "lost", "r2", "r3"))).main()
    assert kept == ["r1", "r2"], "as many as one step of two rollouts trains"
    assert manager.received_tokens == {"r1": 8, "lost": 8, "r2": 8}
    assert manager.reported == ["run", "close", "end at 0", "gone"]
