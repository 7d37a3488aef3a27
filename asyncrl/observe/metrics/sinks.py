"""Sinks of a run's metrics: `metrics.jsonl` always, TensorBoard and Weights & Biases by setting. There, a few samples
of each step are a table.

The run needs `metrics.jsonl`: the audit reads it, and a resume goes on from it. The others serve only to watch. Each of
these has a thread of its own, so a run never waits for it, and one that fails is off for the rest of the launch, with a
warning on the terminal.

`metrics.jsonl` has one JSON object per train step, and one of step 0 if the initial model is evaluated. Each is
appended and flushed at once, so that a display can follow the file. A launch first removes the rows from its own first
step on, because it trains these steps again.
"""

from __future__ import annotations

import json
import logging
import os
import pkgutil
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.comm.files import AppendedFile, retry_write_blocking
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.secrets import hide

if TYPE_CHECKING:
    from asyncrl.observe.metrics.sample_tables import Table

_log = logging.getLogger(__name__)
Row = Mapping[str, Any]
"""Numbers by name; a few entries are lists of numbers, which only `metrics.jsonl` keeps."""
TENSORBOARD_DIR = "tensorboard"
_VERSION = "brain.Event:2"
"""Version of the format of event files."""
_WANDB = "asyncrl.observe.metrics.wandb_sink:WandbSink"
_HELD_ROWS = 10_000
"""Rows that wait for a sink, which may take two minutes to find out that its server does not answer."""
_CLOSE_S = 60.0
"""Time for a sink to write what it holds, at the end of a run."""


class Sink(ABC):
    """A destination of rows for people who watch."""

    @abstractmethod
    def write(self, step: int, row: Row) -> None:
        """Record the row of `step`; steps ascend."""

    @abstractmethod
    def samples(self, step: int, table: Table) -> None:
        """Record a few samples that `step` trained."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close."""


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
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(row).items()]
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def samples(self, step: int, table: Table) -> None:
        from asyncrl.observe.metrics.sample_tables import as_markdown

        text = self._tensor(dtype=self._string, string_val=[as_markdown(table).encode()])
        value = self._summary.Value(tag="samples", tensor=text, metadata=self._metadata)
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=[value])))

    def close(self) -> None:
        self._records.close()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


class Watcher:
    """A sink that serves only to watch: it works on a thread of its own, and its failure ends it alone.

    Args:
        name: for the warning.
        make: makes the sink, on the thread.
        warn: is called with what happened, once.
    """

    def __init__(self, name: str, make: Callable[[], Sink], warn: Callable[[str], None]) -> None:
        self._name, self._make, self._warn = name, make, warn
        self._work: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(_HELD_ROWS)
        self._off = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[Sink], None] | None) -> None:
        """Have the sink do `work`; None: close."""
        try:
            if not self._off.is_set():
                self._work.put_nowait(work)
        except queue.Full:
            self._fail(f"it has not taken the last {_HELD_ROWS} rows")

    def close(self) -> None:
        """Write what waits and close the sink, within a limit."""
        self.do(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._fail(f"it does not end within {_CLOSE_S:.0f} s")

    def _run(self) -> None:
        try:
            sink = self._make()
            while (work := self._work.get()) is not None and not self._off.is_set():
                work(sink)
            sink.close()
        except Exception as error:  # any: a tracker's client raises errors of all kinds
            _log.exception("%s failed", self._name)
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        if not self._off.is_set():
            self._off.set()
            self._warn(f"WARNING: {self._name} gets no more metrics: {' '.join(hide(reason).split())}; the run goes on")


class MetricsWriter:
    """Writes every row to `metrics.jsonl`, which the run needs, and to all sinks.

    Args:
        file: its rows of `first_step` (0: a new run) and later ones are removed.
        watchers: the sinks.

    Attributes:
        last_step: step of the last row in the file; -1 if it has no rows.
    """

    def __init__(self, file: Path, first_step: int, *watchers: Watcher) -> None:
        self.last_step = _truncate(file, first_step)
        self._file, self._watchers = AppendedFile(file), watchers

    @classmethod
    def open(
        cls, file: Path, config: ExperimentConfig, first_step: int = 0, warn: Callable[[str], None] = _log.warning
    ) -> MetricsWriter:
        """Return the sinks that `config.logging` asks for; this launch's rows begin at `first_step`.

        Args:
            warn: is called with the failure of a sink that serves only to watch.
        """
        watchers, logging = list[Watcher](), config.logging
        if logging.tensorboard:
            folder = file.parent / TENSORBOARD_DIR
            watchers.append(Watcher("TensorBoard", partial(TensorBoardSink, folder, first_step), warn))
        if logging.wandb_project:
            make = partial(pkgutil.resolve_name(_WANDB), logging.wandb_project, file.parent, config)
            watchers.append(Watcher("Weights & Biases", make, warn))
        return cls(file, first_step, *watchers)

    def write(self, step: int, row: Row) -> None:
        """Write the row of `step`.

        Raises:
            ValueError: the step does not come after the last one written.
        """
        if step <= self.last_step:
            raise ValueError(
                f"metrics row of step {step} comes after that of step {self.last_step}; every step has one row"
            )
        self._file.write(json.dumps({"step": step, **row}).encode() + b"\n")
        self.last_step = step
        for watcher in self._watchers:
            watcher.do(lambda sink: sink.write(step, row))

    def samples(self, step: int, table: Table) -> None:
        """Send a few samples that `step` trained to all sinks that show them."""
        for watcher in self._watchers:
            watcher.do(lambda sink: sink.samples(step, table))

    def close(self) -> None:
        """Close the file and every sink."""
        self._file.close()
        for watcher in self._watchers:
            watcher.close()


def scalars(row: Row) -> dict[str, float]:
    return {key: value for key, value in row.items() if isinstance(value, (int, float))}


def _truncate(path: Path, first_step: int) -> int:
    """Cut `path` before the first row whose step is `first_step` or later; returns the last step left, -1 for none."""
    last_step, end = -1, 0
    if not path.is_file():
        return last_step
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or (step := json.loads(line)["step"]) >= first_step:
                break
            last_step, end = step, end + len(line)
    retry_write_blocking(partial(os.truncate, path, end), f"{path}", _log)
    return last_step
