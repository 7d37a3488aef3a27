"""The end of a chaos run: a table that fits a terminal of 80 columns, and everything for which a run did not pass."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from asyncrl.launch.commands import chaos
from asyncrl.verify.chaos.chaos_run import WIDTH, Watched, table, verdict
from asyncrl.verify.chaos.faults import Fault, FaultKind, InjectedFault


def watched(code: int | None = 0) -> Watched:
    seen = Watched(began=1000.0, code=code)
    seen.done = [
        InjectedFault(
            Fault(26, FaultKind.pause, "generation_server/11", 9999, 0.0, 19.6), 13_345.0, 9999, next_step_s=1234.56
        ),
        InjectedFault(
            Fault(7, FaultKind.kill, "rollout_worker/128", 1, 0.5, 0.0), 1012.4, 1, at_work_s=123.4, next_step_s=0.1
        ),
        InjectedFault(Fault(8, FaultKind.kill, "model_worker/0", 1, 0.5, 0.0), 1013.0, 1, overtaken_by=9),
        InjectedFault(
            Fault(9, FaultKind.kill, "launcher", 1, 0.5, 0.0), 1014.0, 1, rollouts=1234, tokens=7_654_321, steps_again=9
        ),
        InjectedFault(Fault(10, FaultKind.full_disk, "disk", 1, 0.5, 12.0), 1015.0, 1),
    ]
    return seen


def test_the_table_fits_and_cuts_nothing_off() -> None:
    text = io.StringIO()
    Console(file=text, width=WIDTH, highlight=False).print(table(watched()))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in text.getvalue()
    rows = [line.split() for line in lines[4:] if line.strip()]
    assert [row[0] for row in rows] == ["7", "8", "9", "10", "26"]
    assert rows[0][1:] == ["12", "1", "SIGKILL", "worker/128", "123.4", "0.1", "-", "-", "-"]
    assert rows[1][1:] == ["13", "1", "SIGKILL", "rank/0", "#9", "-", "-", "-", "-"]
    assert rows[2][1:] == ["14", "1", "SIGKILL", "launcher", "-", "-", "1,234", "7,654,321", "9"]
    assert rows[4][3:] == ["SIGSTOP", "server/11,", "20", "s", "-", "1234.6", "-", "-", "-"]


def test_a_run_passes_only_if_it_ended_by_itself_and_everything_was_done() -> None:
    assert verdict(watched(), None, ()) == []
    assert verdict(watched(1), None, ()) == ["it did not finish by itself: its launcher ended with 1"]
    assert "did not end by itself" in verdict(watched(None), None, ())[0]
    assert verdict(watched(), "the rollout counts do not balance", ("a", "b")) == [
        "the rollout counts do not balance",
        "the audit has 2 findings",
    ]
    short = watched()
    short.left.append((Fault(3, FaultKind.kill, "launcher", 4, 0.0, 0.0), "the run had ended"))
    assert verdict(short, None, ()) == ["#3 (kill launcher) was not done: the run had ended"]
    stopped = watched(130)
    stopped.interrupted = True
    assert verdict(stopped, None, ()) == ["it was interrupted"]


def plan_lines(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert chaos.main(["async_ppo", "--dry-run", *argv], "asyncrl") == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def test_the_plan_of_an_experiment_hits_each_kind_and_says_what_it_leaves_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = plan_lines(capsys, "--kills=6", "--seed=3", "trainer.parallel=d2t2", "--cuts=9", "rollout.workers=3")
    kills = {line.split(": kill ")[1].partition("/")[0].split()[0] for line in lines if ": kill " in line}
    assert kills == {
        "generation_server",
        "gserver_manager",
        "launcher",
        "master_worker",
        "model_worker",
        "rollout_worker",
    }
    cut = {line.split(": cut ")[1].split()[0] for line in lines if ": cut " in line}
    heads = {"model_worker/0", "model_worker/2"}  # of the four ranks those take trajectories
    assert cut <= {"gserver_manager/0", "generation_server/0", *heads}
    assert len({name.partition("/")[0] for name in cut}) == 3
    assert any(line.startswith("chaos: settings of its own: ") and "restarts_per_process=7" in line for line in lines)

    lines = plan_lines(capsys, "--kills=6", "checkpoint.interval=0", "system.restarts_per_process=1", "trial_name=mine")
    assert not any("kill launcher" in line for line in lines)
    assert any("left out: kills of the launcher" in line for line in lines)
    (own,) = [line for line in lines if "settings of its own" in line]
    assert "restarts_per_process" not in own
    assert "resume=never" in own


def test_deaths_that_would_take_the_runs_one_restart_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    lines = plan_lines(capsys, "--kills=8", "--pauses=6", "checkpoint.in_memory=false")
    assert any("left out: kills of MasterWorker, GserverManager" in line for line in lines)
    assert not any("kill model_worker" in line or "kill master_worker" in line for line in lines)
    assert any("pause model_worker" in line for line in lines)


def test_what_a_run_does_not_go_on_after_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    lines = plan_lines(capsys, "--kills=8", "samples.every=1", "samples.only=true")
    assert any("kill recorder" in line for line in lines)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kinds=gpu_worker"], "--kinds gpu_worker: this run has no 'gpu_worker'; it has generation_server, "),
        (["resume=auto"], "resume: `chaos` sets it; leave it out"),
        (["total_train_steps=3"], "total_train_steps=3: 26 faults need 4 at least"),
        (["rollout.wrong=2"], "rollout.wrong"),
        (["system.launcher=ssh"], "system.launcher='ssh': `chaos` hits processes of this machine alone; use local"),
    ],
)
def test_what_cannot_be_done_is_refused(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert chaos.main(["async_ppo", "--full-disks=0", "--pauses=2", *argv], "asyncrl") == 2
    assert message in capsys.readouterr().err
