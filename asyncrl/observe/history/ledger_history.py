"""The ledger, folded into steps and rollouts as it grows (`asyncrl.comm.ended_rollouts`).

Steps that a later launch dropped are dropped here too. The figures of all steps are kept. Rollouts are kept while they
run, and if they ended within the newest `keep_steps` steps, so that memory does not grow with the run. With
`keep_from`, rollouts that ended in this step or later are kept instead.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asyncrl.comm.ended_rollouts import (
    Abandoned,
    Admitted,
    Begin,
    Dropped,
    End,
    Finished,
    Line,
    RolloutCounts,
    RunSettings,
    Step,
    Trained,
)
from asyncrl.comm.typed import json_decoder
from asyncrl.observe.history.tail import Appended, ReadAgain

_decode = json_decoder(Line).decode
TRAINED = "trained"
ABANDONED = "abandoned"


@dataclass(slots=True)
class Rollout:
    """A rollout according to the ledger; times are seconds since 1970, None if the ledger does not have them (yet).

    `end` is `TRAINED`, `ABANDONED`, the reason of its drop, or None while it runs. `versions` counts its generated
    tokens by policy version.
    """

    id: str
    prompt: str
    order: int
    worker: str
    version: int
    admitted_at: float
    finished_at: float | None = None
    tokens: int = 0
    end: str | None = None
    ended_at: float | None = None
    step: int | None = None
    samples: int = 0
    reward: float | None = None
    versions: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class StepOf:
    """Figures of a train step, from its rollouts; `at`: it was complete, in seconds since 1970.

    `ages` counts trained tokens by how many versions older than the step's they are. `rollout_s` is the mean time from
    admitted to finished, `waited_s` from finished to the step's end. `dropped` counts by reason since the step before.
    """

    step: int
    lineage: int
    at: float
    rollouts: int = 0
    samples: int = 0
    reward: float = 0.0
    ages: Counter[int] = field(default_factory=Counter)
    rollout_s: float = 0.0
    waited_s: float = 0.0
    admitted: int = 0
    finished: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    books: RolloutCounts | None = None


class _LedgerLines:
    """The lines of the ledger's files in `folder`, each returned once.

    Attributes:
        unreadable: number of lines so far that are no lines of a ledger.
    """

    def __init__(self, folder: Path) -> None:
        self.unreadable = 0
        self._folder = folder
        self._files: list[Appended] = []

    def begin_again(self) -> None:
        """Forget what was read: `new` yields every line once more."""
        self._files, self.unreadable = [], 0

    def new(self) -> Iterator[Line]:
        """Yield the lines that were appended since the last call.

        Raises:
            ReadAgain: a file was replaced or cut; lines read before may be of steps that did not end.
        """
        known = {each.file for each in self._files}
        self._files += [Appended(file) for file in sorted(self._folder.glob("*.jsonl")) if file not in known]
        for file in self._files:
            for raw in file.read():
                try:
                    yield _decode(raw)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    self.unreadable += 1


class _EndedRollouts:
    """The ids of ended rollouts by step, and the rule by which they are forgotten.

    Args:
        keep_steps: number of newest steps whose rollouts are kept.
        keep_from: oldest step whose rollouts are kept, in place of `keep_steps`; None: `keep_steps` holds.
    """

    def __init__(self, keep_steps: int, keep_from: int | None) -> None:
        self._keep_steps, self._keep_from = keep_steps, keep_from
        self._by_step: deque[tuple[int, list[str]]] = deque()
        self._since_step: list[str] = []

    def clear(self) -> None:
        """Forget all rollouts."""
        self._by_step.clear()
        self._since_step = []

    def add(self, rollout_id: str) -> None:
        """Record the end of a rollout."""
        self._since_step.append(rollout_id)

    def close_step(self, step: int) -> list[str]:
        """Count the rollouts that ended since the step before as ended in `step`; return those to forget."""
        self._by_step.append((step, self._since_step))
        self._since_step = []
        forgotten: list[str] = []
        while self._has_too_many():
            forgotten += self._by_step.popleft()[1]
        return forgotten

    def _has_too_many(self) -> bool:
        """True if the rollouts of the oldest step are no longer to be kept."""
        if self._keep_from is None:
            return len(self._by_step) > self._keep_steps
        return bool(self._by_step) and self._by_step[0][0] < self._keep_from


@dataclass(slots=True)
class _SinceStep:
    """The part of the ledger after the newest `step` line, which the next `step` line counts as its own."""

    trained: list[Trained] = field(default_factory=list)
    admitted: int = 0
    finished: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class LedgerHistory:
    """Reads the ledger in `folder`; `refresh` takes in what is new.

    Attributes:
        steps: by number, those that no launch forgot.
        rollouts: by id; see the module's docstring.
        launches: the `begin` lines, in order.
        ended: the `end` line of the newest launch; None where it has none.
        newest_at: time of the newest line, in seconds since 1970.
    """

    def __init__(self, folder: Path, keep_steps: int, keep_from: int | None = None) -> None:
        self._lines = _LedgerLines(folder)
        self._ended_rollouts = _EndedRollouts(keep_steps, keep_from)
        self._clear()

    def _clear(self) -> None:
        self._lines.begin_again()
        self._ended_rollouts.clear()
        self.steps: dict[int, StepOf] = {}
        self.rollouts: dict[str, Rollout] = {}
        self.launches: list[Begin] = []
        self.ended: End | None = None
        self.newest_at = 0.0
        self._since_step = _SinceStep()

    @property
    def unreadable(self) -> int:
        """Number of lines that are no lines of a ledger."""
        return self._lines.unreadable

    @property
    def settings(self) -> RunSettings | None:
        """The settings of the newest launch."""
        return self.launches[-1].settings if self.launches else None

    def dropped_since(self, step: int) -> tuple[int, Counter[str]]:
        """Return admitted rollouts and dropped ones by reason, from train step `step` to now."""
        admitted, dropped = self._since_step.admitted, Counter(self._since_step.dropped)
        for number, each in self.steps.items():
            if number >= step:
                admitted += each.admitted
                dropped += each.dropped
        return admitted, dropped

    def refresh(self) -> None:
        """Take in what is new."""
        try:
            self._read()
        except ReadAgain:  # a GserverManager that begins removes a torn line
            self._clear()
            self._read()

    def _read(self) -> None:
        for line in self._lines.new():
            self._take(line)

    def _take(self, line: Line) -> None:
        match line:
            case Admitted():
                self._since_step.admitted += 1
                known, head = self.rollouts.get(line.rollout), (line.rollout, line.prompt, line.order, line.worker)
                since = known.admitted_at if known is not None and line.adopted else line.at
                self.rollouts[line.rollout] = Rollout(*head, line.version, since)
                self.newest_at = max(self.newest_at, line.at)
            case Finished():
                self._take_finished(line)
            case Dropped():
                self._since_step.dropped[line.reason] += 1
                self._end(line.rollout, line.reason, line.at)
            case Abandoned():
                self._end(line.rollout, ABANDONED, line.at)
            case Trained():
                self._since_step.trained.append(line)
            case Step():
                self._take_step(line)
            case Begin():
                self._take_begin(line)
            case End():
                self.ended = line

    def _take_finished(self, line: Finished) -> None:
        self._since_step.finished += 1
        if (rollout := self.rollouts.get(line.rollout)) is not None:
            rollout.finished_at, rollout.tokens = line.at, line.tokens
        self.newest_at = max(self.newest_at, line.at)

    def _end(self, rollout_id: str, end: str, at: float) -> None:
        self._ended_rollouts.add(rollout_id)
        if (rollout := self.rollouts.get(rollout_id)) is not None:
            rollout.end, rollout.ended_at = end, at
        self.newest_at = max(self.newest_at, at)

    def _take_step(self, line: Step) -> None:
        step = StepOf(line.step, line.lineage, line.at, books=line.books)
        since, self._since_step = self._since_step, _SinceStep()
        step.admitted, step.finished, step.dropped = since.admitted, since.finished, since.dropped
        times: list[tuple[float, float]] = []
        for trained in since.trained:
            step.rollouts += 1
            step.samples += trained.samples
            step.reward += trained.reward
            for version, tokens in trained.versions.items():
                step.ages[line.step - 1 - version] += tokens
            self._end(trained.rollout, TRAINED, line.at)
            if (rollout := self.rollouts.get(trained.rollout)) is None:
                continue
            rollout.step, rollout.reward, rollout.samples = line.step, trained.reward, trained.samples
            rollout.versions = trained.versions
            if rollout.finished_at is not None:
                times.append((rollout.finished_at - rollout.admitted_at, line.at - rollout.finished_at))
        if step.rollouts:
            step.reward /= step.rollouts
        if times:
            step.rollout_s, step.waited_s = (sum(each) / len(times) for each in zip(*times, strict=True))
        self.steps[line.step] = step
        self.newest_at = max(self.newest_at, line.at)
        for rollout_id in self._ended_rollouts.close_step(line.step):
            rollout = self.rollouts.get(rollout_id)
            if rollout is not None and rollout.end is not None:
                del self.rollouts[rollout_id]

    def _take_begin(self, line: Begin) -> None:
        """Process the start of a launch: forget everything after its checkpoint, and rollouts that earlier launches
        ran.
        """
        self.steps = {number: step for number, step in self.steps.items() if number <= line.version}
        for rollout in self.rollouts.values():
            if rollout.step is not None and rollout.step > line.version:
                rollout.step = None
                rollout.end = ABANDONED
            elif rollout.end is None:
                rollout.end, rollout.ended_at = ABANDONED, line.at
                self._ended_rollouts.add(rollout.id)
        self.launches.append(line)
        self.ended = None
        self._since_step = _SinceStep()
        self.newest_at = max(self.newest_at, line.at)
