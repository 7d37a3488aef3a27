"""A whole run whose sessions a program outside opens, plays and rewards, while a RolloutWorker dies."""

from __future__ import annotations

from typing import Any

import pytest

from tests.online_clients import Clients

pytestmark = pytest.mark.slow
STEPS = 5
OWN = {
    "experiment_name": "online",
    "agent.args": "{lease_s: 2.0, hold_s: 5.0, wait_s: 20.0}",
    "group_size": 1,
    "algorithm.advantage.name": "rae",
    "max_head_offpolicyness": 1,
    "total_train_steps": STEPS,
    "eval.interval": 0,
}


def test_what_programs_outside_the_run_reward_is_trained_once_though_a_worker_dies(
    start_run: Any, command: Any
) -> None:
    run = start_run("online", **{name.replace(".", "__"): value for name, value in OWN.items()})
    run.wait_for_line("sessions are opened at")
    clients = Clients(run.run_dir, threads=6, patience_s=20.0)
    run.wait_for_step(1)
    run.worker("rollout_worker/0").kill()
    assert run.wait() == 0, run.output + run.logs()
    clients.join(limit_s=120.0)
    counts = run.summary()["books"]
    assert len(clients.check(run.run_dir)) == counts["trained"] == STEPS * 4
    assert (
        clients.opened
        <= counts["submitted"]
        == counts["trained"] + sum(counts["dropped"].values()) + counts["abandoned"]
    )
    assert {"agent_rejected", "session_silent", "worker_died"} & set(counts["dropped"])
    assert clients.refused[409] > 0, "another reward for the same session"
    assert not any(reason.startswith("failed") for reason in counts["dropped"]), run.logs()
    assert command("audit", run.run_dir).code == 0
