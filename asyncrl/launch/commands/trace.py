"""`python -m asyncrl.launch trace RUN`: show a run over time, for ui.perfetto.dev or as a picture.

The trace has the "Trace Event Format" (Google, 2016), which ui.perfetto.dev and chrome://tracing open. A track is a
process there and a lane a thread. Times are whole microseconds since the timeline's begin.

In the picture (SVG, for documents) time runs to the right, and each lane is a row. It omits what a document cannot show
well and the trace has: the calls of ranks, arrows and single waits. It shows the number of waiting rollouts over time
instead.

Exit codes: 0 written, 2 the folder is not a run or has none of the steps, or a file cannot be written.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from asyncrl.launch.commands import refuse
from asyncrl.observe.history import History
from asyncrl.observe.timeline import (
    EVENTS,
    LAST_STEPS,
    OTHER,
    PHASES,
    STEPS,
    TRAINER,
    WAITING,
    Span,
    Timeline,
    timeline,
)
from asyncrl.runtime.settings import EXIT_OK


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"{program} trace",
        description="Write what a run did when, as a Chrome trace (open it in ui.perfetto.dev) or an SVG picture.",
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="the trace; default: trace.json")
    parser.add_argument("--svg", type=Path, metavar="FILE.svg", help="a picture")
    parser.add_argument(
        "--steps",
        type=_steps,
        default=(None, None),
        metavar="FROM:TO",
        help=f"train steps, such as 8:22, 8 or `:` for all; default: the newest {LAST_STEPS}",
    )
    args = parser.parse_args(argv)
    out = args.out or (None if args.svg is not None else Path("trace.json"))
    try:
        first, last = args.steps
        history = History(args.run, keep_steps=LAST_STEPS) if first is None else History(args.run, keep_from=first)
        line, name = timeline(history, first, last), history.name
        if args.svg is not None:
            args.svg.write_text(svg_picture(line, name), encoding="utf-8")
            print(f"{args.svg}: {len(line.spans)} spans, {args.svg.stat().st_size / 1e6:.1f} MB")
        if out is not None:
            trace = chrome_trace(line, name)
            out.write_text(json.dumps(trace, separators=(",", ":"), allow_nan=False), encoding="utf-8")
            size = out.stat().st_size / 1e6
            print(f"{out}: {len(trace['traceEvents'])} events, {size:.1f} MB; open it in https://ui.perfetto.dev")
    except OSError as error:
        return refuse(f"{error.filename}: {error.strerror}; give another file or folder")
    except ValueError as error:
        return refuse(error)
    return EXIT_OK


def _steps(text: str) -> tuple[int, int | None]:
    """Parse the first and last step from `FROM:TO` or a single number; without a last step, all from the first on."""
    match = re.fullmatch(r"(?P<first>\d*):(?P<last>\d*)|(?P<only>\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give FROM:TO, such as 8:22, or one step, such as 8")
    if match["only"] is not None:
        return int(match["only"]), int(match["only"])
    first, last = int(match["first"] or 0), int(match["last"]) if match["last"] else None
    if last is not None and last < first:
        raise argparse.ArgumentTypeError(f"{text!r}: step {last} comes before step {first}; give {last}:{first}")
    return first, last


_ORDER = {STEPS: 0, TRAINER: 1, EVENTS: 2, WAITING: 4}
_LANE_NAMES = {"step": "steps", "phase": "phases", "rollout": "place {}", "wait": "rollout {}"}
COUNTERS = 1
"""Number of the track of counters; the others follow. Perfetto keeps 0 for the idle process and thread."""


def chrome_trace(line: Timeline, name: str) -> dict[str, Any]:
    """Return the trace as values of standard JSON."""
    return {"traceEvents": list(_events(line)), "displayTimeUnit": "ms", "otherData": {"run": name}}


def _events(line: Timeline) -> Iterator[dict[str, Any]]:
    def us(at: float) -> int:
        return round((at - line.begin) * 1e6)

    tracks = sorted({span.track for span in line.spans}, key=lambda track: (_ORDER.get(track, 3), track))
    numbers = {track: number for number, track in enumerate(tracks, COUNTERS + 1)}
    for track, number in (("counters", COUNTERS), *numbers.items()):
        yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": track}}
        yield {"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": number}}
    lanes = {(numbers[span.track], span.lane + 1): span.kind for span in line.spans}
    for (number, lane), kind in sorted(lanes.items()):
        thread = {"ph": "M", "pid": number, "tid": lane}
        yield {**thread, "name": "thread_name", "args": {"name": _LANE_NAMES.get(kind, kind).format(lane)}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": lane}}
    for span in line.spans:
        yield {
            "ph": "X",
            "pid": numbers[span.track],
            "tid": span.lane + 1,
            "name": span.name,
            "cat": span.kind,
            "ts": us(span.begin),
            "dur": us(span.end) - us(span.begin),
            "args": {key: _standard(value) for key, value in span.about.items() if value is not None},
        }
    for number, arrow in enumerate(line.arrows, 1):
        start, step = arrow.rollout, arrow.step
        flow = {"id": number, "name": "trained", "cat": "flow"}
        inside = max(us(start.begin), us(start.end) - 1)
        yield {**flow, "ph": "s", "pid": numbers[start.track], "tid": start.lane + 1, "ts": inside}
        yield {**flow, "ph": "f", "bp": "e", "pid": numbers[step.track], "tid": step.lane + 1, "ts": us(step.begin)}
    for name, at, value in line.counters:
        yield {"ph": "C", "pid": COUNTERS, "tid": 1, "name": name, "ts": us(at), "args": {"value": value}}


def _standard(value: Any) -> Any:
    """`value`, or its name if JSON has no such number: Perfetto opens no file with NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


WIDTH, LEFT, RIGHT, TOP = 1280, 190, 20, 62
PHASE_COLOURS = {
    "wait_for_batch": "#d9534f",
    "switch": "#7fb8c9",
    "train": "#3b6fb6",
    "publish": "#e0a030",
    "memory_checkpoint": "#6b7078",
    "wait_eval": "#c77dba",
    OTHER: "#d5d8dd",
}
KIND_COLOURS = {"update": "#2a9d8f", "evaluation": "#8e5ea2", "checkpoint": "#6b7078", "restart": "#b3202c"}
VERSIONS = ("#8fb4e3", "#b7a3d9", "#9fd0b5", "#f0c987", "#e8a3a3", "#9ad2e0")
UNTRAINED = "#e0e0e0"
STEP_FILL, LINE, TEXT, DIM = "#eef1f5", "#c9ccd1", "#30343b", "#6b7078"
_ROW = {STEPS: 22.0, TRAINER: 20.0}
_GAP = 14.0
_AREA = 36.0
"""Height of the area that shows the number of waiting rollouts."""
_LEGEND_ROW = 20.0
_TICKS = 10
_TIP_KEYS = ("prompt", "step", "reward", "version", "set", "reason", "served")
"""Keys that a bar's tooltip shows."""


def svg_picture(line: Timeline, name: str) -> str:
    """Return the picture. Rollouts are coloured by the version that admitted them; rollouts that no step trained are
    grey.
    """
    steps = [span for span in line.spans if span.kind == "step"]
    first, last = steps[0].about["step"], steps[-1].about["step"]
    asked = f"step {first}" if first == last else f"steps {first} to {last}"
    body = [_text(16, 26, f"{name}: {asked}, {line.end - line.begin:.1f} s", size=15, weight=600)]
    rows = _rows(line)
    y = TOP + sum(height for _, _, height in rows) + _GAP * len(rows)
    body += _grid(line, steps, y - _GAP)
    at = float(TOP)
    for track, spans, height in rows:
        body += _track(line, track, spans, at, height)
        at += height + _GAP
    body += _legend(line, y)
    height = round(y + 2 * _LEGEND_ROW + 10)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="DejaVu Sans, Noto Sans, sans-serif" font-size="11" fill="{TEXT}">'
    )
    return f'{head}<rect width="{WIDTH}" height="{height}" fill="#fff"/>{"".join(body)}</svg>\n'


def _rows(line: Timeline) -> list[tuple[str, list[Span], float]]:
    """Return the tracks from the top to the bottom, with their spans and heights."""
    by_track: dict[str, list[Span]] = defaultdict(list)
    for span in line.spans:
        if span.kind != "call":
            by_track[span.track].append(span)
    servers = sorted({span.track for span in line.spans if span.kind == "update"})
    workers = sorted({span.track for span in line.spans if span.kind == "rollout"})
    order = [track for track in (STEPS, TRAINER, EVENTS, *servers, WAITING, *workers) if track in by_track]
    heights = {
        track: _AREA if track == WAITING else _lanes(spans) * _row(track, spans) for track, spans in by_track.items()
    }
    return [(track, by_track[track], heights[track]) for track in order]


def _lanes(spans: Sequence[Span]) -> int:
    return 1 + max(span.lane for span in spans)


def _row(track: str, spans: Sequence[Span]) -> float:
    """Return the height of a lane."""
    return _ROW.get(track, 7.0 if _lanes(spans) > 4 else 13.0)


def _track(line: Timeline, track: str, spans: Sequence[Span], y: float, height: float) -> Iterator[str]:
    if track == WAITING:
        yield from _area(line, spans, y, height)
        return
    row = _row(track, spans)
    yield _label(track, y + min(15, (row + 8) / 2 if _lanes(spans) == 1 else 11))
    if spans[0].kind == "rollout":
        yield _label(f"{_lanes(spans)} places", y + 25, DIM)
    for span in spans:
        yield _bar(line, span, y + span.lane * row, row - 1.5)


def _bar(line: Timeline, span: Span, y: float, height: float) -> str:
    x, end = _x(line, span.begin), _x(line, span.end)
    width = max(0.8, end - x - 0.4)
    details = "".join(f", {key} {span.about[key]}" for key in _TIP_KEYS if span.about.get(key) is not None)
    tip = escape(f"{span.name}: {1000 * (span.end - span.begin):.0f} ms{details}")
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}" fill="{_fill(span)}"'
    bar = f"<rect {shape}><title>{tip}</title></rect>"
    number = str(span.about.get("step"))
    if span.kind == "step" and width > 8 + 7 * len(number):
        bar += _text(x + width / 2, y + 15, number, anchor="middle")
    return bar


def _fill(span: Span) -> str:
    if span.kind == "rollout":
        return UNTRAINED if span.about["step"] is None else VERSIONS[span.about["version"] % len(VERSIONS)]
    return PHASE_COLOURS.get(span.name, KIND_COLOURS.get(span.kind, STEP_FILL))


def _area(line: Timeline, waits: Sequence[Span], y: float, height: float) -> Iterator[str]:
    """Yield the number of `waits` over time, as an area."""
    changes = sorted([(span.begin, 1) for span in waits] + [(span.end, -1) for span in waits])
    points, number, most = [(line.begin, 0)], 0, 1
    for at, change in changes:
        number += change
        most = max(most, number)
        points.append((at, number))
    bottom = y + height
    path = "".join(f"H{_x(line, at):.1f}V{bottom - height * count / most:.1f}" for at, count in points)
    yield _label(WAITING, y + 11)
    yield _label(f"up to {most} rollouts", y + 25, DIM)
    yield f'<path d="M{LEFT} {bottom:.1f}{path}H{_x(line, line.end):.1f}V{bottom:.1f}Z" fill="#b9c4d3"/>'


def _grid(line: Timeline, steps: Sequence[Span], bottom: float) -> Iterator[str]:
    """Yield seconds along the top, and a vertical line at each step's end unless lines would be too close."""
    length = line.end - line.begin
    tick = _round_up(length / _TICKS)
    for number in range(math.floor(length / tick) + 1):
        x = _x(line, line.begin + number * tick)
        yield f'<path d="M{x:.1f} {TOP - 9}v5" stroke="{LINE}"/>'
        yield _text(x, TOP - 12, f"{number * tick:g} s", anchor="middle", fill=DIM, size=10)
    apart = (WIDTH - LEFT - RIGHT) / len(steps)
    for step in steps if apart > 6 else ():
        x = _x(line, step.end)
        yield f'<path d="M{x:.1f} {TOP}V{bottom:.0f}" stroke="{LINE}" stroke-width=".6" stroke-dasharray="2 3"/>'


def _round_up(seconds: float) -> float:
    """Return the next of 1, 2, 5, 10 times a power of ten."""
    base = 10.0 ** math.floor(math.log10(max(seconds, 1e-6)))
    return next(factor * base for factor in (1, 2, 5, 10) if factor * base >= seconds * (1 - 1e-9))


def _legend(line: Timeline, y: float) -> Iterator[str]:
    """Yield the colours that the picture has."""
    names = {span.name for span in line.spans if span.kind == "phase"}
    kinds = {span.kind for span in line.spans}
    phases = [(name.replace("_", " "), PHASE_COLOURS[name]) for name in (*PHASES, OTHER) if name in names]
    yield from _keys("trainer", phases + [(k, colour) for k, colour in KIND_COLOURS.items() if k in kinds], y)
    rollouts = [span for span in line.spans if span.kind == "rollout"]
    versions = sorted({span.about["version"] for span in rollouts if span.about["step"] is not None})
    firsts = {version % len(VERSIONS): version for version in reversed(versions)}  # of each colour
    some = [(f"v{version}", VERSIONS[colour]) for colour, version in sorted(firsts.items(), key=lambda item: item[1])]
    if len(versions) > len(some):
        some.append(("and so on: version at admission", "none"))
    if any(span.about["step"] is None for span in rollouts):
        some.append(("not trained (yet)", UNTRAINED))
    yield from _keys("rollouts", some, y + _LEGEND_ROW)


def _keys(label: str, keys: Sequence[tuple[str, str]], y: float) -> Iterator[str]:
    yield _label(label, y + 10, DIM)
    x = float(LEFT)
    for name, colour in keys:
        box = 0 if colour == "none" else 14
        if box:
            yield f'<rect x="{x:.0f}" y="{y + 1:.0f}" width="10" height="10" fill="{colour}"/>'
        yield _text(x + box, y + 10, name)
        x += box + 16 + 6.8 * len(name)


def _x(line: Timeline, at: float) -> float:
    inside = min(max(at, line.begin), line.end) - line.begin
    return LEFT + inside / max(line.end - line.begin, 1e-9) * (WIDTH - LEFT - RIGHT)


def _label(text: str, y: float, fill: str = TEXT) -> str:
    return _text(LEFT - 10, y, text, anchor="end", fill=fill)


def _text(
    x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", weight: int = 400, fill: str = TEXT
) -> str:
    chosen = (
        ("text-anchor", anchor, "start"),
        ("font-size", size, 11),
        ("font-weight", weight, 400),
        ("fill", fill, TEXT),
    )
    more = "".join(f' {key}="{value}"' for key, value, usual in chosen if value != usual)
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'
