"""One reader for all files that describe a run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from enum import StrEnum, auto
from pathlib import Path
from typing import Any

from asyncrl.comm.files import is_held
from asyncrl.config.run_dir import (
    CONFIG_FILE,
    LEDGER_DIR,
    LOCK_FILE,
    METRICS_FILE,
    OBSERVED_DIR,
    REMARKS_FILE,
    RESTARTS_FILE,
    SUMMARY_FILE,
    DamagedFile,
    read_document,
    read_settings,
)
from asyncrl.observe.history.ledger_history import LedgerHistory, Rollout, StepOf
from asyncrl.observe.history.process_history import Process, ProcessHistory
from asyncrl.observe.history.tail import Appended, ReadAgain, read_rows

Row = dict[str, Any]
KEEP_STEPS = 100


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
        """The resolved settings, as nested mappings."""
        changed = (self.folder / CONFIG_FILE).stat().st_mtime_ns
        if self._config[0] != changed:
            self._config = (changed, {})  # what is damaged is read once
            self._config = (changed, {str(key): value for key, value in read_settings(self.folder).items()})
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
        """The restarts, in order (`asyncrl.runtime.trials.restarts`)."""
        return self._lines(RESTARTS_FILE)

    @property
    def remarks(self) -> list[str]:
        """Remarks of the newest launch's processes for the terminal."""
        return [str(line.get("remark", "")) for line in self._lines(REMARKS_FILE)]

    @property
    def now(self) -> float:
        """The newest time in any of the files, in seconds since 1970."""
        said: list[float] = [process.last.get("at", 0.0) for process in self.processes.values()]
        return max([self.ledger.newest_at, *said])

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
