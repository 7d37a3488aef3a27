"""Sinks of a run's metrics: `metrics.jsonl` always, TensorBoard and Weights & Biases by setting.

`metrics.jsonl` has one JSON object per train step, and one of step 0 if the initial model is evaluated. Each is
appended and flushed at once, so that a display can follow the file. A launch first removes the rows from its own first
step on, because it trains these steps again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from asyncrl.comm.files.appended_file import AppendedFile
from asyncrl.comm.files.retry_write import retry_write_blocking
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.observe.metrics.sample_tables import COLUMNS, Table, as_markdown

_log = logging.getLogger(__name__)
Row = Mapping[str, Any]
"""Numbers by name; a few entries are lists of numbers, which only `metrics.jsonl` keeps."""

TENSORBOARD_DIR = "tensorboard"
_VERSION = "brain.Event:2"
"""Version of the format of event files."""
WANDB_ID_FILE = "wandb_id"
HIDDEN = "(hidden)"
_SECRET = re.compile(r"(?i)password|secret|token$|api_?key|authorization|credential")


class MetricsError(RuntimeError):
    """A sink cannot be used; the message names the setting."""


class Sink(ABC):
    """A destination of rows."""

    @abstractmethod
    def write(self, step: int, row: Row) -> None:
        """Record the row of `step`; steps ascend."""

    @abstractmethod
    def samples(self, step: int, table: Table) -> None:
        """Record a few samples that `step` trained."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close."""


class JsonlSink(Sink):
    """`metrics.jsonl`; rows of `first_step` (0: a new run) and later ones are removed."""

    def __init__(self, path: Path, first_step: int) -> None:
        self.last_step = _truncate(path, first_step)
        self._file = AppendedFile(path)

    def write(self, step: int, row: Row) -> None:
        self._file.write(json.dumps({"step": step, **row}).encode() + b"\n")
        self.last_step = step

    def samples(self, step: int, table: Table) -> None:
        """Do nothing: samples are in separate files."""

    def close(self) -> None:
        self._file.close()


class TensorBoardSink(Sink):
    """Event files under `<run_dir>/tensorboard`, a new one per launch. Points of earlier files from `first_step` on are
    hidden.

    Their format is TensorBoard's own, which needs no torch: 0.2 s and 10 MB for the master. tensorboardX and torch's
    writer both import torch where it is installed; all three writers fail for good while the disk is full.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._tensor, self._string = Event, Summary, TensorProto, DT_STRING
        self._metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        host, now = socket.gethostname(), time.time()
        name = f"events.out.tfevents.{now:017.6f}.{host}.{os.getpid()}"  # files are read in order of name
        self._records = RecordWriter(AppendedFile(folder / name))  # type: ignore[no-untyped-call,unused-ignore]
        self._add(Event(wall_time=now, file_version=_VERSION, source_metadata=SourceMetadata(writer=__name__)))
        if first_step:
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=now, step=first_step, session_log=start))

    def write(self, step: int, row: Row) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in _scalars(row).items()]
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def samples(self, step: int, table: Table) -> None:
        text = self._tensor(dtype=self._string, string_val=[as_markdown(table).encode()])
        value = self._summary.Value(tag="samples", tensor=text, metadata=self._metadata)
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=[value])))

    def close(self) -> None:
        self._records.close()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


class WandbSink(Sink):
    """A Weights & Biases run with the resolved config, continued by a launch that resumes the trial.

    Its id is in the trial's folder, so a wiped trial is a new run. The x axis is `step`. If a launch goes back and
    trains steps again, the new points come after the old ones and are not dropped.

    Raises:
        MetricsError: wandb is not installed.
    """

    def __init__(self, project: str, run_dir: Path, config: ExperimentConfig) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise MetricsError(
                f"logging.wandb_project={project!r}: wandb is not installed; pip install 'asyncrl[tracking]', or leave "
                "the setting empty"
            ) from error
        self._table = wandb.Table
        self._run: Any = wandb.init(
            project=project,
            name=f"{config.experiment_name}/{config.trial_name}",
            group=config.experiment_name,
            id=_wandb_id(run_dir / WANDB_ID_FILE),
            dir=str(run_dir),
            resume="allow",
        )
        shown = without_secrets(OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True))
        self._run.config.update(shown, allow_val_change=True)  # type: ignore[no-untyped-call,unused-ignore]
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, row: Row) -> None:
        self._run.log(_scalars(row) | {"step": step})

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


def without_secrets(value: Any) -> Any:
    """Return settings with every text whose name says that it is secret replaced by `HIDDEN`, at any depth."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if _SECRET.search(str(key)) and isinstance(each, str) and each else without_secrets(each)
            for key, each in value.items()
        }
    return [without_secrets(each) for each in value] if isinstance(value, list) else value


class MetricsWriter:
    """Writes every row to all sinks.

    Args:
        sinks: further sinks.
        jsonl: the first sink; its file also shows which row was the last.
    """

    def __init__(self, jsonl: JsonlSink, *sinks: Sink) -> None:
        self._jsonl = jsonl
        self._sinks: tuple[Sink, ...] = (jsonl, *sinks)

    @classmethod
    def open(cls, file: Path, config: ExperimentConfig, first_step: int = 0) -> MetricsWriter:
        """Return the sinks that `config.logging` asks for; this launch's rows begin at `first_step`."""
        sinks: list[Sink] = []
        if config.logging.tensorboard:
            sinks.append(TensorBoardSink(file.parent / TENSORBOARD_DIR, first_step))
        if config.logging.wandb_project:
            sinks.append(WandbSink(config.logging.wandb_project, file.parent, config))
        return cls(JsonlSink(file, first_step), *sinks)

    @property
    def last_step(self) -> int:
        """Step of the last row in the file; -1 if it has no rows."""
        return self._jsonl.last_step

    def write(self, step: int, row: Row) -> None:
        """Write the row of `step`.

        Raises:
            ValueError: the step does not come after the last one written.
        """
        if step <= self.last_step:
            raise ValueError(
                f"metrics row of step {step} comes after that of step {self.last_step}; every step has one row"
            )
        for sink in self._sinks:
            sink.write(step, row)

    def samples(self, step: int, table: Table) -> None:
        """Send a few samples that `step` trained to all sinks."""
        for sink in self._sinks:
            sink.samples(step, table)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def _scalars(row: Row) -> dict[str, float]:
    return {key: value for key, value in row.items() if isinstance(value, (int, float))}


def _truncate(path: Path, first_step: int) -> int:
    """Cut `path` before the first row whose step is `first_step` or later; returns the last step left, -1 for none."""
    last_step, end = -1, 0
    if not path.is_file():
        return last_step
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            step = json.loads(line)["step"]
            if step >= first_step:
                break
            last_step, end = step, end + len(line)
    retry_write_blocking(partial(os.truncate, path, end), f"{path}", _log)
    return last_step
