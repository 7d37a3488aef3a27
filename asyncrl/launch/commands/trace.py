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
from collections.abc import Iterator, Mapping, Sequence
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
            print(f"{args.svg}: {len(line.spans)} spans; open it in a browser")
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
_LANE_NAMES = {"step": "steps", "phase": "phases", "rollout": "slot {}", "wait": "rollout {}"}
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


WIDTH, LEFT, RIGHT, TOP = 800, 160, 20, 62
_COLOURS = {
    "wait_for_batch": "#d9534f",
    "switch": "#7fb8c9",
    "train": "#3b6fb6",
    "publish": "#e0a030",
    "memory_checkpoint": "#6b7078",
    "wait_eval": "#c77dba",
    OTHER: "#d5d8dd",
    "update": "#2a9d8f",
    "evaluation": "#8e5ea2",
    "checkpoint": "#6b7078",
    "restart": "#b3202c",
    "v0": "#8fb4e3",
    "v1": "#b7a3d9",
    "v2": "#9fd0b5",
    "v3": "#f0c987",
    "v4": "#e8a3a3",
    "v5": "#9ad2e0",
    "untrained": "#e0e0e0",
    "step": "#eef1f5",
    "waiting": "#b9c4d3",
    "page": "#ffffff",
    "text": "#1f2328",
    "dim": "#59636e",
}
"""Of bars and texts, by class: phases, kinds of spans, versions (modulo their number), and the page."""
_DARK = {
    "train": "#5a92de",
    "memory_checkpoint": "#8b949e",
    OTHER: "#484f58",
    "checkpoint": "#8b949e",
    "restart": "#f05a5a",
    "untrained": "#484f58",
    "step": "#262c36",
    "waiting": "#4d5b6b",
    "page": "#0d1117",
    "text": "#f0f6fc",
    "dim": "#a9b4c0",
}
"""Those that are others where the reader prefers dark pages."""
_KINDS = ("update", "evaluation", "checkpoint", "restart")
_VERSIONS = 6
_ROW = {STEPS: 22.0, TRAINER: 20.0}
_GAP = 14.0
_AREA = 36.0
"""Height of the area that shows the number of waiting rollouts."""
_LEGEND_ROW = 20.0
_TICKS = 10
_LETTER = 6.8
"""Width of a letter in a legend, about."""
_TIP_KEYS = ("prompt", "step", "reward", "version", "set", "reason", "served")
"""Keys that a bar's tooltip shows."""


def svg_picture(line: Timeline, name: str) -> str:
    """Return the picture. Rollouts are coloured by the version that admitted them; rollouts that no step trained are
    grey.
    """
    steps = [span for span in line.spans if span.kind == "step"]
    first, last = steps[0].about["step"], steps[-1].about["step"]
    asked = f"step {first}" if first == last else f"steps {first} to {last}"
    body = [_text(16, 26, f"{name}: {asked}, {line.end - line.begin:.1f} s", "title")]
    rows = _rows(line)
    y = TOP + sum(height for _, _, height in rows) + _GAP * len(rows)
    body += _grid(line, steps, y - _GAP)
    at = float(TOP)
    for track, spans, height in rows:
        body += _track(line, track, spans, at, height)
        at += height + _GAP
    for label, keys in _legends(line):
        body += [_label(label, y + 10, "dim"), *_keys(keys, y)]
        y += _LEGEND_ROW * (1 + max(row for _, row, _, _ in _placed(keys)))
    height = round(y + 10)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">'
    page = f'<rect class="page" width="{WIDTH}" height="{height}" rx="10"/>'
    return f"{head}\n<style>\n{_style()}</style>\n{page}\n" + "\n".join(body) + "\n</svg>\n"


def _style() -> str:
    """Return the style sheet: as in the pictures of the documentation, for light and dark pages."""

    def fills(colours: Mapping[str, str]) -> str:
        return "".join(f"{'' if name == 'text' else '.'}{name} {{ fill: {each}; }}\n" for name, each in colours.items())

    return (
        'text { font: 12px Helvetica, Arial, "Liberation Sans", "DejaVu Sans", sans-serif; }\n'
        ".title { font-size: 15px; font-weight: bold; }\n.mid { text-anchor: middle; }\n.end { text-anchor: end; }\n"
        ".tick { stroke: #818b98; }\n.grid { stroke: #818b98; stroke-width: 0.6; stroke-dasharray: 2 4; }\n"
        f"{fills(_COLOURS)}@media (prefers-color-scheme: dark) {{\n{fills(_DARK)}}}\n"
    )


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
        yield _label(f"{_lanes(spans)} slots", y + 25, "dim")
    for span in spans:
        yield _bar(line, span, y + span.lane * row, row - 1.5)


def _bar(line: Timeline, span: Span, y: float, height: float) -> str:
    x, end = _x(line, span.begin), _x(line, span.end)
    width = max(0.8, end - x - 0.4)
    details = "".join(f", {key} {span.about[key]}" for key in _TIP_KEYS if span.about.get(key) is not None)
    tip = escape(f"{span.name}: {1000 * (span.end - span.begin):.0f} ms{details}")
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}"'
    bar = f'<rect class="{_colour(span)}" {shape}><title>{tip}</title></rect>'
    number = str(span.about.get("step"))
    if span.kind == "step" and width > 8 + 7 * len(number):
        bar += _text(x + width / 2, y + 15, number, "mid")
    return bar


def _colour(span: Span) -> str:
    """Return the class of the span's colour."""
    if span.kind == "rollout":
        return "untrained" if span.about["step"] is None else f"v{span.about['version'] % _VERSIONS}"
    known = span.name if span.kind == "phase" else span.kind
    return known if known in _COLOURS else "step"


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
    yield _label(f"up to {most} rollouts", y + 25, "dim")
    yield f'<path d="M{LEFT} {bottom:.1f}{path}H{_x(line, line.end):.1f}V{bottom:.1f}Z" class="waiting"/>'


def _grid(line: Timeline, steps: Sequence[Span], bottom: float) -> Iterator[str]:
    """Yield seconds along the top, and a vertical line at each step's end unless lines would be too close."""
    length = line.end - line.begin
    tick = _round_up(length / _TICKS)
    for number in range(math.floor(length / tick) + 1):
        x = _x(line, line.begin + number * tick)
        yield f'<path class="tick" d="M{x:.1f} {TOP - 9}v5"/>'
        yield _text(x, TOP - 13, f"{number * tick:g} s", "mid dim")
    apart = (WIDTH - LEFT - RIGHT) / len(steps)
    for step in steps if apart > 6 else ():
        x = _x(line, step.end)
        yield f'<path class="grid" d="M{x:.1f} {TOP}V{bottom:.0f}"/>'


def _round_up(seconds: float) -> float:
    """Return the next of 1, 2, 5, 10 times a power of ten."""
    base = 10.0 ** math.floor(math.log10(max(seconds, 1e-6)))
    return next(factor * base for factor in (1, 2, 5, 10) if factor * base >= seconds * (1 - 1e-9))


def _legends(line: Timeline) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the names and colours that the picture has, of the trainer and of rollouts."""
    names = {span.name for span in line.spans if span.kind == "phase"}
    kinds = {span.kind for span in line.spans}
    phases = [(name.replace("_", " "), name) for name in (*PHASES, OTHER) if name in names]
    yield "trainer", phases + [(kind, kind) for kind in _KINDS if kind in kinds]
    rollouts = [span for span in line.spans if span.kind == "rollout"]
    versions = sorted({span.about["version"] for span in rollouts if span.about["step"] is not None})
    firsts = {version % _VERSIONS: version for version in reversed(versions)}  # of each colour
    some = [(f"v{version}", f"v{colour}") for colour, version in sorted(firsts.items(), key=lambda item: item[1])]
    if len(versions) > len(some):
        some.append(("and so on: version at admission", ""))
    if any(span.about["step"] is None for span in rollouts):
        some.append(("not trained (yet)", "untrained"))
    if some:
        yield "rollouts", some


def _placed(keys: Sequence[tuple[str, str]]) -> Iterator[tuple[float, int, str, str]]:
    """Yield the left side, row, name and colour of each key: a row that is full is followed by another one."""
    x, row = float(LEFT), 0
    for name, colour in keys:
        width = (14 if colour else 0) + _LETTER * len(name)
        if x + width > WIDTH - RIGHT and x > LEFT:
            x, row = float(LEFT), row + 1
        yield x, row, name, colour
        x += width + 16


def _keys(keys: Sequence[tuple[str, str]], y: float) -> Iterator[str]:
    for x, row, name, colour in _placed(keys):
        top = y + _LEGEND_ROW * row
        if colour:
            yield f'<rect class="{colour}" x="{x:.0f}" y="{top + 1:.0f}" width="10" height="10"/>'
        yield _text(x + (14 if colour else 0), top + 10, name)


def _x(line: Timeline, at: float) -> float:
    inside = min(max(at, line.begin), line.end) - line.begin
    return LEFT + inside / max(line.end - line.begin, 1e-9) * (WIDTH - LEFT - RIGHT)


def _label(text: str, y: float, look: str = "") -> str:
    return _text(LEFT - 10, y, text, f"end {look}".strip())


def _text(x: float, y: float, text: str, look: str = "") -> str:
    chosen = f' class="{look}"' if look else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{chosen}>{escape(text)}</text>'
