"""A timeline as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" (Google, 2016). Times are whole microseconds since the timeline's begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncrl.observe.timeline.spans import STEPS, TRAINER, Timeline

_FIRST = {STEPS: 0, TRAINER: 1}
COUNTERS = 0
"""Number of the track of counters; the others follow."""


def chrome_trace(line: Timeline, name: str) -> dict[str, Any]:
    """The trace as JSON values."""
    return {"traceEvents": list(_events(line)), "displayTimeUnit": "ms", "otherData": {"run": name}}


def _events(line: Timeline) -> Iterator[dict[str, Any]]:
    def us(at: float) -> int:
        return round((at - line.begin) * 1e6)

    tracks = sorted({span.track for span in line.spans}, key=lambda track: (_FIRST.get(track, 2), track))
    numbers = {track: number for number, track in enumerate(tracks, COUNTERS + 1)}
    for track, number in (("counters", COUNTERS), *numbers.items()):
        yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": track}}
        yield {"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": number}}
    for span in line.spans:
        yield {
            "ph": "X",
            "pid": numbers[span.track],
            "tid": span.lane,
            "name": span.name,
            "cat": span.kind,
            "ts": us(span.begin),
            "dur": max(1, us(span.end) - us(span.begin)),
            "args": dict(span.about),
        }
    for number, arrow in enumerate(line.arrows):
        start, step = arrow.rollout, arrow.step
        flow = {"id": number, "name": "trained", "cat": "flow"}
        yield {
            **flow,
            "ph": "s",
            "pid": numbers[start.track],
            "tid": start.lane,
            "ts": max(us(start.begin), us(start.end) - 1),
        }
        yield {**flow, "ph": "f", "bp": "e", "pid": numbers[step.track], "tid": step.lane, "ts": us(step.begin)}
    for name, at, value in line.counters:
        yield {"ph": "C", "pid": COUNTERS, "name": name, "ts": us(at), "args": {"value": value}}
