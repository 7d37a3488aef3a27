"""Spans of a run, from its files alone.

Phases of a step, calls of ranks, weight updates, evaluations and checkpoints are told with begin and end in
`observed/`. Of steps whose lines there are gone, phases are laid out from the step's end backwards by their seconds in
`metrics.jsonl`: their order is known (`asyncrl.master.train_loop`), their begins are inferred. A rollout's place is
inferred too: each takes the lowest that is free on its RolloutWorker, which gives the exact number of places.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.observe.history import History, Rollout

LAST_STEPS = 100
PHASES = ("wait_for_batch", "train", "publish", "keep", "wait_eval")
STEPS, TRAINER, WAITING, EVENTS = "steps", "trainer", "waiting to be trained", "events"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted; times are seconds since 1970.

    Attributes:
        track: the group of lanes that it is shown in, such as `trainer` or `rollout_worker/0`.
        lane: within the track, from 0; spans of a lane do not overlap.
        kind: step, phase, call, rollout, wait, update, evaluation, checkpoint, restart.
        name: what is written on it.
        about: figures for whoever points at it.
    """

    track: str
    lane: int
    kind: str
    name: str
    begin: float
    end: float
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Arrow:
    """From the end of a rollout to the step that trained it; both are spans of the timeline."""

    rollout: Span
    step: Span


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans and arrows between `begin` and `end`, and counters as (name, time, value)."""

    begin: float
    end: float
    spans: Sequence[Span]
    arrows: Sequence[Arrow]
    counters: Sequence[tuple[str, float, float]]


def timeline(history: History, first: int | None = None, last: int | None = None) -> Timeline:
    """The timeline of the steps `first` to `last`; by default of the newest `LAST_STEPS`.

    Raises:
        ValueError: the run has no such step; the message is for the user.
    """
    numbers = sorted(step for step in history.steps if step in history.rows)
    if first is None and last is None:
        numbers = numbers[-LAST_STEPS:]
    chosen = [step for step in numbers if (first or 0) <= step <= (last if last is not None else step)]
    if not chosen:
        known = f"it has the steps {numbers[0]} to {numbers[-1]}" if numbers else "it has no complete step"
        raise ValueError(f"{history.name} has none of the steps asked for; {known}")
    steps = list(_steps(history, chosen))
    begin, end = steps[0].begin, steps[-1].end
    phases = [*_phases(history, steps, begin, end)]
    rollouts = list(_rollouts(history, begin, end))
    trains = {span.about["step"]: span for span in phases if span.name == "train"}
    arrows = [Arrow(span, trains[span.about["step"]]) for span in rollouts if span.about.get("step") in trains]
    others = [*_told(history, begin, end), *_waits(arrows), *_restarts(history, begin, end)]
    return Timeline(
        begin, end, [*steps, *phases, *others, *rollouts], arrows, list(_counters(history, rollouts, chosen))
    )


def in_lanes(spans: Iterable[tuple[float, float, Any]]) -> Iterator[tuple[int, Any]]:
    """Deal (begin, end, what) to lanes: each takes the lowest that is free."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    top = 0
    for begin, end, what in sorted(spans, key=lambda span: span[0]):
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else top
        top += lane == top
        heapq.heappush(busy, (end, lane))
        yield lane, what


def _steps(history: History, chosen: Sequence[int]) -> Iterator[Span]:
    for step in chosen:
        end, row = history.steps[step].at, history.rows[step]
        about: dict[str, Any] = {"step": step}
        about |= {name: row[name] for name in ("reward/mean", "staleness/mean", "staleness/max", "loss") if name in row}
        yield Span(STEPS, 0, "step", f"step {step}", end - row["time/step_s"], end, about)


def _phases(history: History, steps: Sequence[Span], begin: float, end: float) -> Iterator[Span]:
    """Told phases; of steps that none is told of, inferred ones."""
    told = defaultdict(list)
    master = history.processes.get("master_worker/0")
    for span in master.spans if master is not None else ():
        if span["span"] in PHASES and span["end"] > begin and span["begin"] < end:
            told[span.get("step")].append(span)
    for step in steps:
        number = step.about["step"]
        if number in told:
            for span in told[number]:
                about = {"step": number}
                yield Span(TRAINER, 0, "phase", span["span"], max(span["begin"], begin), span["end"], about)
            continue
        row, at = history.rows[number], step.begin
        for name in PHASES:
            seconds = row.get(f"time/{name}_s", 0.0)
            yield Span(TRAINER, 0, "phase", name, at, min(at + seconds, step.end), {"step": number, "inferred": True})
            at = min(at + seconds, step.end)


def _told(history: History, begin: float, end: float) -> Iterator[Span]:
    """Spans that processes told of themselves, but for the phases."""
    for process in history.processes.values():
        for span in process.spans:
            name = span["span"]
            if name in PHASES and process.kind == "master_worker":
                continue
            if span["end"] <= begin or span["begin"] >= end:
                continue
            about = {key: value for key, value in span.items() if key not in ("span", "begin", "end", "lane")}
            where = span.get("lane", EVENTS if process.kind == "master_worker" else process.name)
            lane = {"checkpoint": 1}.get(name, 0)
            kind = name if name in ("update", "evaluation", "checkpoint") else "call"
            label = f"v{span['version']}" if kind == "update" and "version" in span else name
            yield Span(where, lane, kind, label, max(span["begin"], begin), min(span["end"], end), about)


def _rollouts(history: History, begin: float, end: float) -> Iterator[Span]:
    by_worker: dict[str, list[tuple[float, float, Rollout]]] = defaultdict(list)
    for rollout in history.rollouts.values():
        until = rollout.finished_at or rollout.ended_at or end
        if until > begin and rollout.admitted_at < end:
            by_worker[rollout.worker].append((rollout.admitted_at, until, rollout))
    for worker, lived in sorted(by_worker.items()):
        for lane, rollout in in_lanes(lived):
            until = rollout.finished_at or rollout.ended_at or end
            about = {
                "rollout": rollout.id,
                "prompt": rollout.prompt,
                "version": rollout.version,
                "end": rollout.end or "under way",
                "tokens": rollout.tokens,
                "reward": rollout.reward,
                "step": rollout.step,
            }
            yield Span(
                worker, lane, "rollout", f"v{rollout.version}", max(rollout.admitted_at, begin), min(until, end), about
            )


def _waits(arrows: Sequence[Arrow]) -> Iterator[Span]:
    """The time from a rollout's end to the training of its step."""
    waits = [(arrow.rollout.end, arrow.step.begin, arrow) for arrow in arrows if arrow.step.begin > arrow.rollout.end]
    for lane, arrow in in_lanes(waits):
        about = {"rollout": arrow.rollout.about["rollout"], "step": arrow.step.about["step"]}
        yield Span(WAITING, lane, "wait", "waits", arrow.rollout.end, arrow.step.begin, about)


def _restarts(history: History, begin: float, end: float) -> Iterator[Span]:
    began: dict[str, dict[str, Any]] = {}
    for line in history.restarts:
        if "restarted" in line:
            began[line["restarted"]] = line
        cause = began.pop(line["went_on"], None) if "went_on" in line else None
        if cause is not None and begin <= cause["time"] <= end:
            until = min(end, cause["time"] + line["seconds"])
            about = {"reason": cause.get("reason", "")}
            yield Span(EVENTS, 2, "restart", f"restart of {line['went_on']}", cause["time"], until, about)


def _counters(history: History, rollouts: Sequence[Span], chosen: Sequence[int]) -> Iterator[tuple[str, float, float]]:
    changes = sorted([(span.begin, 1) for span in rollouts] + [(span.end, -1) for span in rollouts])
    running = 0
    for at, change in changes:
        running += change
        yield "rollouts running", at, running
    for step in chosen:
        for name in ("staleness/mean", "reward/mean", "throughput/gen_tokens_per_s"):
            if name in history.rows[step]:
                yield name, history.steps[step].at, history.rows[step][name]
