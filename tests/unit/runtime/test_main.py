"""The entry point of a worker process."""

from __future__ import annotations

import os
import pkgutil
import sys
from pathlib import Path

import pytest

from asyncrl.runtime import main as entry
from asyncrl.runtime.process.worker import WorkerSpec


def test_a_rank_that_another_launcher_left_in_the_environment_is_not_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch would take the GPU with that number, and a training rank sees one."""
    seen: list[str | None] = []

    class Probe:
        def __init__(self, spec: WorkerSpec) -> None:
            assert (spec.kind, spec.index) == ("model_worker", 3)

        def start(self) -> int:
            seen.append(os.environ.get("LOCAL_RANK"))
            return 7

    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(pkgutil, "resolve_name", lambda path: Probe)
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    monkeypatch.setattr(sys, "argv", ["main", "model_worker", "3", "--run-dir", str(tmp_path)])
    assert entry.main() == 7
    assert seen == [None]
