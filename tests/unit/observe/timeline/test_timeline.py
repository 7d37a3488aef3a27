"""A run in time: spans, lanes, the Chrome trace and the picture."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from asyncrl.launch import main
from asyncrl.observe.history import History
from asyncrl.observe.timeline import Span, Timeline, timeline
from asyncrl.observe.timeline.chrome import chrome_trace
from asyncrl.observe.timeline.spans import PHASES, TRAINER, in_lanes
from asyncrl.observe.timeline.svg import svg_picture
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


def test_no_two_spans_of_a_lane_overlap(line: Timeline) -> None:
    for spans in by_lane(line).values():
        ordered = sorted(spans, key=lambda span: span.begin)
        assert all(one.end <= two.begin + 1e-6 for one, two in pairwise(ordered)), ordered[0].track


def test_rollouts_take_exactly_as_many_lanes_as_ran_at_a_time() -> None:
    spans = [(0.0, 4.0, "a"), (1.0, 3.0, "b"), (2.0, 5.0, "c"), (3.5, 6.0, "d"), (4.0, 7.0, "e")]
    assert {what: lane for lane, what in in_lanes(spans)} == {"a": 0, "b": 1, "c": 2, "d": 1, "e": 0}


def test_rollouts_have_no_more_lanes_than_places(line: Timeline) -> None:
    lanes = {span.lane for span in line.spans if span.kind == "rollout"}
    assert lanes == set(range(KNOBS.places))


def test_inferred_phases_fill_their_step_in_order(line: Timeline) -> None:
    steps = {span.about["step"]: span for span in line.spans if span.kind == "step"}
    for number, step in steps.items():
        phases = [span for span in line.spans if span.track == TRAINER and span.about["step"] == number]
        assert [span.name for span in phases] == list(PHASES)
        assert phases[0].begin == pytest.approx(step.begin)
        assert phases[-1].end == pytest.approx(step.end, abs=0.05)


def test_told_phases_win_over_inferred_ones(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    VirtualRun(KNOBS, copy).play()
    at = History(copy).steps[5].at
    with (copy / "observed" / "master_worker-0.jsonl").open("a") as file:
        file.write(json.dumps({"span": "train", "begin": at - 0.4, "end": at - 0.1, "step": 5}) + "\n")
    told = [span for span in timeline(History(copy)).spans if span.track == TRAINER and span.about["step"] == 5]
    assert [(span.name, span.begin, span.end) for span in told] == [("train", at - 0.4, at - 0.1)]


def test_an_arrow_leads_from_each_trained_rollout_to_its_step(line: Timeline) -> None:
    trained = [span for span in line.spans if span.kind == "rollout" and span.about["end"] == "trained"]
    assert len(line.arrows) == len(trained) == KNOBS.batch * KNOBS.steps
    for arrow in line.arrows:
        assert arrow.step.about["step"] == arrow.rollout.about["step"]
        assert arrow.step.begin >= arrow.rollout.end - 1e-6


def test_updates_are_on_their_servers_track_and_evaluations_among_the_events(line: Timeline) -> None:
    assert {span.track for span in line.spans if span.kind == "update"} == {"generation_server/0"}
    assert any(span.kind == "evaluation" for span in line.spans)


def check_event(event: dict[str, Any], names: dict[int, str]) -> None:
    """The rules of the Trace Event Format for the phases that are used here."""
    assert event["ph"] in "XMCsf"
    assert isinstance(event["pid"], int)
    assert isinstance(event["name"], str)
    if event["ph"] == "M":
        assert event["name"] in {"process_name", "process_sort_index"}
        return
    assert event["pid"] in names
    assert isinstance(event["ts"], int)
    if event["ph"] == "X":
        assert isinstance(event["dur"], int)
        assert event["dur"] > 0
        assert isinstance(event["tid"], int)
    if event["ph"] == "C":
        assert all(isinstance(value, (int, float)) for value in event["args"].values())


def test_the_trace_follows_the_trace_event_format(line: Timeline) -> None:
    trace = json.loads(json.dumps(chrome_trace(line, "mine")))
    events = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    for event in events:
        check_event(event, names)
    slices = [event for event in events if event["ph"] == "X"]
    for begin, end in zip(*([e for e in events if e["ph"] == kind] for kind in "sf"), strict=True):
        assert begin["id"] == end["id"]
        for event in (begin, end):  # an arrow is bound to the slice that encloses it
            assert any(
                (each["pid"], each["tid"]) == (event["pid"], event["tid"])
                and each["ts"] <= event["ts"] <= each["ts"] + each["dur"]
                for each in slices
            )


def test_the_picture_is_well_formed_and_its_texts_are_escaped(line: Timeline) -> None:
    picture = svg_picture(line, "<script>alert(1)</script>")
    root = ElementTree.fromstring(picture)
    assert root.tag.endswith("svg")
    assert "<script>" not in picture


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
    with pytest.raises(SystemExit, match="2"):
        main(["trace", str(run), "--steps", "x"])
    assert "give FROM:TO" in capsys.readouterr().err
