"""Files that the MasterWorker writes into the run's folder, beside metrics: data state, books, summary."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asyncrl.comm.files.retry_write import retry_write_blocking
from asyncrl.comm.files.sealed_json import seal
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import (
    BOOKS_FILE,
    CHECKPOINTS_DIR,
    DATA_STATE_FILE,
    LOGS_DIR,
    METRICS_FILE,
    SUMMARY_FILE,
    WEIGHTS_DIR,
)
from asyncrl.manager.messages import GateBooks
from asyncrl.master.data.buffer import SampleBuffer
from asyncrl.master.metrics.metrics_log import MetricsLog
from asyncrl.plugins.datasets.queue.curriculum import Curriculum, make_curriculum
from asyncrl.plugins.datasets.queue.used_prompts import UsedPrompts
from asyncrl.runtime.trials.restart_log import count_restarts

_log = logging.getLogger(__name__)


class BooksError(RuntimeError):
    """A rollout is unaccounted for at the end of the run."""


def checkpoint_root(run_dir: Path) -> Path:
    """Folder of the run's checkpoints."""
    return run_dir / CHECKPOINTS_DIR


def write_data_state(run_dir: Path, used: UsedPrompts, curriculum: Curriculum) -> Path:
    """Write which prompts are used, for the RolloutWorkers (`UsedPrompts.read`), and how well they were answered, for
    the GserverManager; returns the file.
    """
    path = run_dir / DATA_STATE_FILE
    _write(path, seal({"used_prompts": used.to_json(), "curriculum": curriculum.state()}))
    return path


def write_books(run_dir: Path, step: int, books: GateBooks) -> None:
    """Write the books as of `step`, for an end at which the manager does not answer."""
    _write_json(run_dir / BOOKS_FILE, {"step": step, "books": _plain(books)})


def write_summary(run_dir: Path, steps: int, total_steps: int, books: GateBooks, metrics_log: MetricsLog) -> None:
    """Write the end of the run as `summary.json`: steps, books, evaluations, where things lie."""
    summary = {
        "steps": steps,
        "total_steps": total_steps,
        "books": _plain(books),
        "eval": metrics_log.last_evaluations(),
        "evaluations": metrics_log.evaluations,
        "evaluations_failed": metrics_log.evaluations_failed,
        "restarts": dict(count_restarts(run_dir)),
        "paths": {
            "metrics": str(run_dir / METRICS_FILE),
            "weights": str(run_dir / WEIGHTS_DIR),
            "checkpoints": str(checkpoint_root(run_dir)),
            "logs": str(run_dir / LOGS_DIR),
        },
    }
    _write_json(run_dir / SUMMARY_FILE, summary)


def check_books(books: GateBooks, trained: int) -> None:
    """Check that every rollout is accounted for, and that the gate saw `trained` of them reach the optimizer.

    Raises:
        BooksError: naming the counters.
    """
    if not books.balanced or books.running or books.finished_untrained:
        raise BooksError(
            f"the books do not balance: submitted {books.submitted}, trained {books.trained}, dropped "
            f"{sum(books.dropped.values())} {dict(books.dropped)}, abandoned {books.abandoned}, "
            f"still running {books.running}, finished but untrained {books.finished_untrained}"
        )
    if books.trained != trained:
        raise BooksError(f"the gate counts {books.trained} trained rollouts, the trainer {trained}")


def _plain(books: GateBooks) -> dict[str, Any]:
    """The books proper, without the versions that some replies add."""
    return {name: getattr(books, name) for name in GateBooks.__struct_fields__}


def _write_json(path: Path, value: Any) -> None:
    _write(path, json.dumps(value).encode())


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")

    def write() -> None:
        temporary.write_bytes(data)
        os.replace(temporary, path)

    retry_write_blocking(write, f"{path}", _log)


class DataState:
    """The file, and the measurements in it; the used prompts are the buffer's.

    It is written before each report to the manager: a worker that begins then finds every prompt used that the manager
    has forgotten (`asyncrl.manager.service`).
    """

    def __init__(self, config: ExperimentConfig, run_dir: Path, buffer: SampleBuffer) -> None:
        self._settings, self._run_dir, self._buffer = config.dataset.curriculum, run_dir, buffer
        self._measured = 0
        self._written: tuple[int, int] | None = None  # how many used prompts and measurements the file has
        self.restore(())

    def restore(self, curriculum: Any) -> None:
        """Continue from the state of a curriculum."""
        self.curriculum = make_curriculum(self._settings, curriculum)

    def measured(self, successes: Iterable[tuple[str, float]]) -> None:
        """Take in the success rates of prompts."""
        for prompt_id, success in successes:
            self.curriculum.measured(prompt_id, success)
            self._measured += 1

    def write(self) -> Path:
        """Write the file if something has changed; return its path."""
        content = len(self._buffer.used), self._measured
        if self._written == content:
            return self._run_dir / DATA_STATE_FILE
        self._written = content
        return write_data_state(self._run_dir, self._buffer.used, self.curriculum)
