"""The sink of Weights & Biases (`logging.wandb_project`)."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.comm.files import retry_write_blocking
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.secrets import without_secrets
from asyncrl.observe.metrics.sample_tables import COLUMNS, Table
from asyncrl.observe.metrics.sinks import Row, Sink, scalars

_log = logging.getLogger(__name__)
WANDB_ID_FILE = "wandb_id"


class WandbSink(Sink):
    """A Weights & Biases run with the resolved config, continued by a launch that resumes the trial.

    Its id is in the trial's folder, so a wiped trial is a new run. The x axis is `step`. If a launch goes back and
    trains steps again, the new points come after the old ones and are not dropped.
    """

    def __init__(self, project: str, run_dir: Path, config: ExperimentConfig) -> None:
        import wandb

        self._table = wandb.Table
        self._run: Any = wandb.init(
            project=project,
            name=f"{config.experiment_name}/{config.trial_name}",
            group=config.experiment_name,
            id=_wandb_id(run_dir / WANDB_ID_FILE),
            dir=str(run_dir),
            resume="allow",
        )
        shown = without_secrets(msgspec.to_builtins(config))
        self._run.config.update(shown, allow_val_change=True)  # type: ignore[no-untyped-call,unused-ignore]
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, row: Row) -> None:
        self._run.log(scalars(row) | {"step": step})

    def samples(self, step: int, table: Table) -> None:
        rows = [list(row) for row in table]
        self._run.log({"samples": self._table(columns=list(COLUMNS), data=rows), "step": step})

    def close(self) -> None:
        self._run.finish()


def _wandb_id(file: Path) -> str:
    """Return the id in `file`, which is written if it is absent, or empty because a launch crashed as it wrote it."""
    kept = file.read_text().strip() if file.exists() else ""
    if not kept:
        kept = secrets.token_hex(8)
        retry_write_blocking(lambda: file.write_text(kept), f"{file}", _log)
    return kept
