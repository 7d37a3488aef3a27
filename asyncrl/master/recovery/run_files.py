"""Files that the MasterWorker writes into the run's folder besides the metrics: books and summary."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.comm.ended_rollouts.ledger_lines import RolloutCounts
from asyncrl.comm.files.retry_write import retry_write_blocking
from asyncrl.config.run_dir import (
    BOOKS_FILE,
    CHECKPOINTS_DIR,
    LOGS_DIR,
    METRICS_FILE,
    SUMMARY_FILE,
    WEIGHTS_DIR,
)
from asyncrl.master.metrics.metrics_log import MetricsLog
from asyncrl.runtime.trials.restart_log import count_restarts

_log = logging.getLogger(__name__)


class BooksError(RuntimeError):
    """A rollout is unaccounted for at the end of the run."""


def checkpoint_root(run_dir: Path) -> Path:
    """Folder of the run's checkpoints."""
    return run_dir / CHECKPOINTS_DIR


def write_books(run_dir: Path, step: int, books: RolloutCounts) -> None:
    """Write the books as of `step`, for an end at which the manager does not answer."""
    _write_json(run_dir / BOOKS_FILE, {"step": step, "books": msgspec.to_builtins(books)})


def write_summary(run_dir: Path, steps: int, total_steps: int, books: RolloutCounts, metrics_log: MetricsLog) -> None:
    """Write `summary.json` at the end of the run: steps, books, evaluations, and paths of the run's files."""
    summary = {
        "steps": steps,
        "total_steps": total_steps,
        "books": msgspec.to_builtins(books),
        "eval": metrics_log.evaluations.newest(),
        "evaluations": metrics_log.evaluations.ended,
        "evaluations_failed": metrics_log.evaluations.failed,
        "restarts": dict(count_restarts(run_dir)),
        "paths": {
            "metrics": str(run_dir / METRICS_FILE),
            "weights": str(run_dir / WEIGHTS_DIR),
            "checkpoints": str(checkpoint_root(run_dir)),
            "logs": str(run_dir / LOGS_DIR),
        },
    }
    _write_json(run_dir / SUMMARY_FILE, summary)


def check_books(books: RolloutCounts, trained: int) -> None:
    """Check that every rollout is accounted for, and that the gate saw `trained` of them reach the optimizer.

    Raises:
        BooksError: the counters do not add up; the message names them.
    """
    if not books.balanced or books.running or books.finished_untrained:
        raise BooksError(
            f"the books do not balance: submitted {books.submitted}, trained {books.trained}, dropped "
            f"{sum(books.dropped.values())} {dict(books.dropped)}, abandoned {books.abandoned}, "
            f"still running {books.running}, finished but untrained {books.finished_untrained}"
        )
    if books.trained != trained:
        raise BooksError(f"the gate counts {books.trained} trained rollouts, the trainer {trained}")


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")

    def write() -> None:
        temporary.write_text(json.dumps(value))
        os.replace(temporary, path)

    retry_write_blocking(write, f"{path}", _log)
