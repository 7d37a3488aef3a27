"""A timeline as an SVG picture for documents."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from asyncrl.observe.timeline.spans import EVENTS, STEPS, TRAINER, Span, Timeline

WIDTH, LEFT, RIGHT = 1280, 190, 20
COLOURS = {
    "wait_for_batch": "#d9534f",
    "train": "#3b6fb6",
    "publish": "#e0a030",
    "keep": "#8a8f98",
    "wait_eval": "#a05fb5",
    "update": "#e0a030",
    "evaluation": "#a05fb5",
    "checkpoint": "#8a8f98",
    "restart": "#d9534f",
    "call": "#7f9fc9",
}
VERSIONS = ("#8fb4e3", "#b7a3d9", "#9fd0b5", "#f0c987", "#e8a3a3", "#9ad2e0")
UNTRAINED = "#e4e4e4"
_HEIGHTS = {STEPS: 22, TRAINER: 20}
_TRACK_GAP = 14


def svg_picture(line: Timeline, name: str) -> str:
    """The picture; rollouts are coloured by the version that admitted them, those that were not trained are grey."""
    body = list(_body(line, name))
    height = round(float(body.pop()))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="DejaVu Sans, Noto Sans, sans-serif">'
    )
    return f'{head}<rect width="{WIDTH}" height="{height}" fill="#fff"/>{"".join(body)}</svg>\n'


def _body(line: Timeline, name: str) -> Iterator[str]:
    """Elements of the picture; the last item is its height."""
    steps = [span for span in line.spans if span.track == STEPS]
    title = f"{name}: {steps[0].name} to {steps[-1].name.split()[-1]}, {line.end - line.begin:.1f} s"
    yield _text(16, 26, title, size=15, weight=600)
    y = 48.0
    servers = sorted({s.track for s in line.spans if s.kind == "update"})
    workers = sorted({s.track for s in line.spans if s.kind == "rollout"})
    shown = [STEPS, TRAINER, *([EVENTS] if any(s.track == EVENTS for s in line.spans) else []), *servers, *workers]
    for track in shown:
        spans = [span for span in line.spans if span.track == track and span.kind != "wait"]
        lanes = 1 + max((span.lane for span in spans), default=0)
        height = _HEIGHTS.get(track, 7 if lanes > 4 else 12)
        label = f"{track}, {lanes} places" if track in workers else track
        yield _text(LEFT - 10, y + min(14, height), label, anchor="end")
        for span in spans:
            yield _bar(line, span, y + span.lane * height, height - 1.5)
        y += lanes * height + _TRACK_GAP
    bottom = y - _TRACK_GAP
    for step in steps:
        x = _x(line, step.end)
        yield f'<path d="M{x:.1f} 48V{bottom:.0f}" stroke="#c9ccd1" stroke-width=".6" stroke-dasharray="2 3"/>'
    x = float(LEFT)
    for label in ("wait_for_batch", "train", "publish", "keep", "wait_eval"):
        yield f'<rect x="{x:.0f}" y="{y - 1:.0f}" width="10" height="10" fill="{COLOURS[label]}"/>'
        yield _text(x + 14, y + 8, label.replace("_", " "))
        x += 34 + 7 * len(label)
    yield _text(x, y + 8, "rollouts: coloured by the version that admitted them")
    yield str(y + 24)


def _bar(line: Timeline, span: Span, y: float, height: float) -> str:
    x, end = _x(line, span.begin), _x(line, span.end)
    width = max(0.8, end - x - 0.4)
    if span.kind == "rollout":
        fill = VERSIONS[span.about["version"] % len(VERSIONS)] if span.about["step"] else UNTRAINED
    else:
        fill = COLOURS.get(span.name, COLOURS.get(span.kind, "#eef1f5"))
    told = ", ".join(f"{key} {value}" for key, value in span.about.items() if value is not None)
    tip = f"{span.name} {1000 * (span.end - span.begin):.0f} ms; {told}"
    bar = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}">'
        f"<title>{escape(tip)}</title></rect>"
    )
    if span.kind == "step" and width > 30:
        bar += _text(x + width / 2, y + 15, span.name.split()[-1], anchor="middle")
    return bar


def _x(line: Timeline, at: float) -> float:
    inside = min(max(at, line.begin), line.end) - line.begin
    return LEFT + inside / max(line.end - line.begin, 1e-9) * (WIDTH - LEFT - RIGHT)


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="#30343b">{escape(text)}</text>'
    )
