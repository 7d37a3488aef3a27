"""The same command over several hosts by Ray, stopped, continued, killed; nothing is left on any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from asyncrl.launch.commands.audit import audit

from ..ports import free_ports
from .clusters import await_that, ray_cluster
from .hosts import assert_gone, over, processes_of, titled, with_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def ray(python_there: str) -> Iterator[dict[str, Any]]:
    """Two nodes beside the launcher's own: one asked for by its address, one that Ray chooses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        with ray_cluster(nodes=2) as address:
            settings = over("ray", "box2", "box3", f"--address={address}")
            hosts = (
                settings["system__hosts"].replace("address: 127.0.0.3", "cpus: 1").replace("box2,", "box2, cpus: 1,")
            )
            assert hosts.count("cpus: 1") == 2
            settings |= {"system__hosts": hosts, "system__start_timeout_s": 300}
            yield with_python(settings, python_there)


def test_on_ray_a_dead_server_and_a_dead_actor_are_replaced_and_a_killed_launcher_leaves_nothing(
    start_run: Any, ctrl_c: Any, ray: dict[str, Any]
) -> None:
    """The same command goes on, is stopped and leaves nothing either."""
    first = start_run(total_train_steps=100_000, **ray)
    first.wait_for_step(2)
    (server,) = [process for process in processes_of(first) if "generation_server" in titled(process)]
    server.kill()
    first.wait_for_line("generation_server/0 (on box2) was killed by signal SIGKILL; it is started again")
    first.wait_for_line("generation_server/0 went on after")

    (actor,) = [process for process in ray_actors() if "127.0.0.3" in titled(parent(process))]  # that node's raylet
    (before,) = [process for process in processes_of(first) if "rollout_worker/0" in titled(process)]
    assert before.environ()["ASYNCRL_HOST"] == "127.0.0.3"  # no two hosts on one node
    actor.kill()
    first.wait_for_line("rollout_worker/0 (on box3) was lost with the connection to its host; it is started again")
    first.wait_for_line("rollout_worker/0 went on after")
    await_that(lambda: not before.is_running(), "the end of what the dead actor had started")

    assert len(processes_of(first)) == 5
    first.process.kill()
    assert_gone(first)
    await_that(lambda: not ray_actors(), f"the end of {ray_actors()}")

    second = start_run(total_train_steps=100_000, **ray)
    second.wait_for_step(int(first.rows()[-1]["step"]) + 3)
    ctrl_c(second)
    assert second.wait() == 130, second.output + second.logs()
    assert [row["step"] for row in second.rows()] == list(range(1, len(second.rows()) + 1))
    assert audit(second.run_dir).findings == ()
    assert_gone(second)
    await_that(lambda: not ray_actors(), f"the end of {ray_actors()}")


def test_where_no_ray_answers_the_run_says_so(start_run: Any, ray: dict[str, Any]) -> None:
    (port,) = free_ports(1)
    run = start_run(**ray | {"system__launcher_args": f"['--address=127.0.0.1:{port}']"})
    assert run.wait() == 2
    assert "no Ray cluster answers there" in run.output
    assert f"127.0.0.1:{port}" in run.output
    assert_gone(run)


def ray_actors() -> list[psutil.Process]:
    """The actors of runs that are left on this machine."""
    return [process for process in psutil.process_iter() if titled(process).startswith("ray::HostActor")]


def parent(process: psutil.Process) -> psutil.Process | None:
    try:
        return process.parent()
    except psutil.NoSuchProcess:
        return None
