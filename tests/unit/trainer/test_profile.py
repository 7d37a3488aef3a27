"""Profiles of chosen steps: a rank's trace, and the stacks of a launch's processes."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.optional_checks import optional_problems
from asyncrl.observe.settings import ProfileConfig
from asyncrl.runtime.process import stacks
from asyncrl.runtime.supervisor import LAUNCH_VARIABLE
from asyncrl.trainer.rank.profile import StepProfile

SLEEPER = """
import setproctitle, sys, time
setproctitle.setproctitle(sys.argv[1])
print("ready", flush=True)
def waits_for_the_test():
    time.sleep(120)
waits_for_the_test()
"""


def profile_of(folder: Path, rank: int = 0, **settings: object) -> StepProfile:
    return StepProfile(ProfileConfig(**settings), rank, folder, torch.device("cpu"))  # type: ignore[arg-type]


def step(profile: StepProfile, number: int) -> list[Path]:
    profile.begin(number)
    with profile.call("actor_update"):
        torch.ones(8, 8) @ torch.ones(8, 8)
    return profile.end()


def test_a_chosen_step_of_a_chosen_rank_has_a_trace_with_the_calls_by_name(tmp_path: Path) -> None:
    profile = profile_of(tmp_path / "profile", rank=1, steps=[2, 3], ranks=[0, 1])
    assert [[file.name for file in step(profile, number)] for number in (1, 2, 3, 4)] == [
        [],
        ["step-2.rank-1.trace.json.gz"],
        ["step-3.rank-1.trace.json.gz"],
        [],
    ]
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "step-2.rank-1.trace.json.gz").read_bytes()))
    found = {event.get("name") for event in trace["traceEvents"]}
    assert {"actor_update", "aten::matmul"} <= found


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    assert step(profile_of(tmp_path / "profile", rank=2, steps=[1], ranks=[0, 1]), 1) == []
    assert not list(tmp_path.iterdir())


def test_a_step_that_did_not_end_is_dropped_by_the_next(tmp_path: Path) -> None:
    profile = profile_of(tmp_path / "profile", steps=[1, 2])
    profile.begin(1)
    assert [file.name for file in step(profile, 2)] == ["step-2.rank-0.trace.json.gz"]
    assert [file.name for file in (tmp_path / "profile").iterdir()] == ["step-2.rank-0.trace.json.gz"]


async def test_a_disk_that_takes_nothing_costs_the_profile_and_not_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").write_text("no folder")
    profile = profile_of(tmp_path / "profile", steps=[1])
    assert step(profile, 1) == []
    assert step(profile, 2) == []
    await stacks.dump_stacks(tmp_path / "profile" / "step-1.stacks.txt")
    assert "the profile of step 1 could not be written" in caplog.text
    assert "the stacks could not be written" in caplog.text


async def test_stacks_are_those_of_the_launchs_own_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = os.urandom(8).hex()
    monkeypatch.setenv(LAUNCH_VARIABLE, launch)
    titles = {"asyncrl rollout_worker/0 [a/b]": launch, "a users program": launch, "asyncrl other/0 [a/c]": "another"}
    running = [
        subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", SLEEPER, title],
            env=os.environ | {LAUNCH_VARIABLE: mark, "SPT_NOENV": "1"},
            stdout=subprocess.PIPE,
        )
        for title, mark in titles.items()
    ]
    try:
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        file = tmp_path / "profile" / "step-1.stacks.txt"
        await stacks.dump_stacks(file)
    finally:
        for process in running:
            process.kill()
            process.communicate()
    text = file.read_text()
    assert sorted(map(int, re.findall(r"^== .* \(process (\d+)\)$", text, re.MULTILINE))) == sorted(
        [os.getpid(), running[0].pid]
    )
    assert "asyncrl rollout_worker/0 [a/b]" in text
    if "ermission" in text:
        pytest.skip("this user may not trace processes")
    assert "waits_for_the_test" in text


async def test_a_host_without_py_spy_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "py_spy", lambda: None)
    await stacks.dump_stacks(tmp_path / "stacks.txt")
    assert "py-spy is not installed on this host" in (tmp_path / "stacks.txt").read_text()


def test_what_there_is_not_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "py_spy", lambda: None)
    config = ExperimentConfig(total_train_steps=5)
    assert not [line for line in optional_problems(config) if "profile" in line]
    config.profile = ProfileConfig(steps=[5, 6], ranks=[0, 1])
    assert [line.partition(":")[0] for line in optional_problems(config) if "profile" in line] == [
        "profile.steps=[5, 6]",
        "profile.ranks=[0, 1]",
        "profile.stacks=true",
    ]
