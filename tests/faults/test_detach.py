"""A detached run goes on without a terminal; the same command shows it, and Ctrl-C there ends it after a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from asyncrl.config.run_dir import CHECKPOINTS_DIR, versions_in
from asyncrl.launch.commands.attach import attach
from asyncrl.runtime.trials.claim import read_holder

from ..conftest import Gate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ENDLESS = 100_000
SETTINGS: dict[str, Any] = {"total_train_steps": ENDLESS, "checkpoint__interval": 0, "eval__interval": 0}


@pytest.fixture(autouse=True)
def as_at_a_terminal() -> Iterator[None]:
    """Its end ends what runs below it, though the tests themselves may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def held(gate: Callable[[int], Gate]) -> Gate:
    """The gate of the run, which is open."""
    return gate(ENDLESS)


@pytest.fixture
def detached(start_run: Any, held: Gate) -> Iterator[Any]:
    """A run in the background whose command has ended; what is left of it is killed."""
    run = start_run("async_ppo --detach", **SETTINGS, **held.settings)
    assert run.wait() == 0, run.output
    holder = read_holder(run.run_dir)
    assert holder is not None
    launcher = psutil.Process(holder.pid)
    run.seen |= {process.pid: process for process in (launcher, *launcher.children(recursive=True))}
    yield run
    for process in run.seen.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_the_same_command_shows_a_detached_run_and_ctrl_c_there_ends_it(
    detached: Any, held: Gate, start_run: Any, ctrl_c: Any
) -> None:
    """So it does what was done before; another command is refused, and closing the terminal ends nothing."""
    assert "started 5 processes" in detached.output
    assert "continues in the background" in detached.output
    again = start_run("async_ppo --detach", **SETTINGS, **held.settings)
    again.wait_for_step(2)
    os.kill(again.process.pid, signal.SIGHUP)
    assert again.wait() == -signal.SIGHUP

    other = start_run(**SETTINGS, **held.settings, train_batch_size=2)
    assert other.wait() == 1
    assert "is running with other settings (train_batch_size: 4 -> 2)" in other.output

    before = int(detached.rows()[-1]["step"])
    last = start_run(**SETTINGS, **held.settings)
    last.wait_for_step(before + 1)
    ctrl_c(last)
    assert last.wait() == 130, last.output
    assert "stopping after a checkpoint" in last.output
    steps = detached.summary()["steps"]
    assert steps > before
    assert (detached.run_dir / "checkpoints" / f"v{steps}").is_dir()
    assert detached.survivors() == []
    assert attach(detached.run_dir) is None


def test_a_detached_run_whose_launcher_is_killed_saves_its_step_and_goes_on_with_the_same_command(
    detached: Any, held: Gate, start_run: Any, ctrl_c: Any
) -> None:
    """Every process goes with the launcher, once the step in hand is saved; what is attached says that it failed. The
    command waits for that, and goes on from there.
    """
    watching = start_run(**SETTINGS, **held.settings)
    watching.wait_for_step(4)
    holder = read_holder(detached.run_dir)
    assert holder is not None
    os.kill(holder.pid, signal.SIGKILL)
    held.let_make(0)  # so that the metrics stay as the one that was killed leaves them
    again = start_run(**SETTINGS, **held.settings)
    assert watching.wait() == 1
    again.wait_for_line("continuing from checkpoint")
    assert detached.survivors() == []
    saved = versions_in(detached.run_dir / CHECKPOINTS_DIR)[-1]
    assert saved == detached.rows()[-1]["step"] >= 4
    assert f"continuing from checkpoint v{saved}: step" in again.output
    held.open()
    again.wait_for_step(saved + 2)
    ctrl_c(again)
    assert again.wait() == 130, again.output + again.logs()
    assert [row["step"] for row in again.rows()] == list(range(1, again.summary()["steps"] + 1))
