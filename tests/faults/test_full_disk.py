"""A disk that is full or read-only for a while holds the run up; nothing is lost, and it goes on afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.comm import names
from asyncrl.comm.http_client import JsonHttp
from asyncrl.comm.security import RunSecret
from asyncrl.config.run_dir import SECRET_FILE, read_run_config
from asyncrl.data.prompt_queue import UsedPrompts
from asyncrl.manager.messages import StatusReply
from asyncrl.runtime.trials.claim import open_resolver

from ..conftest import LIMIT_S, SETTINGS, Gate

pytestmark = pytest.mark.slow

BATCH = SETTINGS["train_batch_size"]
UNWRITABLE_S = 12.0
WAITED = re.compile(r"wrote .+ after [\d.]+ s|calls are retried")
"""What of it is told: that it waits cannot be told as long as the logs are full, too."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB below the folder of the run."""
    folder = tmp_path / "tiny"
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "tmpfs", str(folder)]
    if os.getuid() != 0 or not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def full(disk: Path) -> Iterator[Callable[[], None]]:
    """It takes nothing more; the call fills what was freed meanwhile: removed checkpoints and weights make no room."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:

        def fill() -> None:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))

        fill()
        yield fill
    ballast.unlink()


@contextlib.contextmanager
def read_only(disk: Path) -> Iterator[Callable[[], None]]:
    """Nothing there can be made, opened for writing, renamed or removed; what is open already can be written."""
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
        yield lambda: None
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def counter(run: Any) -> Callable[[], int]:
    """Return a call for the number of trained rollouts, by the run's manager, which needs no disk to answer."""
    with open_resolver(read_run_config(run.run_dir), run.run_dir) as resolver:
        url = resolver.wait(names.MANAGER_KEY, LIMIT_S)
    security = RunSecret.load(run.run_dir / SECRET_FILE).http()

    async def ask() -> int:
        http = JsonHttp(security)
        try:
            reply = await http.call("POST", f"{url}/status", timeout_s=LIMIT_S, reply=StatusReply)
        finally:
            await http.close()
        return reply.gate.counts.trained

    return lambda: asyncio.run(ask())


def told_waits(run: Any) -> int:
    """Return how often the logs tell of a wait for the disk."""
    return sum(len(WAITED.findall(log.read_text())) for log in (run.run_dir / "logs").glob("*.log"))


def test_a_disk_that_takes_nothing_holds_the_run_up_and_loses_nothing(
    start_run: Any, gate: Callable[[int], Gate], small_disk: Path
) -> None:
    """It is full, and later read-only, for longer than any lease, and than it takes until a step has to be written."""
    steps, held, waits = 16, gate(3), list[int]()
    run = start_run(total_train_steps=steps, checkpoint__interval=1, **held.settings)
    for begin, end, unwritable in ((3, 10, full), (10, steps, read_only)):
        run.wait_for_step(begin)
        waits.append(told_waits(run))
        trained = counter(run)
        with unwritable(small_disk) as keep_so:
            held.let_make(end)
            limit, until = time.monotonic() + LIMIT_S, math.inf
            while (now := time.monotonic()) < until:
                assert now < limit, run.output + run.logs()
                assert run.process.poll() is None, run.output
                keep_so()
                if until == math.inf and trained() >= (begin + 1) * BATCH:
                    until = now + UNWRITABLE_S
                threading.Event().wait(0.02)
            held_at = max(row["step"] for row in run.rows())
        assert held_at < end
    assert run.wait() == 0, run.output + run.logs()
    assert [row["step"] for row in run.rows()] == list(range(1, steps + 1))
    assert "FAILED" not in run.output
    assert run.summary()["restarts"] == {}
    state = json.loads((run.run_dir / "checkpoints" / f"v{steps}" / "state.json").read_text())
    assert len(UsedPrompts.from_json(state["master_state"]["gate"]["used"])) == steps * BATCH
    waits.append(told_waits(run))
    assert waits == sorted(set(waits)), run.logs()
