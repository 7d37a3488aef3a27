"""Any process may die at any moment: the launcher says which and why, saves what it can, and leaves nothing."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..conftest import LIMIT_S

pytestmark = pytest.mark.slow

ENDLESS = 100_000
STILL_S = 15.0


def saved_version(run: Any) -> int:
    """Version of the newest checkpoint."""
    states = [json.loads(file.read_text()) for file in (run.run_dir / "checkpoints").glob("v*/state.json")]
    return max((state["version"] for state in states), default=0)


def balanced(run: Any) -> bool:
    """True if the rollout counts were printed and balance."""
    (line,) = [line for line in run.lines if line.startswith("rollouts ")]
    return "submitted" in line and "≠" not in line


def last_step(run: Any) -> int:
    return int(max(row["step"] for row in run.rows()))


def test_a_killed_master_is_named_and_everything_ends(start_run: Any) -> None:
    run = start_run(total_train_steps=ENDLESS, checkpoint__interval=0, system__restarts_per_process=0)
    run.wait_for_step(3)
    run.worker("master_worker/0").kill()
    assert run.wait() == 1, run.output + run.logs()
    assert_names(run, "master_worker/0")


def assert_names(run: Any, killed: str) -> None:
    """The launcher has said who was killed; nothing is left, and the rollout counts balance."""
    assert f"FAILED: {killed}" in run.output
    assert "SIGKILL" in run.output
    assert run.survivors() == []
    assert balanced(run), run.output


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


@pytest.mark.parametrize(("dies", "code"), [("", 130), ("gserver_manager/0", 1)])
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
    if dies:
        assert_names(run, dies)


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
    """A ModelWorker for a minute and more, which is longer than its lease and what a poll may take. Beside it, of
    another run, a master for longer than that may be without a step; and then all of its processes for longer than a
    lease, as on a machine whose lid is closed, or whose other guests want its processors: nobody takes another for
    dead.
    """
    settings = {"total_train_steps": ENDLESS, "eval__interval": 0}
    ranks = start_run(trial_name="rank", system__stall_timeout_s=3 * LIMIT_S, **settings)
    other = start_run(trial_name="other", system__stall_timeout_s=80.0, **settings)
    for run in (ranks, other):
        run.wait_for_step(2)
    rank = ranks.worker("model_worker/0")
    rank.suspend()
    stand_still(other, [other.worker("master_worker/0")], 83.0)
    for order in (1, -1):  # in which they go on
        stand_still(other, [psutil.Process(other.process.pid), *other.remember_processes().values()][::order], STILL_S)
    before = last_step(ranks)
    rank.resume()
    ranks.wait_for_step(before + 3)
    for run in (other, ranks):
        ctrl_c(run)
        assert run.wait() == 130, run.output + run.logs()
        assert [row["step"] for row in run.rows()] == list(range(1, last_step(run) + 1))
        assert balanced(run), run.output
        assert run.survivors() == []
        summary = run.summary()
        assert summary["restarts"] == {}
        assert set(summary["books"]["dropped"]) <= {"stale"}, run.logs()


def stand_still(run: Any, processes: list[psutil.Process], seconds: float) -> None:
    """Stop these processes for a while; then the run goes on."""
    for process in processes:
        process.suspend()
    with pytest.raises(subprocess.TimeoutExpired):  # the launcher has nothing to report meanwhile
        run.process.wait(seconds)
    before = last_step(run)
    for process in processes:
        process.resume()
    run.wait_for_step(before + 3)
