"""Any process may die at any moment: the launcher says which and why, saves what it can, and leaves nothing."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..conftest import LIMIT_S, Gate

pytestmark = pytest.mark.slow

ENDLESS = 100_000
STILL_S = 15.0


def saved_version(run: Any) -> int:
    """Version of the newest checkpoint."""
    states = [json.loads(file.read_text()) for file in (run.run_dir / "checkpoints").glob("v*/state.json")]
    return max((state["version"] for state in states), default=0)


def balanced(run: Any) -> bool:
    """True if the books were printed and balance."""
    (line,) = [line for line in run.lines if line.startswith("books ")]
    return "submitted" in line and "≠" not in line


def last_step(run: Any) -> int:
    return int(max(row["step"] for row in run.rows()))


@pytest.mark.parametrize(
    ("kind", "can_save"),
    [
        ("master_worker", False),
        ("model_worker", False),
        ("gserver_manager", True),
    ],
)
def test_a_killed_process_is_named_and_everything_ends(start_run: Any, kind: str, can_save: bool) -> None:
    run = start_run(total_train_steps=ENDLESS, checkpoint__interval=0, system__restarts_per_process=0)
    run.wait_for_step(3)
    run.worker(f"{kind}/0").kill()
    assert run.wait() == 1, run.output + run.logs()
    assert f"FAILED: {kind}/0" in run.output
    assert "SIGKILL" in run.output
    assert run.survivors() == []
    assert balanced(run), run.output
    if can_save:
        assert saved_version(run) >= 3, run.output + run.logs()


def test_a_killed_launcher_takes_every_process_along_once_the_step_is_saved(
    start_run: Any, gate: Callable[[int], Gate]
) -> None:
    """The same command waits for that, and goes on from there."""
    held = gate(ENDLESS)
    settings = {"total_train_steps": ENDLESS, "checkpoint__interval": 0, "eval__interval": 0} | held.settings
    run = start_run(**settings)
    run.wait_for_step(3)
    run.process.kill()
    held.let_make(0)  # so that the metrics stay as the one that was killed leaves them
    again = start_run(**settings)
    again.wait_for_line("continuing from checkpoint")
    assert run.survivors() == []
    assert saved_version(run) == last_step(run) >= 3
    assert f"continuing from checkpoint v{saved_version(run)}: step" in again.output


def test_a_stop_names_the_rank_that_does_not_answer_and_ends_without_it(start_run: Any, ctrl_c: Any) -> None:
    """Its peer waits for it in a collective, or the master for its part of the checkpoint."""
    settings = {"total_train_steps": ENDLESS, "checkpoint__interval": 0, "eval__interval": 0}
    run = start_run(trainer__parallel="d2", system__stop_timeout_s=3, **settings)
    run.wait_for_step(1)
    run.worker("model_worker/1").suspend()
    ctrl_c(run)
    assert run.wait() == 1, run.output + run.logs()
    assert re.search(r"failed: no answer from .*model_worker/1 for 3 s", run.output), run.output
    assert run.survivors() == []


STUCK_EVALUATION = """
import asyncio
from asyncrl.plugins.agents.single_turn import SingleTurnAgent

class Stuck(SingleTurnAgent):
    "Answers prompts of the training, and none of an evaluation."

    async def run(self, prompt, env, client):
        if prompt.prompt_id.startswith("eval-"):
            await asyncio.Event().wait()
        return await super().run(prompt, env, client)
"""


@pytest.mark.parametrize(("dies", "code"), [("", 130), ("generation_server/0", 1)])
def test_an_end_while_a_step_waits_for_an_evaluation_leaves_a_checkpoint_of_that_step(
    start_run: Any, ctrl_c: Any, tmp_path: Path, dies: str, code: int
) -> None:
    """Version 2 is to be evaluated, so it waits for the evaluation of version 0 to end; so do all rows of metrics."""
    (tmp_path / "stuck.py").write_text(STUCK_EVALUATION)
    agent = f"{tmp_path / 'stuck.py'}:Stuck"
    settings = {"eval__interval": 2, "agent__path": agent, "system__restarts_per_process": 0}
    run = start_run(total_train_steps=ENDLESS, checkpoint__interval=0, **settings)
    run.wait_for_file("weights/actor/v2")
    if dies:
        run.worker(dies).kill()
    else:
        ctrl_c(run)
    assert run.wait() == code, run.output
    assert saved_version(run) == 2, run.output + run.logs()
    assert run.survivors() == []


def test_ctrl_c_twice_stops_at_once(start_run: Any, ctrl_c: Any) -> None:
    run = start_run(total_train_steps=ENDLESS, checkpoint__interval=0)  # so that there is something to save at any time
    run.wait_for_step(1)
    psutil.Process(run.worker("model_worker/0").pid).send_signal(signal.SIGSTOP)  # no checkpoint can come of it
    ctrl_c(run)
    run.wait_for_line("once more")
    ctrl_c(run)
    assert run.wait() == 130, run.output
    assert balanced(run), run.output
    assert run.survivors() == []


def test_processes_that_are_stopped_for_a_while_end_nothing(start_run: Any, ctrl_c: Any) -> None:
    """A ModelWorker for a minute and more, which is longer than its lease and what a poll may take; a master, of
    another run, for longer than that may be without a step.
    """
    settings = {"total_train_steps": ENDLESS, "eval__interval": 0}
    ranks = start_run(trial_name="rank", system__stall_timeout_s=3 * LIMIT_S, **settings)
    masters = start_run(trial_name="master", system__stall_timeout_s=40.0, **settings)
    stopped: dict[str, psutil.Process] = {}
    for run, kind in ((ranks, "model_worker"), (masters, "master_worker")):
        run.wait_for_step(2)
        stopped[kind] = run.worker(f"{kind}/0")
        stopped[kind].suspend()
    for run, kind, pause_s in ((masters, "master_worker", 43.0), (ranks, "model_worker", 60.0 - 43.0)):
        with pytest.raises(subprocess.TimeoutExpired):  # the launcher has nothing to report meanwhile
            run.process.wait(pause_s)
        before = last_step(run)
        stopped[kind].resume()
        run.wait_for_step(before + 3)
        ctrl_c(run)
        assert run.wait() == 130, run.output + run.logs()
        assert [row["step"] for row in run.rows()] == list(range(1, last_step(run) + 1))
        assert balanced(run), run.output
        assert run.survivors() == []


def test_a_machine_that_stands_still_for_longer_than_a_lease_costs_nothing(start_run: Any, ctrl_c: Any) -> None:
    """As one whose lid is closed, or whose other guests want its processors: nobody takes another for dead then."""
    run = start_run(total_train_steps=ENDLESS, eval__interval=0)
    run.wait_for_step(3)
    for order in (1, -1):  # in which they go on
        everything = [psutil.Process(run.process.pid), *run.remember_processes().values()][::order]
        for process in everything:
            process.suspend()
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(STILL_S)
        before = last_step(run)
        for process in everything:
            process.resume()
        run.wait_for_step(before + 3)
    ctrl_c(run)
    assert run.wait() == 130, run.output + run.logs()
    summary = run.summary()
    assert summary["restarts"] == {}
    assert set(summary["books"]["dropped"]) <= {"stale"}, run.logs()
