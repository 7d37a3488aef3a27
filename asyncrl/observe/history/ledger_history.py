"""The ledger, folded into steps and rollouts as it grows (`asyncrl.comm.rollouts.ledger_lines`).

Steps that a later launch forgot are forgotten here too. The figures of all steps are kept. Rollouts are kept while they
run, and if they ended within the newest `keep_steps` steps, so that memory does not grow with the run. With
`keep_from`, rollouts that ended in this step or later are kept instead.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asyncrl.comm.rollouts.ledger_lines import (
    Abandoned,
    Admitted,
    Begin,
    Dropped,
    End,
    Finished,
    LedgerBooks,
    Line,
    RunSettings,
    Saved,
    Step,
    Trained,
)
from asyncrl.observe.history.appended import Appended, ReadAgain

_decode = msgspec.json.Decoder(Line).decode
TRAINED = "trained"
ABANDONED = "abandoned"


@dataclass(slots=True)
class Rollout:
    """A rollout according to the ledger; times are seconds since 1970, None if the ledger does not have them (yet).

    `end` is `TRAINED`, `ABANDONED`, the reason of its drop, or None while it is under way. `versions` counts its
    generated tokens by policy version.
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
    books: LedgerBooks | None = None


class LedgerHistory:
    """Reads the ledger in `folder`; `refresh` takes in what is new.

    Attributes:
        steps: by number, those that no launch forgot.
        rollouts: by id; see the module's docstring.
        launches: the `begin` lines, in order.
        saved: versions with a checkpoint and when it was begun.
        ended: the `end` line of the newest launch; None where it has none.
        lines: read so far; `unreadable` of them are no lines of a ledger.
    """

    def __init__(self, folder: Path, keep_steps: int, keep_from: int | None = None) -> None:
        self._folder, self._keep_steps, self._keep_from = folder, keep_steps, keep_from
        self._clear()

    def _clear(self) -> None:
        self.steps: dict[int, StepOf] = {}
        self.rollouts: dict[str, Rollout] = {}
        self.launches: list[Begin] = []
        self.saved: list[tuple[int, float]] = []
        self.ended: End | None = None
        self.lines = self.unreadable = 0
        self.newest_at = 0.0
        self._files: list[Appended] = []
        self._trained: list[Trained] = []
        self._admitted = self._finished = 0
        self._dropped: Counter[str] = Counter()
        self._ended_by_step: deque[tuple[int, list[str]]] = deque()
        self._ended: list[str] = []

    @property
    def settings(self) -> RunSettings | None:
        """The settings of the newest launch."""
        return self.launches[-1].settings if self.launches else None

    def dropped_since(self, step: int) -> tuple[int, Counter[str]]:
        """Admitted rollouts and dropped ones by reason, from train step `step` to now."""
        admitted, dropped = self._admitted, Counter(self._dropped)
        for number, each in self.steps.items():
            if number >= step:
                admitted += each.admitted
                dropped += each.dropped
        return admitted, dropped

    def refresh(self) -> None:
        """Take in what is new."""
        try:
            self._read()
        except ReadAgain:  # a MasterWorker that goes on cuts off a step that is not whole
            self._clear()
            self._read()

    def _read(self) -> None:
        known = {each.file for each in self._files}
        self._files += [Appended(file) for file in sorted(self._folder.glob("*.jsonl")) if file not in known]
        for file in self._files:
            for raw in file.read():
                self._take(raw)

    def _take(self, raw: bytes) -> None:
        self.lines += 1
        try:
            line = _decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.unreadable += 1
            return
        match line:
            case Admitted():
                self._admitted += 1
                self.rollouts[line.rollout] = Rollout(
                    line.rollout, line.prompt, line.order, line.worker, line.version, line.at
                )
                self.newest_at = max(self.newest_at, line.at)
            case Finished():
                self._take_finished(line)
            case Dropped():
                self._dropped[line.reason] += 1
                self._end(line.rollout, line.reason, line.at)
            case Abandoned():
                self._end(line.rollout, ABANDONED, line.at)
            case Trained():
                self._trained.append(line)
            case Step():
                self._take_step(line)
            case Saved():
                self.saved.append((line.version, line.at))
            case Begin():
                self._take_begin(line)
            case End():
                self.ended = line

    def _take_finished(self, line: Finished) -> None:
        self._finished += 1
        if (rollout := self.rollouts.get(line.rollout)) is not None:
            rollout.finished_at, rollout.tokens = line.at, line.tokens
            rollout.end = rollout.ended_at = None
        self.newest_at = max(self.newest_at, line.at)

    def _end(self, rollout_id: str, end: str, at: float) -> None:
        self._ended.append(rollout_id)
        if (rollout := self.rollouts.get(rollout_id)) is not None:
            rollout.end, rollout.ended_at = end, at
        self.newest_at = max(self.newest_at, at)

    def _take_step(self, line: Step) -> None:
        step = StepOf(line.step, line.lineage, line.at, books=line.books)
        step.admitted, step.finished, step.dropped = self._admitted, self._finished, self._dropped
        times: list[tuple[float, float]] = []
        for trained in self._trained:
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
        self._trained, self._admitted, self._finished, self._dropped = [], 0, 0, Counter()
        self._ended_by_step.append((line.step, self._ended))
        self._ended = []
        while self._is_one_too_old():
            for rollout_id in self._ended_by_step.popleft()[1]:
                self._forget_ended(rollout_id)

    def _is_one_too_old(self) -> bool:
        """True if the oldest step whose rollouts are kept is no longer to be kept."""
        if self._keep_from is None:
            return len(self._ended_by_step) > self._keep_steps
        return bool(self._ended_by_step) and self._ended_by_step[0][0] < self._keep_from

    def _forget_ended(self, rollout_id: str) -> None:
        rollout = self.rollouts.get(rollout_id)
        if rollout is not None and rollout.end is not None:
            del self.rollouts[rollout_id]

    def _take_begin(self, line: Begin) -> None:
        """Process the start of a launch: forget everything after its checkpoint, and rollouts that earlier launches
        ran.
        """
        self.steps = {number: step for number, step in self.steps.items() if number <= line.version}
        self.saved = [each for each in self.saved if each[0] <= line.version]
        for rollout in self.rollouts.values():
            if rollout.step is not None and rollout.step > line.version:
                rollout.step = None
                rollout.end = ABANDONED
            elif rollout.end is None:
                rollout.end, rollout.ended_at = ABANDONED, line.at
                self._ended.append(rollout.id)
        self.launches.append(line)
        self.ended = None
        self._trained, self._admitted, self._finished, self._dropped = [], 0, 0, Counter()
        self.newest_at = max(self.newest_at, line.at)
