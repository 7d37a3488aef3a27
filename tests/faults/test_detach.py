"""A detached run goes on without a terminal; the same command shows it, and Ctrl-C there ends it after a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from asyncrl.commands.attach import attach
from asyncrl.runtime.trials.claim import read_holder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENDLESS = 100_000


@pytest.fixture(autouse=True)
def as_at_a_terminal() -> Iterator[None]:
    """Its end ends what runs below it, though the tests themselves may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def detached(start_run: Any) -> Iterator[Any]:
    """A run in the background whose command has ended; what is left of it is killed."""
    run = start_run("async_ppo --detach", total_train_steps=ENDLESS, eval__interval=0)
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
    detached: Any, start_run: Any, ctrl_c: Any
) -> None:
    """So it does what was done before; another command is refused, and closing the terminal ends nothing."""
    assert "started 5 processes" in detached.output
    assert "continues in the background" in detached.output
    again = start_run("async_ppo --detach", total_train_steps=ENDLESS, eval__interval=0)
    again.wait_for_step(2)
    os.kill(again.process.pid, signal.SIGHUP)
    assert again.wait() == -signal.SIGHUP

    other = start_run(total_train_steps=ENDLESS, eval__interval=0, train_batch_size=2)
    assert other.wait() == 1
    assert "is running with other settings (train_batch_size: 4 -> 2)" in other.output

    before = int(detached.rows()[-1]["step"])
    last = start_run(total_train_steps=ENDLESS, eval__interval=0)
    last.wait_for_step(before + 1)
    ctrl_c(last)
    assert last.wait() == 130, last.output
    assert "stopping after a checkpoint" in last.output
    steps = detached.summary()["steps"]
    assert steps > before
    assert (detached.run_dir / "checkpoints" / f"v{steps}").is_dir()
    assert detached.survivors() == []
    assert attach(detached.run_dir) is None


def test_a_detached_run_whose_launcher_is_killed_goes_on_with_the_same_command(detached: Any, start_run: Any) -> None:
    """Every process goes with the launcher; what is attached says that it failed."""
    watching = start_run(total_train_steps=ENDLESS, eval__interval=0)
    watching.wait_for_step(4)
    holder = read_holder(detached.run_dir)
    assert holder is not None
    os.kill(holder.pid, signal.SIGKILL)
    assert watching.wait() == 1
    assert detached.survivors() == []  # the step in hand is saved
    goal = int(detached.rows()[-1]["step"]) + 2
    again = start_run(total_train_steps=goal, eval__interval=0)
    assert again.wait() == 0, again.output + again.logs()
    assert "continuing from checkpoint v" in again.output
    assert [row["step"] for row in again.rows()] == list(range(1, goal + 1))
