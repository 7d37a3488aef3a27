"""The history of a run, from its files: read step by step while it runs, or at once when it is over.

`History` is what `doctor`, `dashboard`, `trace` and the Python API read. It opens files of the run's folder and asks no
process, so it costs the run nothing and works after a crash.

The ledger (`asyncrl.comm.ended_rollouts`) is folded into steps and rollouts as it grows. Steps that a later launch
dropped are dropped here too. The figures of all steps are kept. Rollouts are kept while they run, and if they ended
within the newest `keep_steps` steps, so that memory does not grow with the run. With `keep_from`, rollouts that ended
in this step or later are kept instead.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from pathlib import Path
from typing import Any

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
from asyncrl.comm.files import is_held
from asyncrl.comm.typed import json_decoder
from asyncrl.config.aliases import under_current_names
from asyncrl.config.run_dir import (
    CONFIG_FILE,
    LEDGER_DIR,
    LOCK_FILE,
    METRICS_FILE,
    NOTICES_FILE,
    OBSERVED_DIR,
    RESTARTS_FILE,
    SUMMARY_FILE,
    DamagedFile,
    read_document,
    read_settings,
)
from asyncrl.observe.status import Process, ProcessHistory
from asyncrl.observe.tail import Appended, ReadAgain, read_rows

KEEP_STEPS = 100
Row = dict[str, Any]


class State(StrEnum):
    """State of a run."""

    running = auto()
    """A launcher holds it."""
    finished = auto()
    """It trained all its steps."""
    stopped = auto()
    """It was asked to stop and ended in order."""
    died = auto()
    """It ended without a summary."""


class History:
    """The run in `folder`. Each `refresh` reads new content; the first one reads everything.

    Args:
        folder: folder of the run, or the `metrics.jsonl` or another file in it.
        keep_steps: number of newest steps whose rollouts are kept; figures are kept for all steps.
        keep_from: keep rollouts that ended in this step or later instead.

    Raises:
        ValueError: the folder is not the folder of a run; the message is for the user.
    """

    def __init__(self, folder: Path, *, keep_steps: int = KEEP_STEPS, keep_from: int | None = None) -> None:
        folder = folder.expanduser().resolve()
        self.folder = folder if folder.is_dir() else folder.parent
        if not (self.folder / CONFIG_FILE).is_file():
            raise ValueError(
                f"{folder} is no run: it has no {CONFIG_FILE}; give the folder <fileroot>/<experiment>/<trial>"
            )
        self.name = f"{self.folder.parent.name}/{self.folder.name}"
        self.ledger = LedgerHistory(self.folder / LEDGER_DIR, keep_steps, keep_from)
        self._observed = ProcessHistory(self.folder / OBSERVED_DIR)
        self._metrics = Appended(self.folder / METRICS_FILE)
        self._config: tuple[int, Mapping[str, Any]] = (-1, {})
        self.damaged: dict[str, str] = {}
        """What is damaged of the run's files, by name; what they held is left out."""
        self.rows: dict[int, Row] = {}
        """Rows of metrics by step."""
        self.state = State.died
        self.summary: dict[str, Any] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Take in what is new."""
        for name, take in (
            (METRICS_FILE, self._take_metrics),
            (LEDGER_DIR, self.ledger.refresh),
            (OBSERVED_DIR, self._observed.refresh),
            (SUMMARY_FILE, self._take_summary),
            (CONFIG_FILE, lambda: self.config),
        ):
            try:
                take()
            except DamagedFile as error:
                self.damaged[name] = str(error)
        self.state = self._state()

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved settings, as nested mappings, by their current names."""
        changed = (self.folder / CONFIG_FILE).stat().st_mtime_ns
        if self._config[0] != changed:
            self._config = (changed, {})  # what is damaged is read once
            self._config = (changed, under_current_names(read_settings(self.folder)))
        return self._config[1]

    def setting(self, path: str, default: Any = None) -> Any:
        """Return the setting at `path`, such as `rollout.max_concurrent`."""
        found: Any = self.config
        for key in path.split("."):
            if not isinstance(found, Mapping) or key not in found:
                return default
            found = found[key]
        return found

    @property
    def steps(self) -> dict[int, StepOf]:
        """Figures of the train steps, from the ledger, by number."""
        return self.ledger.steps

    @property
    def rollouts(self) -> dict[str, Rollout]:
        """Running rollouts and those of the newest steps, by id."""
        return self.ledger.rollouts

    @property
    def processes(self) -> dict[str, Process]:
        """Return the observations that processes wrote about themselves, by name `<kind>/<index>`."""
        return self._observed.processes

    @property
    def restarts(self) -> list[Row]:
        """The restarts, in order (`asyncrl.runtime.run_log`)."""
        return self._lines(RESTARTS_FILE)

    @property
    def notices(self) -> list[str]:
        """Notices of the newest launch's processes for the terminal."""
        return [str(line.get("remark", "")) for line in self._lines(NOTICES_FILE)]

    @property
    def now(self) -> float:
        """The newest time in any of the files, in seconds since 1970."""
        last_times: list[float] = [process.last.get("at", 0.0) for process in self.processes.values()]
        return max([self.ledger.newest_at, *last_times])

    def _take_metrics(self) -> None:
        try:
            self._take_rows(self._metrics.read())
        except ReadAgain:  # a launch removes the steps that it trains again
            self.rows.clear()
            self._take_rows(self._metrics.read())

    def _take_summary(self) -> None:
        self.summary = None
        self.summary = read_document(self.folder / SUMMARY_FILE, {"steps": int})

    def _take_rows(self, lines: list[bytes]) -> None:
        for raw in lines:
            try:
                row = json.loads(raw)
                step = int(row["step"])
            except (ValueError, KeyError, TypeError, RecursionError):
                self.damaged[METRICS_FILE] = f"{METRICS_FILE} has lines that are no row of metrics; they are left out"
                continue
            if step <= next(reversed(self.rows), -1):  # trained again after a launch went back
                self.rows = {number: known for number, known in self.rows.items() if number < step}
            self.rows[step] = row

    def _lines(self, name: str) -> list[Row]:
        try:
            return read_rows(self.folder / name)
        except DamagedFile as error:
            self.damaged[name] = str(error)
            return []

    def _state(self) -> State:
        if self._is_held():
            return State.running
        if self.summary is None:
            return State.died
        total = self.summary.get("total_steps", self.setting("total_train_steps", 0))
        return State.finished if self.summary.get("steps", 0) >= total else State.stopped

    def _is_held(self) -> bool:
        """True if a launcher, or the leading process of a killed one, holds the trial: here or on another host."""
        with contextlib.suppress(OSError):
            return is_held(self.folder / LOCK_FILE)
        return False


TRAINED = "trained"
ABANDONED = "abandoned"
_decode = json_decoder(Line).decode


@dataclass(slots=True)
class Rollout:
    """A rollout according to the ledger; times are seconds since 1970, None if the ledger does not have them (yet).

    `end` is `TRAINED`, `ABANDONED`, the reason of its drop, or None while it runs.
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


@dataclass(slots=True)
class StepOf:
    """Figures of a train step, from its rollouts; `at`: it was complete, in seconds since 1970.

    `ages` counts trained tokens by how many versions older than the step's they are. `rollout_s` is the mean time from
    admitted to finished, `waited_s` from finished to the step's end. `dropped` counts by reason since the step before.
    """

    at: float
    ages: Counter[int] = field(default_factory=Counter)
    rollout_s: float = 0.0
    waited_s: float = 0.0
    admitted: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    counts: RolloutCounts | None = None


class LedgerHistory:
    """Reads the ledger in `folder`; `refresh` takes in what is new.

    Args:
        keep_steps: number of newest steps whose rollouts are kept.
        keep_from: oldest step whose rollouts are kept, in place of `keep_steps`; None: `keep_steps` holds.

    Attributes:
        steps: by number, those that no launch forgot.
        rollouts: by id; see the module's docstring.
        launches: the `begin` lines, in order.
        ended: the `end` line of the newest launch; None where it has none.
        newest_at: time of the newest line, in seconds since 1970.
    """

    def __init__(self, folder: Path, keep_steps: int, keep_from: int | None = None) -> None:
        self._folder, self._keep_steps, self._keep_from = folder, keep_steps, keep_from
        self._clear()

    def _clear(self) -> None:
        self._files: list[Appended] = []
        self.steps: dict[int, StepOf] = {}
        self.rollouts: dict[str, Rollout] = {}
        self.launches: list[Begin] = []
        self.ended: End | None = None
        self.newest_at = 0.0
        self._since_step = StepOf(0.0)  # what the next `step` line counts as its own
        self._trained_since: list[Trained] = []
        self._ended_since: list[str] = []
        self._ended_in: deque[tuple[int, list[str]]] = deque()
        """By step, the ids of the rollouts that ended in it and are still kept."""

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
        """Take in the lines that were appended since the last call.

        Raises:
            ReadAgain: a file was replaced or cut; lines read before may be of steps that did not end.
        """
        known = {each.file for each in self._files}
        self._files += [Appended(file) for file in sorted(self._folder.glob("*.jsonl")) if file not in known]
        for file in self._files:
            for raw in file.read():
                try:
                    line = _decode(raw)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    continue  # cut by a full disk, or not written by asyncrl
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
                if (rollout := self.rollouts.get(line.rollout)) is not None:
                    rollout.finished_at, rollout.tokens = line.at, line.tokens
                self.newest_at = max(self.newest_at, line.at)
            case Dropped():
                self._since_step.dropped[line.reason] += 1
                self._end(line.rollout, line.reason, line.at)
            case Abandoned():
                self._end(line.rollout, ABANDONED, line.at)
            case Trained():
                self._trained_since.append(line)
            case Step():
                self._take_step(line)
            case Begin():
                self._take_begin(line)
            case End():
                self.ended = line

    def _end(self, rollout_id: str, end: str, at: float) -> None:
        self._ended_since.append(rollout_id)
        if (rollout := self.rollouts.get(rollout_id)) is not None:
            rollout.end, rollout.ended_at = end, at
        self.newest_at = max(self.newest_at, at)

    def _take_step(self, line: Step) -> None:
        step, self._since_step = self._since_step, StepOf(0.0)
        step.at, step.counts = line.at, line.counts
        trained_since, self._trained_since = self._trained_since, []
        times: list[tuple[float, float]] = []
        for trained in trained_since:
            for version, tokens in trained.versions.items():
                step.ages[line.step - 1 - version] += tokens
            self._end(trained.rollout, TRAINED, line.at)
            if (rollout := self.rollouts.get(trained.rollout)) is None:
                continue
            rollout.step, rollout.reward, rollout.samples = line.step, trained.reward, trained.samples
            if rollout.finished_at is not None:
                times.append((rollout.finished_at - rollout.admitted_at, line.at - rollout.finished_at))
        if times:
            step.rollout_s, step.waited_s = (sum(each) / len(times) for each in zip(*times, strict=True))
        self.steps[line.step] = step
        self.newest_at = max(self.newest_at, line.at)
        self._ended_in.append((line.step, self._ended_since))
        self._ended_since = []
        while self._has_too_many():
            for rollout_id in self._ended_in.popleft()[1]:
                rollout = self.rollouts.get(rollout_id)
                if rollout is not None and rollout.end is not None:
                    del self.rollouts[rollout_id]

    def _has_too_many(self) -> bool:
        """True if the rollouts of the oldest step are no longer to be kept."""
        if self._keep_from is None:
            return len(self._ended_in) > self._keep_steps
        return bool(self._ended_in) and self._ended_in[0][0] < self._keep_from

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
                self._ended_since.append(rollout.id)
        self.launches.append(line)
        self.ended = None
        self._since_step, self._trained_since = StepOf(0.0), []
        self.newest_at = max(self.newest_at, line.at)
