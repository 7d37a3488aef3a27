"""The Recorder ends at once if no manager can be told of the run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.client import GateStatus
from asyncrl.master.offline import recorder as module
from asyncrl.master.offline.recorder import Recorder


class Manager:
    """A manager to which the run cannot be reported."""

    def __init__(self, *_: object, **__: object) -> None:
        self.closed = False

    async def report_run(self, report: object) -> None:
        raise KeyError("a defect")

    async def status(self) -> GateStatus:
        return GateStatus()

    async def describe(self) -> str:
        return "nothing runs"

    async def close(self) -> None:
        self.closed = True


async def test_a_report_that_fails_ends_the_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = SimpleNamespace(manager_process=lambda: "0/17", producers_start=lambda: False)
    puller = SimpleNamespace(endpoint="tcp://here", close=lambda: None)
    monkeypatch.setattr(module, "load_tokenizer", lambda path: SimpleNamespace(decode=str))
    monkeypatch.setattr(module, "ManagerClient", Manager)
    monkeypatch.setattr(module, "TrajectoryPuller", lambda *_, **__: puller)
    monkeypatch.setattr(module, "NameBoard", lambda resolver: board)
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 0.01)

    async def registered(*_: object) -> str:
        return "http://manager"

    recorder: Any = Recorder.__new__(Recorder)  # only what `main` uses
    recorder.spec = SimpleNamespace(run_dir=tmp_path, name="recorder/0")
    recorder.config = ExperimentConfig()
    recorder.config.system.stall_timeout_s = 2.0
    recorder.resolver = SimpleNamespace(add=lambda *_, **__: None, get=lambda key: "")
    recorder.registered, recorder.ready = registered, lambda: None
    recorder.http_security = recorder.security = None
    recorder.stop = asyncio.Event()
    with pytest.raises(KeyError, match="a defect"):
        await recorder.main()
