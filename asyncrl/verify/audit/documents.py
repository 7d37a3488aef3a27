"""The run's small files, each read once and checked for its format: settings, summary, books, data record.

A file that cannot be read is a finding and counts as missing from then on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml  # type: ignore[import-untyped]

from asyncrl.comm.typed import convert
from asyncrl.config.run_dir import BOOKS_FILE, CONFIG_FILE, DATA_RECORD_FILE, SUMMARY_FILE
from asyncrl.plugins.datasets.rows.data_fingerprint import DataRecord
from asyncrl.verify.audit.ledger_files import Report
from asyncrl.verify.audit.outcome import Outcome

MAX_ROWS = 1 << 32
"""Rows in prompt ids are below this."""

_T = TypeVar("_T")


class Rollout(msgspec.Struct, frozen=True):
    """The settings of `rollout` that matter for the ledger."""

    workers: int


class EvaluationSet(msgspec.Struct, frozen=True):
    """An entry of `eval.sets`; without an interval it has that of `eval`."""

    interval: int | None = None


class Evaluation(msgspec.Struct, frozen=True):
    """The settings of `eval` that decide which versions are evaluated."""

    interval: int = 0
    sets: list[EvaluationSet] = []

    def is_due(self, version: int, total_steps: int) -> bool:
        """True if `version` is evaluated on any set."""
        intervals = [self.interval if each.interval is None else each.interval for each in self.sets]
        return any(
            interval > 0 and (version % interval == 0 or version == total_steps)
            for interval in intervals or [self.interval]
        )


class Samples(msgspec.Struct, frozen=True):
    """The settings of `samples`."""

    every: int = 0
    replay: str = ""


class Manager(msgspec.Struct, frozen=True):
    """The settings of `manager` that decide which versions have a folder."""

    weight_transport: str = "disk"


class System(msgspec.Struct, frozen=True):
    """The settings of `system` that decide whether all processes write into the run's folder."""

    shared_filesystem: bool = True


class Settings(msgspec.Struct, frozen=True):
    """The settings in `config.yaml` on which the run's files depend."""

    train_batch_size: int
    max_head_offpolicyness: int
    on_stale: str
    seed: int
    rollout: Rollout
    total_train_steps: int = 0
    total_epochs: float | None = None
    eval: Evaluation = Evaluation()
    samples: Samples = Samples()
    manager: Manager = Manager()
    system: System = System()


class Books(msgspec.Struct, frozen=True):
    """The gate's counters."""

    submitted: int
    trained: int
    dropped: dict[str, int]
    abandoned: int
    running: int
    finished_untrained: int

    @property
    def accounted_for(self) -> int:
        """Return the number of rollouts in the counters, ended or not."""
        under_way = self.running + self.finished_untrained
        return self.trained + sum(self.dropped.values()) + self.abandoned + under_way


class Summary(msgspec.Struct, frozen=True):
    """`summary.json`."""

    steps: int
    total_steps: int
    books: Books
    eval: dict[str, dict[str, Any]]
    evaluations: list[dict[str, Any]]
    evaluations_failed: list[dict[str, Any]]


class LastBooks(msgspec.Struct, frozen=True):
    """`books.json`."""

    step: int
    books: Books


@dataclass(frozen=True)
class Documents:
    """The small files of a run; None for one that is missing or cannot be read.

    Attributes:
        there: names of the files in the folder, valid or not.
    """

    there: frozenset[str]
    settings: Settings | None
    summary: Summary | None
    books: LastBooks | None
    data: DataRecord | None

    @classmethod
    def read(cls, run_dir: Path, report: Report) -> Documents:
        """Read the files in `run_dir`."""
        names = (CONFIG_FILE, SUMMARY_FILE, BOOKS_FILE, DATA_RECORD_FILE)
        there = frozenset(name for name in names if (run_dir / name).exists())

        def read(name: str, kind: type[_T], parse: Callable[[bytes], Any] = json.loads) -> _T | None:
            return read_as(run_dir / name, kind, report, parse) if name in there else None

        data = read(DATA_RECORD_FILE, DataRecord)
        if data is not None and (wrong := _wrong_with(data)):
            report(DATA_RECORD_FILE, wrong)
            data = None
        return cls(
            there,
            read(CONFIG_FILE, Settings, yaml.safe_load),
            read(SUMMARY_FILE, Summary),
            read(BOOKS_FILE, LastBooks),
            data,
        )

    def check_there(self, outcome: Outcome, report: Report) -> None:
        """Report the files that a run with this history must have.

        A launch removes the summary and books of the previous one, so if both are missing a later launch has begun.
        """
        settings, outcome.summed_up = self.settings, SUMMARY_FILE in self.there
        if CONFIG_FILE not in self.there:
            report(CONFIG_FILE, "is not there")
        elsewhere = settings is not None and (bool(settings.samples.replay) or not settings.system.shared_filesystem)
        if DATA_RECORD_FILE not in self.there and outcome.admitted and not elsewhere:
            report(DATA_RECORD_FILE, "is not there")
        if outcome.ended and BOOKS_FILE in self.there and SUMMARY_FILE not in self.there:
            report(SUMMARY_FILE, "is missing, although the run ended by itself according to the ledger")
        if outcome.ended and SUMMARY_FILE in self.there and BOOKS_FILE not in self.there:
            report(BOOKS_FILE, "is not there")
        if SUMMARY_FILE in self.there and not outcome.ended:
            report(SUMMARY_FILE, "exists, but the ledger has no line about the end of the run: the ledger is cut off")

    def check_settings(self, outcome: Outcome, report: Report) -> None:
        """Check that the settings are those of the last launch in the ledger."""
        known, settings = outcome.settings, self.settings
        if known is None or settings is None or BOOKS_FILE not in self.there:
            return
        written = {
            "train_batch_size": settings.train_batch_size,
            "max_head_offpolicyness": settings.max_head_offpolicyness,
            "on_stale": settings.on_stale,
            "workers": settings.rollout.workers if known.workers else 0,  # 0: a replay, which has none
            "seed": settings.seed,
        }
        for name, value in written.items():
            if (told := getattr(known, name)) != value:
                report(CONFIG_FILE, f"{name} is {value}, the ledger's last launch had {told}")

    def check_books(self, outcome: Outcome, report: Report) -> None:
        """Check the books in `books.json` and those in the summary."""
        if (last := self.books) is not None:
            if last.books.submitted != last.books.accounted_for:
                told = last.books.accounted_for
                report(BOOKS_FILE, f"has {last.books.submitted} submitted rollouts and accounts for {told}")
            if not 0 <= last.step <= outcome.version + (not outcome.ended):
                report(BOOKS_FILE, f"is of step {last.step}; the ledger's last step is {outcome.version}")
            elif outcome.ended and outcome.steps_of_launch and last.step != outcome.version:
                report(BOOKS_FILE, f"is of step {last.step}; the run ended at {outcome.version}")
            known = outcome.books_at.get(last.step)
            if known is not None and outcome.ended and outcome.steps_of_launch:
                self._compare(BOOKS_FILE, last.books, msgspec.structs.asdict(known), report)
        if (summary := self.summary) is None or not outcome.ended:
            return
        if summary.steps != outcome.version:
            report(SUMMARY_FILE, f"has {summary.steps} steps, the ledger {outcome.version}")
        settings = self.settings
        differs = settings is not None and summary.total_steps != settings.total_train_steps
        if settings is not None and differs and not self._is_used_up(settings, summary, outcome):
            report(
                SUMMARY_FILE,
                f"total_steps is {summary.total_steps}, {CONFIG_FILE} has total_train_steps "
                f"{settings.total_train_steps}",
            )
        counted = {
            "submitted": outcome.submitted,
            "trained": outcome.trained,
            "dropped": dict(outcome.dropped),
            "abandoned": outcome.abandoned,
            "running": 0,
            "finished_untrained": 0,
        }
        self._compare(SUMMARY_FILE, summary.books, counted, report)

    def _is_used_up(self, settings: Settings, summary: Summary, outcome: Outcome) -> bool:
        """True if the run ended before its last step since too few prompts of its epochs were left."""
        if settings.total_epochs is None or summary.total_steps != summary.steps:
            return False
        rows = None if self.data is None else int(settings.total_epochs * self.data.rows)
        return rows is None or rows - len(outcome.used) < settings.train_batch_size

    def _compare(self, place: str, told: Books, counted: dict[str, Any], report: Report) -> None:
        for name, value in counted.items():
            said = getattr(told, name)
            if ({key: count for key, count in said.items() if count} if isinstance(said, dict) else said) != value:
                report(place, f"has {name} {said}, the ledger {value}")


def read_as(file: Path, kind: type[_T], report: Report, parse: Callable[[bytes], Any] = json.loads) -> _T | None:
    """Return the content of `file` as a `kind`. If it is not one, report a finding and return None."""
    try:
        return convert(parse(file.read_bytes()), kind)
    except (OSError, ValueError, RecursionError, yaml.YAMLError, msgspec.ValidationError) as error:
        report(file.name, f"cannot be read: {one_line(error)}")
        return None


def one_line(error: BaseException) -> str:
    """Return the kind of `error` and the first line of its message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.200}"


def _wrong_with(data: DataRecord) -> str | None:
    if not 0 < data.rows <= MAX_ROWS:
        return f"has {data.rows} rows"
    if data.line_sums is not None and len(data.line_sums) != -(-data.rows * 4 // 3) * 4:  # base64
        return f"has {data.rows} rows, but checksums of a different number of rows"
    return None
