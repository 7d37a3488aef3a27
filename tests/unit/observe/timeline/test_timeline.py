"""A run in time: spans, lanes, the Chrome trace and the picture."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from asyncrl.launch.__main__ import main
from asyncrl.launch.commands.trace import _placed, chrome_trace, svg_picture
from asyncrl.observe.history import History
from asyncrl.observe.timeline import OTHER, PHASES, TRAINER, Span, Timeline, in_lanes, timeline
from tests.unit.observe.doctor.virtual_run import Knobs, VirtualRun

KNOBS = Knobs(steps=12, eval_samples=50)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mine" / "trial0"
    VirtualRun(KNOBS, folder).play()
    return folder


@pytest.fixture(scope="module")
def line(run: Path) -> Timeline:
    return timeline(History(run))


def by_lane(line: Timeline) -> dict[tuple[str, int], list[Span]]:
    lanes = defaultdict(list)
    for span in line.spans:
        lanes[span.track, span.lane].append(span)
    return lanes


def assert_no_lane_overlaps(line: Timeline) -> None:
    for spans in by_lane(line).values():
        ordered = sorted(spans, key=lambda span: (span.begin, span.end))
        assert all(one.end <= two.begin + 1e-6 for one, two in pairwise(ordered)), ordered[0].track


def test_no_two_spans_of_a_lane_overlap(line: Timeline) -> None:
    assert_no_lane_overlaps(line)


def test_rollouts_take_exactly_as_many_lanes_as_ran_at_a_time() -> None:
    spans = [(0.0, 4.0, "a"), (1.0, 3.0, "b"), (2.0, 5.0, "c"), (3.5, 6.0, "d"), (4.0, 7.0, "e")]
    assert {what: lane for lane, what in in_lanes(spans)} == {"a": 0, "b": 1, "c": 2, "d": 1, "e": 0}


def test_rollouts_have_no_more_lanes_than_places(line: Timeline) -> None:
    lanes = {span.lane for span in line.spans if span.kind == "rollout"}
    assert lanes == set(range(KNOBS.slots))


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A run to change."""
    return shutil.copytree(run, tmp_path / "copy")


def append(copy: Path, file: str, *lines: dict[str, Any]) -> None:
    with (copy / file).open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)


def phases_of(line: Timeline, step: int) -> list[Span]:
    return [span for span in line.spans if span.track == TRAINER and span.about["step"] == step]


def test_inferred_phases_are_in_order_and_sum_to_their_step(line: Timeline, run: Path) -> None:
    rows = History(run).rows
    steps = {span.about["step"]: span for span in line.spans if span.kind == "step"}
    assert set(steps) == set(range(1, KNOBS.steps + 1))
    for number, step in steps.items():
        phases = phases_of(line, number)
        names = [span.name for span in phases]
        assert names == [name for name in (*PHASES, OTHER) if name in names]
        assert phases[0].begin == step.begin
        assert phases[-1].end == step.end
        assert all(one.end == two.begin for one, two in pairwise(phases))
        for span in phases:
            if span.name != OTHER:
                assert span.end - span.begin == pytest.approx(rows[number][f"time/{span.name}_s"], abs=1e-6)


def test_phases_longer_than_their_step_are_cut_at_its_end(copy: Path) -> None:
    rows = [json.loads(row) for row in (copy / "metrics.jsonl").read_text().splitlines()]
    rows[4] |= {"time/wait_for_batch_s": 0.01, "time/train_s": 1000.0}
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = timeline(History(copy))
    step = next(span for span in line.spans if span.name == "step 5")
    assert [span.name for span in phases_of(line, 5)] == ["wait_for_batch", "train"]
    assert phases_of(line, 5)[-1].end == step.end


def test_told_phases_win_over_inferred_ones(copy: Path) -> None:
    at = History(copy).steps[5].at
    append(copy, "observed/master_worker-0.jsonl", {"span": "train", "begin": at - 0.4, "end": at - 0.1, "step": 5})
    reported = phases_of(timeline(History(copy)), 5)
    assert [(span.name, span.begin, span.end) for span in reported] == [("train", at - 0.4, at - 0.1)]


def test_phases_of_a_step_that_was_trained_again_are_marked_and_get_no_arrow(copy: Path) -> None:
    at = History(copy).steps[5].at
    before = {"span": "train", "begin": at - 8.4, "end": at - 8.1, "step": 5}
    append(copy, "observed/master_worker-0.jsonl", before, {**before, "begin": at - 0.4, "end": at - 0.1})
    line = timeline(History(copy))
    assert [span.about.get("forgotten", False) for span in phases_of(line, 5)] == [True, False]
    assert {arrow.step.begin for arrow in line.arrows if arrow.step.about["step"] == 5} == {at - 0.4}


def test_sets_that_are_evaluated_at_the_same_time_have_a_lane_each(copy: Path) -> None:
    at = History(copy).steps[5].at
    sets = [{"span": "evaluation", "begin": at, "end": at + 0.5, "version": 5, "set": name} for name in ("a", "b", "c")]
    append(copy, "observed/master_worker-0.jsonl", *sets)
    append(copy, "observed/master_worker-0.jsonl", {"span": "checkpoint", "begin": at, "end": at + 0.3, "version": 5})
    line = timeline(History(copy))
    events = [span for span in line.spans if span.about.get("version") == 5 and span.track == "events"]
    assert len({span.lane for span in events if span.kind == "evaluation"}) >= 3
    assert not {s.lane for s in events if s.kind == "evaluation"} & {s.lane for s in events if s.kind == "checkpoint"}
    assert_no_lane_overlaps(line)


def test_a_restart_lasts_until_its_process_is_ready(copy: Path) -> None:
    at = History(copy).steps[5].at
    append(
        copy,
        "restarts.jsonl",
        {"time": at, "restarted": "rollout_worker/0", "reason": "was killed by signal SIGKILL"},
        {"time": at + 0.8, "went_on": "rollout_worker/0", "seconds": 1.0},
        {"time": at + 0.9, "restarted": "gserver_manager/0", "reason": "exit code 1"},
    )
    restarts = [span for span in timeline(History(copy)).spans if span.kind == "restart"]
    assert [span.name for span in restarts] == ["restart of rollout_worker/0", "restart of gserver_manager/0"]
    times = [time for span in restarts for time in (span.begin, span.end)]
    assert times == pytest.approx([at - 0.2, at + 0.8, at + 0.9, at + 0.9], rel=0, abs=1e-4)
    assert restarts[0].about == {"reason": "was killed by signal SIGKILL"}


def test_a_finished_rollout_waits_from_its_end_to_the_training_of_its_step(line: Timeline) -> None:
    waits = {span.about["rollout"]: span for span in line.spans if span.kind == "wait"}
    waited = [arrow for arrow in line.arrows if arrow.step.begin > arrow.rollout.end]
    assert waited
    for arrow in waited:
        wait = waits[arrow.rollout.about["rollout"]]
        assert (wait.begin, wait.end) == (arrow.rollout.end, arrow.step.begin)


def test_a_rollout_that_waits_and_is_then_dropped_waits_until_the_drop(copy: Path) -> None:
    at = History(copy).steps[5].at
    lines = [
        {"kind": "admitted", "rollout": "late", "prompt": "e0-9", "order": 9, "attempt": 0, "version": 4, "at": at - 2},
        {"kind": "finished", "rollout": "late", "tokens": 8, "at": at - 1},
        {"kind": "dropped", "rollout": "late", "reason": "stale", "prompt": "given_up", "at": at},
    ]
    append(copy, "ledger/000001.jsonl", {**lines[0], "worker": "rollout_worker/0"}, *lines[1:])
    waits = [
        span for span in timeline(History(copy)).spans if span.about.get("rollout") == "late" and span.kind == "wait"
    ]
    assert [(span.name, span.begin, span.end) for span in waits] == [("dropped: stale", at - 1, at)]


def test_what_happens_after_the_newest_step_is_shown_unless_a_last_step_is_asked_for(copy: Path) -> None:
    at = History(copy).steps[KNOBS.steps].at
    append(
        copy, "observed/master_worker-0.jsonl", {"span": "evaluation", "begin": at + 1, "end": at + 9, "version": 12}
    )
    assert timeline(History(copy)).end == at + 9
    assert timeline(History(copy), 3, KNOBS.steps).end == at


def test_the_first_steps_shown_keep_the_rollouts_that_finished_before_them(run: Path) -> None:
    whole, part = timeline(History(run)), timeline(History(run, keep_from=6), 6, 8)
    begin, end = part.begin, part.end
    expected = {s.about["rollout"] for s in whole.spans if s.kind == "wait" and begin < s.end and s.begin < end}
    assert {s.about["rollout"] for s in part.spans if s.kind == "wait"} == expected
    expected = {s.about["rollout"] for s in whole.spans if s.kind == "rollout" and begin < s.end and s.begin < end}
    assert {s.about["rollout"] for s in part.spans if s.kind == "rollout"} == expected


def test_only_rollouts_from_the_first_step_asked_for_are_kept_in_memory(run: Path) -> None:
    assert {rollout.step for rollout in History(run, keep_from=10).rollouts.values()} - {None} == {10, 11, 12}


def test_an_arrow_leads_from_each_trained_rollout_to_its_step(line: Timeline) -> None:
    trained = [span for span in line.spans if span.kind == "rollout" and span.about["end"] == "trained"]
    assert len(line.arrows) == len(trained) == KNOBS.batch * KNOBS.steps
    for arrow in line.arrows:
        assert arrow.step.about["step"] == arrow.rollout.about["step"]
        assert arrow.step.begin >= arrow.rollout.end - 1e-6


def test_a_rollout_that_the_ledger_tells_late_ends_with_the_begin_of_its_training(copy: Path) -> None:
    train = next(span for span in phases_of(timeline(History(copy)), 5) if span.name == "train")
    ledger = copy / "ledger" / "000001.jsonl"
    lines = [json.loads(text) for text in ledger.read_text().splitlines()]
    trained = {one["rollout"] for one in lines if one["kind"] == "trained" and one["step"] == 5}
    late = [one for one in lines if one["kind"] == "finished" and one["rollout"] in trained]
    for one in late:
        one["at"] = train.begin + 0.05
    ledger.write_text("".join(json.dumps(one) + "\n" for one in lines))
    line = timeline(History(copy))
    ends = [arrow.rollout.end for arrow in line.arrows if arrow.step.about["step"] == 5]
    assert ends == [train.begin] * len(late)
    assert_is_a_trace(json.loads(json.dumps(chrome_trace(line, "mine"))))


def test_steps_do_not_overlap_where_their_rows_seconds_are_too_long(copy: Path) -> None:
    rows = [json.loads(row) for row in (copy / "metrics.jsonl").read_text().splitlines()]
    rows[4]["time/step_s"] += 0.003
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert_no_lane_overlaps(timeline(History(copy)))


def test_updates_are_on_their_servers_track_and_evaluations_among_the_events(line: Timeline) -> None:
    assert {span.track for span in line.spans if span.kind == "update"} == {"generation_server/0"}
    assert any(span.kind == "evaluation" for span in line.spans)


REQUIRED = {
    "M": {"ph", "pid", "name", "args"},
    "X": {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"},
    "C": {"ph", "pid", "tid", "name", "ts", "args"},
    "s": {"ph", "pid", "tid", "name", "cat", "ts", "id"},
    "f": {"ph", "pid", "tid", "name", "cat", "ts", "id", "bp"},
}
"""Fields of the events that are used here, by their phase, in the Trace Event Format."""
METADATA = {"process_name": "name", "process_sort_index": "sort_index"} | {
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def assert_is_a_trace(trace: dict[str, Any]) -> None:
    """The rules of the Trace Event Format, and those by which Perfetto reads it."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    events = trace["traceEvents"]
    named = {
        (e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")
    }
    assert len({name for (_, lane), name in named.items() if lane is None}) == sum(lane is None for _, lane in named)
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    arrows: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        meta = event["ph"] == "M" and event["name"].startswith("thread")
        assert set(event) == REQUIRED[event["ph"]] | ({"tid"} if meta else set())
        numbers = [event[key] for key in ("pid", "tid", "ts", "dur", "id") if key in event]
        assert all(type(number) is int for number in numbers)
        assert all(event[key] > 0 for key in ("pid", "tid", "id") if key in event)  # 0 is Perfetto's idle process
        assert all(event[key] >= 0 for key in ("ts", "dur") if key in event)
        if event["ph"] == "M":
            assert set(event["args"]) == {METADATA[event["name"]]}
        elif event["ph"] == "C":
            assert (event["pid"], None) in named
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        else:
            assert (event["pid"], event["tid"]) in named
            (lanes if event["ph"] == "X" else arrows)[event["pid"], event["tid"]].append(event)
    for slices in lanes.values():  # Perfetto drops a slice that overlaps another one without being inside
        slices.sort(key=lambda each: (each["ts"], each["dur"]))
        assert all(one["ts"] + one["dur"] <= two["ts"] for one, two in pairwise(slices))
    for lane, ends in arrows.items():  # an arrow is bound to the slice that encloses it
        for end in ends:
            assert any(each["ts"] <= end["ts"] <= each["ts"] + each["dur"] for each in lanes[lane])
    begun, ended = ({event["id"]: event["ts"] for event in events if event["ph"] == kind} for kind in "sf")
    assert begun.keys() == ended.keys()
    assert len(begun) + len(ended) == sum(event["ph"] in "sf" for event in events)
    assert all(at <= ended[number] for number, at in begun.items())


def test_the_trace_follows_the_trace_event_format(line: Timeline) -> None:
    trace = json.loads(json.dumps(chrome_trace(line, "mine")))
    assert_is_a_trace(trace)
    kinds = {event.get("cat") for event in trace["traceEvents"]}
    assert kinds >= {"step", "phase", "rollout", "wait", "update", "evaluation", "flow"}


def test_a_loss_that_is_no_number_leaves_the_trace_standard_json(copy: Path) -> None:
    rows = [json.loads(row) for row in (copy / "metrics.jsonl").read_text().splitlines()]
    rows[4] |= {"loss": math.nan, "reward/mean": math.inf}
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = json.dumps(chrome_trace(timeline(History(copy)), "mine"), allow_nan=False)
    assert_is_a_trace(json.loads(text))
    assert '"loss": "nan"' in text


def test_the_picture_is_well_formed_and_its_texts_are_escaped(line: Timeline) -> None:
    picture = svg_picture(line, "<script>alert(1)</script>")
    root = ElementTree.fromstring(picture)
    assert root.tag.endswith("svg")
    assert "<script>" not in picture


def test_the_picture_fits_a_page_and_has_a_colour_for_every_bar_in_light_and_dark(line: Timeline) -> None:
    root = ElementTree.fromstring(svg_picture(line, "mine/trial0"))
    assert float(root.attrib["width"]) <= 800
    shapes = [each for each in root.iter() if each.tag.endswith(("}rect", "}text"))]
    assert all(0 <= float(each.attrib.get("x", 0)) < 800 for each in shapes)
    light, dark = next(each.text or "" for each in root.iter() if each.tag.endswith("}style")).split("@media")
    assert "(prefers-color-scheme: dark)" in dark
    bars = {each.attrib["class"] for each in shapes if each.tag.endswith("}rect")}
    assert {"page", "train", "step", "update"} <= bars
    assert all(f".{bar} {{ fill: " in light for bar in bars)
    assert ".page { fill: " in dark


def test_a_legend_that_does_not_fit_goes_on_in_another_row() -> None:
    keys = [(f"phase number {number}", "train") for number in range(12)]
    placed = list(_placed(keys))
    assert {row for _, row, _, _ in placed} == {0, 1, 2}
    assert all(x + 14 + 6 * len(name) < 800 for x, _, name, _ in placed)


def test_the_command_writes_both(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, svg = tmp_path / "t.json", tmp_path / "t.svg"
    assert main(["trace", str(run), "--out", str(out), "--svg", str(svg), "--steps", "3:5"]) == 0
    steps = {event["name"] for event in json.loads(out.read_text())["traceEvents"] if event.get("cat") == "step"}
    assert steps == {"step 3", "step 4", "step 5"}
    assert svg.read_text().startswith("<svg")
    assert "ui.perfetto.dev" in capsys.readouterr().out


def test_steps_that_are_not_there_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run), "--steps", "50:60"]) == 2
    assert "it has the steps 1 to 12" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "message"), [("x", "give FROM:TO"), ("-5:", "give FROM:TO"), ("", "give FROM:TO"), ("9:3", "give 3:9")]
)
def test_a_range_that_is_none_is_refused(
    run: Path, steps: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["trace", str(run), f"--steps={steps}"])
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_one_error(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "missing" / "t.json"
    assert main(["trace", str(run), "--out", str(out)]) == 2
    assert f"error: {out}: No such file or directory" in capsys.readouterr().err
