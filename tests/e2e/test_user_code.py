"""Whole runs whose agents, environments and rewards are slow, hang or crash: they cost samples, never the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SLEEPY = """
import threading
import time
from pathlib import Path

from asyncrl.api import Environment

AT_ONCE = 2 * 8  # both members of as many rollouts as rollout.max_concurrent allows
changed = threading.Condition()
running = most = 0


def score(data, completion):
    time.sleep(1)
    return sum(c in "02468" for c in completion) / max(len(completion), 1)


class SleepyEnv(Environment):
    def __init__(self, *, reward):
        self._reward = reward

    def reset(self, *, seed=None, options=None):
        self._data = options["data"]
        return self._data["prompt"], {}

    def step(self, action):
        global running, most
        with changed:
            running += 1
            most = max(most, running)
            Path(__file__).with_name("most").write_text(str(most))
            changed.notify_all()
            changed.wait_for(lambda: most == AT_ONCE, 60)  # the first, whose answers may take a while
        time.sleep(2)
        with changed:
            running -= 1
        return "", self._reward(self._data, action), True, False, {}

    def close(self):
        return None
"""

HOSTILE = """
import os
import sys
import time

from asyncrl.plugins.envs.single_turn import SingleTurnEnv


def score(data, completion):
    asked = sum(map(ord, data["prompt"]))
    fate = (len(completion) + asked) % 20
    if fate == 0 or asked % 10 == 5:
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


class RaisingEnv(SingleTurnEnv):
    def reset(self, *, seed=None, options=None):
        self._data = options["data"]
        if sum(map(ord, self._data["prompt"])) % 10 == 0:
            raise ConnectionError("the game server is gone")
        return "", {}

    def step(self, action):
        return "", self._reward(self._data, action), True, False, {}
"""


def test_an_environment_and_a_reward_that_sleep_cost_no_lease_and_are_named(start_run: Any, tmp_path: Path) -> None:
    file = tmp_path / "sleepy.py"
    file.write_text(SLEEPY)
    run = start_run(
        env__path=f"{file}:SleepyEnv",
        reward__path=f"{file}:score",
        rollout__user_code__slow_call_s=1.0,
        system__lease_s=7.0,  # thrice this is less than all of it takes in a row, and more than a machine may pause
        total_train_steps=3,
        eval__interval=0,
    )
    assert run.wait() == 0, run.output + run.logs()
    summary, rows = run.summary(), run.rows()
    dropped = {reason.partition(":")[0] for reason in summary["books"]["dropped"]}
    assert not {"worker_died", "timeout", "failed"} & dropped, summary["books"]
    assert len(rows) == 3
    for row in rows:  # two answers at once, each of 2 s with a reward of 1 s after it
        assert row["rollout/env_s"] >= 3.0
        assert row["rollout/reward_s"] >= 1.0
        assert row["rollout/generate_s"] > 0.0
    assert int((tmp_path / "most").read_text()) == 2 * 8, "as many steps sleep at a time as there may be"
    log = (run.run_dir / "logs" / "rollout_worker-0.log").read_text()
    assert f"env {file}:SleepyEnv.step took " in log


def test_rewards_that_hang_or_crash_and_environments_that_raise_are_counted_by_name_and_the_run_goes_on(
    start_run: Any, ctrl_c: Any, tmp_path: Path
) -> None:
    """It goes on until both are counted: what fails is tried again and again, which takes longer than a few steps."""
    file = tmp_path / "hostile.py"
    file.write_text(HOSTILE)
    run = start_run(
        env__path=f"{file}:RaisingEnv",
        reward__path=f"{file}:score",
        reward__run_in="process",
        reward__timeout_s=1.0,
        rollout__user_code__process_memory_mb=1024,
        total_train_steps=100_000,
        eval__interval=0,
    )
    run.wait_for_step(3)
    run.wait_for_line("rollouts failed in reward ")
    run.wait_for_line("rollouts failed in env ")
    ctrl_c(run)
    assert run.wait() == 130, run.output + run.logs()
    dropped = run.summary()["books"]["dropped"]
    assert dropped.get(f"failed: reward {file}:score", 0) > 0, dropped
    assert dropped.get(f"failed: env {file}:RaisingEnv.reset", 0) > 0, dropped
    assert "worker_died" not in dropped
    assert run.survivors() == []
    log = (run.run_dir / "logs" / "rollout_worker-0.log").read_text()
    assert len(log) < 2_000_000
    assert f"failed, to be tried again: reward {file}:score " in log, "an episode is tried again alone"


BATCHES = '''
import asyncio

from asyncrl.api import BatchAgent, GenerationRequest
from asyncrl.plugins.agents.sample_builder import SampleBuilder


class Batches(BatchAgent):
    """Several prompts in a call; the log says which."""

    batch_size = 3

    def __init__(self, *, tokenizer, file):
        self._file = file

    async def run_batch(self, groups):
        with open(self._file, "a") as file:
            file.write(" ".join(group.prompt.prompt_id for group in groups) + "\\n")
        tasks = [asyncio.create_task(self._play(index, group)) for index, group in enumerate(groups)]
        for done in asyncio.as_completed(tasks):
            yield await done

    async def _play(self, index, group):
        prompt, samples = group.prompt, []
        request = GenerationRequest(prompt.prompt_id, prompt.input_ids, prompt.group_size, prompt.sampling)
        for answer in (await group.client.generate(request)).completions:
            builder = SampleBuilder(prompt.input_ids)
            builder.generate(answer)
            samples.append(builder.build(float(len(answer.token_ids)), truncated=False))
        return index, samples
'''


def test_an_agent_over_several_prompts_trains_within_the_bound(start_run: Any, tmp_path: Path) -> None:
    """Samples that are too old are dropped."""
    (tmp_path / "batches.py").write_text(BATCHES)
    calls = tmp_path / "calls.txt"
    run = start_run(
        agent__path=f"{tmp_path / 'batches.py'}:Batches",
        agent__args=f"{{file: {calls}}}",
        on_stale="drop",
        max_head_offpolicyness=1,
        total_train_steps=6,
        eval__interval=0,
    )
    assert run.wait() == 0, run.output + run.logs()
    assert max(row["staleness/max"] for row in run.rows()) <= 1
    counts = run.summary()["books"]
    assert counts["submitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["abandoned"]
    assert counts["trained"] == 6 * 4
    assert set(counts["dropped"]) <= {"stale"}, counts
    played = [line.split() for line in calls.read_text().splitlines()]
    assert max(map(len, played)) == 3
    assert len({prompt for line in played for prompt in line}) >= 6 * 4
