"""A process that dies is started again, alone where it can be; the run finishes by itself, nothing is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.prompt_queue import DataOrder, UsedPrompts
from asyncrl.launch.commands.audit import audit
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.verify.audit.ledger_files import read_ledger, surviving
from asyncrl.verify.audit.ledger_rules import Replay

from ..conftest import LIMIT_S, SETTINGS, Gate
from ..e2e.clusters import await_that

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BATCH = SETTINGS["train_batch_size"]


def check_the_end(run: Any, steps: int, restarts: dict[str, int]) -> None:
    """The run finished by itself, each step is there once, the rollout counts balance, the restarts are told
    everywhere.

    The last step was made after the last of them was told.
    """
    assert run.wait() == 0, run.output + run.logs()
    check_the_files(run, steps, restarts)
    rows = run.rows()
    assert rows[-1]["step"] == steps
    assert rows[-1]["restarts"] == sum(restarts.values())
    assert run.output.count("it is started again") == sum(restarts.values())
    assert "restarts   " + ", ".join(f"{what} {count}" for what, count in restarts.items()) + "; " in run.output
    assert run.output.count(" went on after ") == sum(restarts.values()), run.output
    assert rows[-1]["time/restarts_s"] > 0
    assert "FAILED:" not in run.output


def check_the_files(run: Any, steps: int, restarts: dict[str, int]) -> None:
    """Each step is there once, the rollout counts balance, the summary has the restarts, and nothing runs any more.

    The last row of a run that was stopped waits in its checkpoint where its version waited for an evaluation.
    """
    rows = [row["step"] for row in run.rows()]
    assert rows == list(range(1, len(rows) + 1))
    assert len(rows) in (steps - 1, steps)
    summary = run.summary()
    assert summary["restarts"] == restarts
    counts = summary["books"]
    assert counts["submitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["abandoned"]
    assert counts["trained"] == steps * BATCH
    assert run.survivors() == []


def stop_once_used(run: Any, ctrl_c: Any, were_out: range) -> int:
    """Let the run go on until all that was out is used, whatever overtakes it, and stop it; how many steps it made."""
    await_that(lambda: set(were_out) <= orders_used_so_far(run), f"use of all of {were_out}", LIMIT_S)
    ctrl_c(run)
    assert run.wait() == 130, run.output + run.logs()
    return int(run.summary()["steps"])


def all_out(steps: int) -> range:
    """Orders that can be admitted before a gate after `steps` steps: those of the steps and those within the bound."""
    return range((steps + SETTINGS["max_head_offpolicyness"] + 1) * BATCH)


def used_orders(run: Any) -> list[int]:
    """Positions in the data order of the prompts that the last checkpoint of a run that has ended has as used."""
    folder = max((run.run_dir / "checkpoints").glob("v*[0-9]"), key=lambda folder: int(folder.name[1:]))
    state = json.loads((folder / "state.json").read_text())
    return sorted(orders_of(run, UsedPrompts.from_json(state["master_state"]["gate"]["used"])))


def orders_used_so_far(run: Any) -> set[int]:
    """The same of a run that goes on, by its ledger."""
    outcome = Replay(None, print).run(surviving(read_ledger(run.run_dir / "ledger", print), print))
    return orders_of(run, outcome.used)


def orders_of(run: Any, used: Iterable[str]) -> set[int]:
    stream = DataOrder(json.loads((run.run_dir / "data_record.json").read_text())["rows"], seed=1)
    return {stream.order_of(prompt_id) for prompt_id in used}


def test_a_killed_server_and_a_killed_worker_are_started_again_and_no_prompt_is_passed_over(
    start_run: Any, ctrl_c: Any, gate: Callable[[int], Gate]
) -> None:
    """The only ones, so that the run waits for their successors. The server serves the newest weights again. Each
    prompt is trained once; none that was out is lost.

    What a RolloutWorker had in hand is played again one by one, beside prompts that are none of it, which overtake it:
    so the run is let go on until all of it was used.
    """
    held = gate(6)
    run = start_run(total_train_steps=100_000, seed=1, **held.settings)
    for kill, name in enumerate(("generation_server/0", "rollout_worker/0"), start=1):
        run.wait_for_step(6 * kill - 3)
        run.worker(name).kill()
        held.let_make(6 * kill + 4)  # requests wait for the server
        run.wait_for_line(f"{name} went on after")
        held.let_make(6 * kill + 6)
    held.open()
    made = stop_once_used(run, ctrl_c, all_out(6 * 2))
    check_the_files(run, made, {"generation_server/0": 1, "rollout_worker/0": 1})
    assert set(run.summary()["books"]["dropped"]) <= {"worker_died", "stale"}
    orders = used_orders(run)
    assert len(orders) == made * BATCH
    assert max(row["staleness/max"] for row in run.rows()) <= 2
    evaluated = [row["step"] for row in run.metrics() if any(name.endswith("/reward_mean") for name in row)]
    assert evaluated[:4] == [0, 3, 6, 9]
    log = (run.run_dir / "logs" / "gserver_manager-0.log").read_text()
    again = log[log.rindex("generation server 0 is at") :]
    assert "with version 0" in again
    assert "generation server 0 serves v" in again, log


HELD_LOSS = """
from pathlib import Path
from threading import Event
from asyncrl.algorithms.policy_losses import reinforce
from asyncrl.algorithms.registry import policy_loss

@policy_loss("held")
def held(inputs):
    "Computes on until there is one file, then waits for the other."
    pause = Event()
    while Path("{hold}").exists() and not Path("{free}").exists():
        Path("{holds}").touch()
        pause.wait(0.05)
    return reinforce(inputs)
"""


def test_a_killed_manager_rank_or_master_takes_the_brain_back_to_the_last_step_and_nothing_is_lost(
    start_run: Any, ctrl_c: Any, gate: Callable[[int], Gate], tmp_path: Path
) -> None:
    """No rollout is dropped, and none of those under way is played again. No step is repeated but the one in hand: the
    master is killed within one, which is trained again. The servers and the RolloutWorkers stay, and so does what they
    hold.
    """
    held, hold, holds, free = gate(6), tmp_path / "hold", tmp_path / "holds", tmp_path / "free"
    (tmp_path / "loss.py").write_text(HELD_LOSS.format(hold=hold, holds=holds, free=free))
    settings = {"checkpoint__interval": 0, "eval__interval": 0, "trainer__parallel": "d2"} | held.settings
    settings |= {"algorithm__policy_loss__name": f"{tmp_path / 'loss.py'}:held"}
    settings |= {"algorithm__policy_loss__params": "{}"}
    run = start_run(total_train_steps=100_000, seed=1, **settings)
    brain = ("gserver_manager/0", "master_worker/0", "model_worker/0", "model_worker/1")
    others = ("rollout_worker/0", "generation_server/0")

    def processes(names: tuple[str, ...]) -> list[int]:
        return [run.worker(name).pid for name in names]

    stayed = processes(others)
    for kill, name in enumerate(("gserver_manager/0", "model_worker/0", "master_worker/0"), start=1):
        run.wait_for_step(4 * kill)
        if name == "master_worker/0":
            hold.touch()
            held.let_make(13)
            run.wait_for_file(str(holds))
        before = processes(brain)
        run.worker(name).kill()
        if hold.exists():
            free.touch()
        held.let_make(4 * kill + 4)  # answers end while there is none
        run.wait_for_line("the brain went on after", times=kill)
        assert not set(processes(brain)) & set(before)
        assert processes(others) == stayed
        if kill == 1:
            held.let_make(10)
    held.open()
    made = stop_once_used(run, ctrl_c, all_out(13))
    check_the_files(run, made, {"the brain": 3})
    check_nothing_was_lost(run, made, all_out(13))
    manager = (run.run_dir / "logs" / "gserver_manager-0.log").read_text()
    assert manager.count("the gate is open") == 4
    first, second, third = gone_on_after(run)
    assert first >= 4
    assert second >= 8
    assert third == 12, "the step in which the master was killed is trained again"


def gone_on_after(run: Any) -> list[int]:
    """The steps after which each master but the first went on."""
    log = (run.run_dir / "logs" / "master_worker-0.log").read_text()
    return [int(step) for step in re.findall(r"going on after step (\d+),", log)]


def check_nothing_was_lost(run: Any, steps: int, were_out: range) -> None:
    """Each prompt is trained once and none of those that were out is left out; the files show it."""
    assert set(run.summary()["books"]["dropped"]) <= {"stale"}
    orders = used_orders(run)
    assert len(orders) == steps * BATCH
    assert set(were_out) <= set(orders)
    found = audit(run.run_dir)
    assert found.findings == ()
    assert (found.outcome.version, found.outcome.trained) == (steps, steps * BATCH)
    assert not MemoryCheckpoint(run.run_dir).folder.exists()


HELD_EVALUATION = """
import asyncio
from pathlib import Path
from asyncrl.plugins.agents.single_turn import SingleTurnAgent

class Held(SingleTurnAgent):
    "Answers prompts of the training, and those of an evaluation once there is a file."

    async def run(self, prompt, env, client):
        while prompt.prompt_id.startswith("eval-") and not Path("{free}").exists():
            await asyncio.sleep(0.05)
        return await super().run(prompt, env, client)
"""


def test_an_evaluation_that_the_brains_restart_cuts_off_is_made_again_on_its_version(
    start_run: Any, tmp_path: Path
) -> None:
    """The evaluation is that of the initial model; versions 1 and 2 wait for it."""
    steps, free = 6, tmp_path / "free"
    (tmp_path / "held.py").write_text(HELD_EVALUATION.format(free=free))
    run = start_run(total_train_steps=steps, agent__path=f"{tmp_path / 'held.py'}:Held", eval__interval=3)
    run.wait_for_file("weights/actor/v2")
    run.worker("model_worker/0").kill()
    run.wait_for_line("the brain went on after")
    free.touch()
    check_the_end(run, steps, {"the brain": 1})
    summary = run.summary()
    assert summary["evaluations_failed"] == []
    assert [evaluation["version"] for evaluation in summary["evaluations"]] == [0, 3, 6]
    log = (run.run_dir / "logs" / "master_worker-0.log").read_text()
    assert "was answered by versions" not in log, "each is of the version that it is told of"


DEADLY = """
import asyncio, os
from pathlib import Path
from asyncrl.plugins.agents.single_turn import SingleTurnAgent

class Deadly(SingleTurnAgent):
    "Ends its process with one prompt, each time once there is a file."

    async def run(self, prompt, env, client):
        here = Path(__file__).parent
        if prompt.order == {bad}:
            deaths = len(list(here.glob("death-*")))
            while not (here / f"may-die-{{deaths}}").exists():
                await asyncio.sleep(0.05)
            (here / f"death-{{deaths}}").touch()
            os.abort()  # as a native library does; SIGKILL would be held to come from outside
        return await super().run(prompt, env, client)
"""


def test_a_prompt_that_kills_its_worker_is_dropped_and_all_others_are_trained(
    start_run: Any, ctrl_c: Any, tmp_path: Path
) -> None:
    """Those that come after it are played meanwhile; so the run is let go on until its turn has come again."""
    bad = 6
    (tmp_path / "deadly.py").write_text(DEADLY.format(bad=bad))
    agent = f"{tmp_path / 'deadly.py'}:Deadly"
    run = start_run(total_train_steps=100_000, seed=1, agent__path=agent, eval__interval=0, checkpoint__interval=0)
    for death in range(3):
        (tmp_path / f"may-die-{death}").touch()
        run.wait_for_line("rollout_worker/0 went on after", times=death + 1)
    made = stop_once_used(run, ctrl_c, range(2 * BATCH))
    check_the_files(run, made, {"rollout_worker/0": 3})
    assert run.summary()["books"]["dropped"]["crashed_worker"] == 1
    assert "1 rollouts as their prompts end the RolloutWorker that plays them" in run.output
    orders = used_orders(run)
    assert bad in orders
    assert len(orders) == made * BATCH + 1
