"""A timeline as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" (Google, 2016). A track is a process there and a lane a thread. Times are whole
microseconds since the timeline's begin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from asyncrl.observe.timeline.spans import EVENTS, STEPS, TRAINER, WAITING, Timeline

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
