"""Whole runs whose agents, environments and rewards are slow, hang or crash: they cost samples, never the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SLEEPY = """
import time
from asyncrl.api import Environment

LETTERS = "02468"


def score(data, completion):
    time.sleep(0.5)
    return sum(c in LETTERS for c in completion) / max(len(completion), 1)


class SleepyEnv(Environment):
    def __init__(self, *, reward):
        self._reward = reward

    def reset(self, *, seed=None, options=None):
        self._data = options["data"]
        return self._data["prompt"], {}

    def step(self, action):
        time.sleep(2)
        return "", self._reward(self._data, action), True, False, {}

    def close(self):
        return None
"""

HOSTILE = """
import os
import sys
import time


def score(data, completion):
    fate = (len(completion) + sum(map(ord, data["prompt"]))) % 20
    if fate == 0:
        os._exit(3)
    if fate == 1:
        time.sleep(3600)
    if fate == 2:
        return len(bytearray(10 << 30))
    if fate == 3:
        for _ in range(100):
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
        time.sleep(60)
    if fate == 4:
        sys.stdout.write("x" * 100_000_000)
    return sum(c in "02468" for c in completion) / max(len(completion), 1)
"""


def test_an_environment_and_a_reward_that_sleep_cost_no_lease_and_are_named(start_run: Any, tmp_path: Path) -> None:
    file = tmp_path / "sleepy.py"
    file.write_text(SLEEPY)
    run = start_run(
        env__path=f"{file}:SleepyEnv",
        reward__path=f"{file}:score",
        rollout__user_code__slow_call_s=1.0,
        manager__rollout_lease_s=8.0,
        total_train_steps=3,
        eval__interval=0,
    )
    assert run.wait() == 0, run.output + run.logs()
    summary, rows = run.summary(), run.rows()
    assert not {"worker_died", "timeout", "failed"} & summary["books"]["dropped"].keys(), summary["books"]
    assert len(rows) == 3
    for row in rows:  # two answers of 2 s each and their rewards of 0.5 s
        assert 5.0 <= row["rollout/env_s"] < 30.0
        assert 1.0 <= row["rollout/reward_s"] < 10.0
        assert row["rollout/generate_s"] > 0.0
    # 8 rollouts at a time take 5 s or so: the 12 of three steps in 10 s, where one after the other would take a minute.
    assert rows[-1]["time/elapsed_s"] < 40.0
    log = (run.run_dir / "logs" / "rollout_worker-0.log").read_text()
    assert f"env {file}:SleepyEnv.step took 2." in log


def test_rewards_that_hang_crash_fork_and_flood_cost_rollouts_under_their_name_and_the_run_goes_on(
    start_run: Any, tmp_path: Path
) -> None:
    file = tmp_path / "hostile.py"
    file.write_text(HOSTILE)
    run = start_run(
        reward__path=f"{file}:score",
        reward__run_in="process",
        reward__timeout_s=1.0,
        rollout__user_code__process_memory_mb=1024,
        total_train_steps=3,
        eval__interval=0,
    )
    assert run.wait() == 0, run.output + run.logs()
    dropped = run.summary()["books"]["dropped"]
    assert dropped.get(f"failed: reward {file}:score", 0) > 0, dropped
    assert "worker_died" not in dropped
    assert run.survivors() == []
    log = (run.run_dir / "logs" / "rollout_worker-0.log").stat().st_size
    assert log < 2_000_000
