"""What a run's processes tell of it: the terminal's lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.observe.status import (
    LONG_S,
    Launch,
    Process,
    ProcessHistory,
    StatusLine,
    StepSizes,
    about,
    outlook,
    stall,
    status_lines,
)

BEGAN = 1_000_000.0
SIZES = StepSizes(40, 8, 4)
Line = dict[str, Any]


def append(file: Path, *lines: Line) -> None:
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)


def line(at: float, stage: str = "ready", activity: str = "serves", **more: Any) -> Line:
    """A line `at` seconds after the begin of the launch, of a stage that began with it."""
    return {"at": BEGAN + at, "pid": 9, "stage": stage, "activity": activity, "since": BEGAN, **more}


def launch(lines: dict[str, list[Line]], step_ends: dict[int, float] | None = None) -> Launch:
    """A launch whose processes wrote `lines`, and whose steps were complete so many seconds after its begin."""
    processes = {name: Process(name) for name in ("launcher/0", "master_worker/0", *lines)}
    processes["launcher/0"].lines.append(line(0.0))
    for name, each in lines.items():
        processes[name].lines.extend(each)
    for step, at in (step_ends or {}).items():
        processes["master_worker/0"].spans.append({"span": "train", "begin": BEGAN, "end": BEGAN + at, "step": step})
        span = {"span": "publish", "begin": BEGAN + at, "end": BEGAN + at + 9.0, "step": step}
        processes["master_worker/0"].spans.append(span)
    return Launch(processes)


def shown(lines: dict[str, list[Line]], step_ends: dict[int, float] | None = None) -> list[str]:
    return [str(each) for each in status_lines(launch(lines, step_ends))]


def test_processes_tell_rates_over_restarts_and_full_files(tmp_path: Path) -> None:
    file = tmp_path / "observed" / "generation_server-0.jsonl"
    append(file, *({"at": float(at), "cpu_s": at / 2, "running": at} for at in range(1, 6)))
    observed = ProcessHistory(tmp_path / "observed")
    observed.refresh()
    process = observed.processes["generation_server/0"]
    assert process.rate("cpu_s", 0, 10) == 0.5
    assert [line["running"] for line in process.between(2, 4)] == [2, 3, 4]
    file.rename(file.with_name(file.name + ".1"))
    append(file, {"at": 6.0, "cpu_s": 0.0}, {"span": "update", "begin": 6.0, "end": 6.5}, {"at": 7.0, "cpu_s": 0.5})
    observed.refresh()
    assert [line["at"] for line in process.lines] == [1, 2, 3, 4, 5, 6, 7]
    assert process.rate("cpu_s", 5, 8) == 0.25
    assert [span["span"] for span in process.spans] == ["update"]


def test_until_the_first_step_the_terminal_tells_what_each_process_does_and_since_when() -> None:
    assert shown({}) == ["the processes are starting"]
    loads = {"generation_server/0": [line(5.0, "loads the model", "works")], "rollout_worker/0": [line(4.0, "plays")]}
    assert shown(loads) == ["generation_server/0 loads the model (5 s)"]
    at_work = {"master_worker/0": [line(5.0, "ready")], "rollout_worker/0": [line(4.0, "plays")]}
    assert shown(at_work) == ["all processes are at work: the first batch is being generated"]
    ended = {"master_worker/0": [line(5.0, "loads", "works", ended=True)]}
    assert shown(ended) == ["all processes are at work: the first batch is being generated"]


def test_of_many_processes_the_first_are_told_and_the_others_counted() -> None:
    many = {f"model_worker/{index}": [line(1.0, "loads the models", "works")] for index in range(20)}
    lines = shown(many)
    assert len(lines) == 8
    assert lines[-2:] == ["model_worker/6 loads the models (1 s)", "and 13 other processes"]
    assert len(shown(dict(list(many.items())[:8]))) == 8, "eight fit"


def test_a_run_that_makes_steps_needs_no_line() -> None:
    assert shown({"master_worker/0": [line(50.0, "trains step 2", "works")]}, {1: 40.0}) == []


def test_a_launch_that_continues_is_starting_until_it_has_made_a_step_itself() -> None:
    loads = {"model_worker/0": [line(5.0, "loads the models", "works")], "generation_server/0": [line(-70.0)]}
    assert shown(loads, {30: -7200.0}) == ["model_worker/0 loads the models (5 s)"]
    assert [each.name for each in launch(loads).processes] == ["model_worker/0"], "the server's line is of another"
    begun = {"gserver_manager/0": [line(-7000.0, rollouts_running=8), line(10.0, rollouts_running=8)]}
    assert launch(begun).rollouts_since == BEGAN + 10.0, "not those of the earlier launch"
    assert outlook(launch(begun, {30: -7200.0}), SIZES).startswith("step 31 of 40")
    begun["gserver_manager/0"].append(line(12.0, rollouts_running=8, trained_version=20))
    assert outlook(launch(begun, {30: -7200.0}), SIZES).startswith("step 21 of 40"), "from the checkpoint of step 20"


def test_a_step_counts_from_the_end_of_its_training_also_while_it_is_published() -> None:
    gate = {"rollouts_running": 8, "finished_untrained": 1}
    lines = {"gserver_manager/0": [line(5.0, **gate, trained_version=0), line(39.0, **gate, trained_version=2)]}
    publishing = launch(lines, {1: 20.0, 2: 30.0, 3: 40.0})
    assert (publishing.step, publishing.step_s) == (3, 10.0), "the manager has not been told yet"
    lines["gserver_manager/0"].append(line(41.0, **gate, trained_version=3))
    assert launch(lines, {1: 20.0, 2: 30.0, 3: 40.0}).step == 3
    assert shown(lines, {1: 20.0, 2: 30.0, 3: 40.0}) == []


def test_a_run_that_has_gone_back_counts_from_there() -> None:
    """Without a checkpoint a death of the brain takes it back to version 0, within one launch."""
    lines = {"gserver_manager/0": [line(60.0, rollouts_running=8, trained_version=0)]}
    again = launch(lines, {1: 20.0, 2: 30.0, 3: 40.0})
    assert (again.step, again.step_ends) == (0, [])
    assert outlook(again, SIZES).startswith("step 1 of 40")


def test_how_far_the_first_batch_of_a_launch_is_and_when_it_will_be_ready() -> None:
    gate = {"rollouts_running": 8, "submitted_total": 8, "finished_untrained": 0, "trained_version": 30}
    lines: dict[str, list[Line]] = {"rollout_worker/0": [line(0.0, answers_total=0)]}
    assert outlook(launch(lines), SIZES) == "", "no rollout has begun"
    lines["gserver_manager/0"] = [line(0.0, **gate)]
    begins = "step 31 of 40: 0 of 8 rollouts are ready, "
    assert outlook(launch(lines), SIZES) == f"{begins}0 answers of at least 32 are complete"
    lines["gserver_manager/0"].append(line(10.0, **gate | {"rollouts_running": 0}))
    assert outlook(launch(lines), SIZES) == f"{begins}0 answers of at least 32 are complete", "nothing runs"
    lines["gserver_manager/0"].pop()
    lines["rollout_worker/0"] = [line(30.0, answers_total=1)]
    assert outlook(launch(lines), SIZES) == f"{begins}1 answers of at least 32 are complete", "many end together"
    lines["generation_server/0"] = [line(40.0, running=2, tokens_per_s=1234.4)]
    assert outlook(launch(lines), SIZES) == f"{begins}1 answers of at least 32 are complete; 1,234 tokens/s"
    lines["rollout_worker/0"] = [line(60.0, answers_total=2)]
    reported = outlook(launch(lines), SIZES)
    assert "; 1,234 tokens/s; the batch in about 15 min" in reported, "two run at a time, two are complete"
    lines["rollout_worker/0"] = [line(300.0, answers_total=8)]
    assert outlook(launch(lines), SIZES) == (
        f"{begins}8 answers of at least 32 are complete; 1,234 tokens/s; "
        "the batch in about 15 min, the run in more than about 3 h 20 min"
    )
    lines["master_worker/0"] = [line(301.0, training=1.0)]
    assert outlook(launch(lines), SIZES) == "step 31 of 40 trains; the first step shows how long the run takes"


def test_when_a_run_with_steps_will_end() -> None:
    gate = {"rollouts_running": 1, "finished_untrained": 3, "trained_version": 30}
    lines = {"gserver_manager/0": [line(5.0, **gate), line(320.0, **gate)]}
    ends = {step: 20.0 + 10.0 * step for step in range(1, 31)}
    assert outlook(launch(lines, ends), SIZES) == (
        "step 31 of 40: 3 of 8 rollouts are ready, complete in about 10 s; the run in about 2 min"
    )
    lines["master_worker/0"] = [line(324.0, training=1.0)]
    assert outlook(launch(lines, ends), SIZES) == (
        "step 31 of 40 trains, complete in about 6 s; the run in about 2 min"
    )
    lines["master_worker/0"] = [line(360.0)]
    assert outlook(launch(lines, ends), SIZES).endswith(
        ", not complete after about 40 s, where a step takes about 10 s"
    )
    slow_then_fast = {step: at if step > 19 else at - 900.0 for step, at in ends.items() if step != 1}
    assert launch(lines, slow_then_fast).step_s == 10.0, "by the newest steps"
    assert outlook(launch(lines, {1: 20.0}), SIZES).endswith("takes about 15 s"), "of one step since the first rollout"
    assert outlook(launch(lines, ends), StepSizes(30, 8, 4)) == "", "the run is complete"


@pytest.mark.parametrize(
    ("seconds", "reported"),
    [(0.2, "about 1 s"), (89, "about 89 s"), (90, "about 2 min"), (3600, "about 60 min"), (7800, "about 2 h 10 min")],
)
def test_durations_are_told_for_people(seconds: float, reported: str) -> None:
    assert about(seconds) == reported


def stalled(since_s: float = 500.0, **of_worker: float) -> dict[str, list[Line]]:
    """Lines of a run that trains its third step for `since_s`, and whose rank has been silent for most of it."""
    return {
        "master_worker/0": [line(20.0 + since_s, "trains step 3", "works")],
        "model_worker/0": [line(30.0, "computes actor_train", "works")],
        "gserver_manager/0": [line(20.0 + since_s, rollouts_running=2, finished_untrained=6, trained_version=2)],
        "rollout_worker/0": [line(since_s), line(20.0 + since_s, **of_worker)],
    }


def test_a_run_that_stands_still_tells_since_when_what_each_process_does_and_who_is_silent() -> None:
    assert shown(stalled(), {1: 10.0, 2: 20.0}) == [
        "The run is stalled: no step since 500 s, after step 2; master_worker/0 trains step 3 since 520 s; "
        "model_worker/0 computes actor_train since 520 s. Silent: model_worker/0. The manager counts 2 rollouts under "
        "way and 6 that wait to be trained. Look at the log of model_worker/0; py-spy dump shows where it is."
    ]
    waiting = launch(
        {"master_worker/0": [line(520.0, "waits for the rollouts of step 3", "serves")]}, {1: 10.0, 2: 20.0}
    )
    found = stall(waiting)
    assert found is not None
    sentence, advice = found
    assert sentence == "no step since 500 s, after step 2; all processes wait."
    assert advice.startswith("Look at the log of the process named first;")


@pytest.mark.parametrize("work", ["answers_total", "flops_total"])
def test_a_run_whose_answers_end_or_whose_ranks_compute_has_a_long_step(work: str) -> None:
    lines = stalled()
    lines["rollout_worker/0"] = [line(500.0, **{work: 7}), line(520.0, **{work: 9})]
    assert stall(launch(lines, {1: 10.0, 2: 20.0})) is None
    lines["rollout_worker/0"] = [line(500.0, **{work: 9}), line(520.0, **{work: 9})]
    assert stall(launch(lines, {1: 10.0, 2: 20.0})) is not None
    lines["rollout_worker/0"] = [line(400.0, **{work: 7}), line(455.0, **{work: 9}), line(520.0, **{work: 9})]
    assert stall(launch(lines, {1: 10.0, 2: 20.0})) is not None, "that was more than a minute ago"


def test_a_step_may_take_a_minute_and_eight_times_as_long_as_others() -> None:
    assert stall(launch(stalled(LONG_S - 1), {1: 15.0, 2: 20.0})) is None
    assert stall(launch(stalled(LONG_S + 1), {1: 15.0, 2: 20.0})) is not None
    assert stall(launch(stalled(79.0), {1: 10.0, 2: 20.0})) is None
    assert stall(launch(stalled(81.0), {1: 10.0, 2: 20.0})) is not None


def test_a_line_without_a_beginning_tells_no_time() -> None:
    assert str(StatusLine("all wait")) == "all wait"
