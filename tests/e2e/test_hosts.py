"""The same command over several hosts by ssh, stopped, continued, killed; nothing is left on any."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.launch.commands.audit import audit
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint, prefix_of

from .clusters import ssh_hosts
from .hosts import assert_gone, over, processes_of, titled, with_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TRAINING_HOSTS = (
    "[{address: 127.0.0.1, runs: [master_worker, gserver_manager, generation_server]},"
    "{name: %s, address: 127.0.0.2, runs: [model_worker]},"
    "{name: %s, address: 127.0.0.3, runs: [model_worker, rollout_worker]}]"
)


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory, python_there: str) -> Iterator[dict[str, Any]]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh") / "box", ["box2", "box3"]) as config:
        yield with_python(over("ssh", "box2", "box3", "-F", str(config)), python_there)


def test_a_server_that_dies_on_another_host_is_started_again_and_a_run_whose_launcher_was_killed_goes_on(
    start_run: Any, ssh: dict[str, Any]
) -> None:
    first = start_run(total_train_steps=100_000, **ssh)
    first.wait_for_step(2)
    (server,) = [process for process in processes_of(first) if "generation_server" in titled(process)]
    server.kill()
    first.wait_for_line("generation_server/0 (on box2) was killed by signal SIGKILL; it is started again")
    first.wait_for_line("generation_server/0 went on after")
    assert len(processes_of(first)) == 5
    first.process.kill()
    assert_gone(first)

    goal = int(first.rows()[-1]["step"]) + 3
    second = start_run(total_train_steps=goal, **ssh)
    assert second.wait() == 0, second.output + second.logs()
    assert [row["step"] for row in second.rows()] == list(range(1, goal + 1))
    assert audit(second.run_dir).findings == ()
    assert_gone(second)


def test_with_ranks_on_two_hosts_a_death_costs_the_step_in_hand_and_a_lost_host_those_since_the_checkpoint(
    start_run: Any, ctrl_c: Any, ssh: dict[str, Any], python_there: str
) -> None:
    """First a rank's, then that of a host with its memory: the run goes back to its newest checkpoint."""
    hosts = with_python({"system__hosts": TRAINING_HOSTS % ("box2", "box3")}, python_there)
    settings = {"trainer__parallel": "d2", "checkpoint__interval": 3, "eval__interval": 0, "seed": 1}
    run = start_run(total_train_steps=100_000, **ssh | hosts | settings)
    run.wait_for_step(4)
    kill(run, "model_worker/1")
    run.wait_for_line("the brain went on after")
    log = (run.run_dir / "logs" / "master_worker-0.log").read_text()
    kept = int(log.rpartition("going on after step ")[2].partition(",")[0])
    assert kept >= 4
    run.wait_for_step(kept + 2)
    kill(run, "model_worker/1", "rollout_worker/0", memory=MemoryCheckpoint(run.run_dir, "127.0.0.3").folder)
    run.wait_for_line("the whole run is started again")
    run.wait_for_step(kept + 4)  # some checkpoint's interval further
    ctrl_c(run)
    assert run.wait() == 130, run.output + run.logs()
    assert [row["step"] for row in run.rows()] == list(range(1, len(run.rows()) + 1))
    logs = [file.read_text() for file in (run.run_dir / "logs").glob("*.log")]
    assert any("is not whole any more: all of it on 127.0.0.3" in log for log in logs)
    assert audit(run.run_dir).findings == ()
    assert_gone(run)
    assert not list(Path("/dev/shm").glob(f"{prefix_of(run.run_dir)}*"))


def kill(run: Any, *names: str, memory: Path | None = None) -> None:
    """End processes of a host at once, and with them its memory."""
    killed = [process for process in processes_of(run) if any(f" {name} " in titled(process) for name in names)]
    for process in killed:
        process.suspend()
    if memory is not None:
        shutil.rmtree(memory)  # where nobody writes, neither these nor those that follow them
    for process in killed:
        process.kill()


def test_a_host_that_is_not_there_is_named_before_the_trial_begins(start_run: Any, ssh: dict[str, Any]) -> None:
    nowhere = over("ssh", "nowhere.invalid", "box3", *ast.literal_eval(ssh["system__launcher_args"]))
    run = start_run(**nowhere)
    assert run.wait() == 2
    assert "error: system.hosts[1].name='nowhere.invalid': ssh knows no host of this name" in run.output
    assert not run.run_dir.exists()
