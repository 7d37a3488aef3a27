"""Timeline of a run, from its files alone: rollouts and their workers, phases of the trainer, weight updates of the
servers. The command `trace` writes it, and the dashboard shows it.

Processes write the begin and end of phases, ranks' calls, weight updates, evaluations and checkpoints to `observed/`.
If a step's lines are gone from there, its phases are inferred: their seconds are in `metrics.jsonl`, their order is
that of `asyncrl.master.train_loop`, and the last one ends with the step. A rollout's slot is inferred too: each
rollout takes the lowest free slot of its RolloutWorker, which gives the exact number of slots.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.observe.history import TRAINED, History, Rollout

LAST_STEPS = 100
PHASES = ("wait_for_batch", "switch", "train", "publish", "memory_checkpoint", "wait_eval")
OTHER = "other"
"""Rest of a step whose phases are inferred."""
STEPS, TRAINER, WAITING, EVENTS = "steps", "trainer", "waiting to be trained", "events"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted; times are seconds since 1970.

    Attributes:
        track: the group of lanes that it is shown in, such as `trainer` or `rollout_worker/0`.
        lane: within the track, from 0; spans of a lane do not overlap.
        kind: step, phase, call, rollout, wait, update, evaluation, checkpoint, restart.
        name: text on the span.
        about: figures for the tooltip.
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
    """From the end of a rollout to the `train` phase that trained it; both are spans of the timeline."""

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
    """Return the timeline of the steps `first` to `last`; without both, of the newest `LAST_STEPS`.

    Without `last` it extends to the newest time in the run's files, so it shows a run's activity since its last step,
    or before it died.

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
    if last is None:
        end = max(end, history.now, *(each.spans[-1]["end"] for each in history.processes.values() if each.spans))
    phases = list(_phases(history, steps, begin, end))
    trains = {s.about["step"]: s for s in phases if s.name == "train" and "forgotten" not in s.about}
    rollouts = list(_rollouts(history, trains, begin, end))
    arrows = [Arrow(span, trains[span.about["step"]]) for span in rollouts if span.about["step"] in trains]
    others = _dealt([*_reported(history, begin, end), *_restarts(history, begin, end)])
    waits = _waits(history, trains, begin, end)
    counters = list(_counters(history, rollouts, chosen))
    return Timeline(begin, end, [*steps, *phases, *others, *waits, *rollouts], arrows, counters)


def in_lanes(spans: Iterable[tuple[float, float, Any]]) -> Iterator[tuple[int, Any]]:
    """Assign spans (begin, end, what) to lanes: each takes the lowest free lane."""
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


def _dealt(spans: Iterable[Span]) -> Iterator[Span]:
    """Give `spans` the lanes of their tracks; each kind has its own."""
    kinds: dict[str, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        kinds[span.track][span.kind].append(span)
    for of_track in kinds.values():
        first = 0
        for _, alike in sorted(of_track.items()):
            dealt = [(lane, span) for lane, span in in_lanes((s.begin, s.end, s) for s in alike)]
            yield from (replace(span, lane=first + lane) for lane, span in dealt)
            first += 1 + max(lane for lane, _ in dealt)


def _steps(history: History, chosen: Sequence[int]) -> Iterator[Span]:
    before = -math.inf
    for step in chosen:
        end, row = history.steps[step].at, history.rows[step]
        # the row's seconds end some milliseconds before the ledger's line, so steps would overlap
        begin, before = max(end - row["time/step_s"], before), end
        about: dict[str, Any] = {"step": step}
        about |= {name: row[name] for name in ("reward/mean", "staleness/mean", "staleness/max", "loss") if name in row}
        yield Span(STEPS, 0, "step", f"step {step}", begin, end, about)


def _phases(history: History, steps: Sequence[Span], begin: float, end: float) -> Iterator[Span]:
    """Yield the phases that the MasterWorker wrote, and inferred phases of steps without any."""
    windows = {step.about["step"]: step for step in steps}
    written = set()
    master = history.processes.get("master_worker/0")
    for span in master.spans if master is not None else ():
        number = span.get("step")
        about = {"step": number}
        since, until = max(span["begin"], begin), min(span["end"], end)
        is_cut = (since, until) != (span["begin"], span["end"])
        if span["span"] not in PHASES or since >= until or (is_cut and number not in windows):
            continue
        if number in windows and span["end"] <= windows[number].begin:  # of an earlier launch with this step
            about["forgotten"] = True
        else:
            written.add(number)
        yield Span(TRAINER, 0, "phase", span["span"], since, until, about)
    for number, step in windows.items():
        if number not in written:
            yield from _inferred(history.rows[number], step)


def _inferred(row: Mapping[str, Any], step: Span) -> Iterator[Span]:
    """Yield the phases that fill `step`, in order, by their seconds in `row`."""
    at, about = step.begin, {"step": step.about["step"], "inferred": True}
    for name in (*PHASES, OTHER):
        until = step.end if name == OTHER else min(at + row.get(f"time/{name}_s", 0.0), step.end)
        if until > at:
            yield Span(TRAINER, 0, "phase", name, at, until, about)
        at = until


def _reported(history: History, begin: float, end: float) -> Iterator[Span]:
    """Yield the spans that processes wrote, without the phases. `_dealt` assigns their lanes."""
    for process in history.processes.values():
        for span in process.spans:
            name = span["span"]
            if name in PHASES and process.kind == "master_worker":
                continue
            if span["end"] <= begin or span["begin"] >= end:
                continue
            about = {key: value for key, value in span.items() if key not in ("span", "begin", "end", "lane")}
            where = span.get("lane", EVENTS if process.kind == "master_worker" else process.name)
            kind = name if name in ("update", "evaluation", "checkpoint") else "call"
            label = f"v{span['version']}" if kind == "update" and "version" in span else name
            yield Span(where, 0, kind, label, max(span["begin"], begin), min(span["end"], end), about)


def _end_of(rollout: Rollout, trains: Mapping[Any, Span], end: float) -> float:
    """Return the time at which `rollout` left its slot; `end` if it has not.

    The GserverManager is notified of a finished rollout after the trainer has it, sometimes after its training began.
    """
    until = rollout.finished_at or rollout.ended_at or end
    train = trains.get(rollout.step)
    return min(until, train.begin) if train is not None and train.begin > rollout.admitted_at else until


def _rollouts(history: History, trains: Mapping[Any, Span], begin: float, end: float) -> Iterator[Span]:
    by_worker: dict[str, list[tuple[float, float, tuple[Rollout, float]]]] = defaultdict(list)
    for rollout in history.rollouts.values():
        until = _end_of(rollout, trains, end)
        if until > begin and rollout.admitted_at < end:
            by_worker[rollout.worker].append((rollout.admitted_at, until, (rollout, until)))
    for worker, lived in sorted(by_worker.items()):
        for lane, (rollout, until) in in_lanes(lived):
            about = {
                "rollout": rollout.id,
                "prompt": rollout.prompt,
                "version": rollout.version,
                "end": rollout.end or ("waits for its step" if rollout.finished_at else "running"),
                "tokens": rollout.tokens,
                "reward": rollout.reward,
                "step": rollout.step,
            }
            since, until = max(rollout.admitted_at, begin), min(until, end)
            yield Span(worker, lane, "rollout", f"v{rollout.version}", since, until, about)


def _waits(history: History, trains: Mapping[Any, Span], begin: float, end: float) -> Iterator[Span]:
    """Yield the time from a rollout's end to its training or drop, or to `end` if it still waits."""
    waits = []
    for rollout in history.rollouts.values():
        if rollout.finished_at is None:
            continue
        train = trains.get(rollout.step)
        until = train.begin if train is not None else rollout.ended_at or end
        if begin < until and rollout.finished_at < min(until, end):
            about = {"rollout": rollout.id, "step": rollout.step, "end": rollout.end or "waits for its step"}
            name = "waits" if rollout.end in (None, TRAINED) else f"dropped: {rollout.end}"
            span = Span(WAITING, 0, "wait", name, max(rollout.finished_at, begin), min(until, end), about)
            waits.append((span.begin, span.end, span))
    for lane, span in in_lanes(waits):
        yield replace(span, lane=lane)


def _restarts(history: History, begin: float, end: float) -> Iterator[Span]:
    """Restarts, from the time that a process's death was noticed until it was ready; or a mark if it never was."""
    causes: dict[str, dict[str, Any]] = {}
    found: list[tuple[str, dict[str, Any], float, float]] = []
    for line in history.restarts:
        if "restarted" in line:
            if (before := causes.pop(line["restarted"], None)) is not None:
                found.append((line["restarted"], before, before["time"], line["time"]))
            causes[line["restarted"]] = line
        elif "went_on" in line:
            cause = causes.pop(line["went_on"], {})
            found.append((line["went_on"], cause, line["time"] - line["seconds"], line["time"]))
    found += [(what, cause, cause["time"], cause["time"]) for what, cause in causes.items()]
    for what, cause, since, until in found:
        if since < end and until >= begin:
            about = {"reason": cause.get("reason", "")}
            yield Span(EVENTS, 0, "restart", f"restart of {what}", max(since, begin), min(until, end), about)


def _counters(history: History, rollouts: Sequence[Span], chosen: Sequence[int]) -> Iterator[tuple[str, float, float]]:
    changes = sorted([(span.begin, 1) for span in rollouts] + [(span.end, -1) for span in rollouts])
    running = 0
    for at, change in changes:
        running += change
        yield "rollouts running", at, running
    for step in chosen:
        for name in ("staleness/mean", "reward/mean", "throughput/gen_tokens_per_s"):
            value = history.rows[step].get(name)
            if value is not None and math.isfinite(value):
                yield name, history.steps[step].at, value
