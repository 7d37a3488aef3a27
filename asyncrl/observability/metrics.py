"""Where a run's numbers go: `metrics.jsonl` always, TensorBoard and Weights & Biases by setting.

`metrics.jsonl` has one JSON object per train step, appended and flushed as it is made, so that a display can follow the
file. A resumed run cuts the rows after the restored step first: they belong to a future that is trained anew.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.observability.tensorboard import EventFile
from asyncrl.runtime.run_dir import METRICS_FILE

Row = Mapping[str, Any]
"""Numbers by name; a few entries are lists of numbers, which only `metrics.jsonl` keeps."""

TENSORBOARD_DIR = "tensorboard"


class MetricsError(RuntimeError):
    """A sink cannot be used; the message names the setting."""


class Sink(ABC):
    """One place that rows go to."""

    @abstractmethod
    def write(self, step: int, row: Row) -> None:
        """Take the row of `step`; steps ascend."""

    @abstractmethod
    def close(self) -> None:
        """Write out what is left."""


class JsonlSink(Sink):
    """`metrics.jsonl`. `after_step` is the step of the restored checkpoint (0: a new run): later rows are removed."""

    def __init__(self, path: Path, after_step: int) -> None:
        self.last_step = _truncate(path, after_step)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, step: int, row: Row) -> None:
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        self._file.flush()
        self.last_step = step

    def close(self) -> None:
        self._file.close()


class TensorBoardSink(Sink):
    """Event files under `<run_dir>/tensorboard`, a new one per launch; `after_step` as in `JsonlSink`."""

    def __init__(self, folder: Path, after_step: int) -> None:
        self._events = EventFile(folder, first_step=after_step + 1 if after_step else None)

    def write(self, step: int, row: Row) -> None:
        self._events.write(step, _scalars(row))

    def close(self) -> None:
        self._events.close()


class WandbSink(Sink):
    """A Weights & Biases run, continued by a resumed launch.

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
        name = f"{config.experiment_name}/{config.trial_name}"
        self._run: Any = wandb.init(
            project=project, name=name, id=name.replace("/", "-"), dir=str(run_dir), resume="allow"
        )

    def write(self, step: int, row: Row) -> None:
        self._run.log(_scalars(row), step=step)

    def close(self) -> None:
        self._run.finish()


class MetricsWriter:
    """Writes every row to all sinks.

    Args:
        sinks: where rows go besides the first.
        jsonl: the file that also says how far the rows go.
    """

    def __init__(self, jsonl: JsonlSink, *sinks: Sink) -> None:
        self._jsonl = jsonl
        self._sinks: tuple[Sink, ...] = (jsonl, *sinks)

    @classmethod
    def open(cls, run_dir: Path, config: ExperimentConfig, after_step: int = 0) -> MetricsWriter:
        """The sinks that `config.logging` asks for; `after_step` as in `JsonlSink`."""
        sinks: list[Sink] = []
        if config.logging.tensorboard:
            sinks.append(TensorBoardSink(run_dir / TENSORBOARD_DIR, after_step))
        if config.logging.wandb_project:
            sinks.append(WandbSink(config.logging.wandb_project, run_dir, config))
        return cls(JsonlSink(run_dir / METRICS_FILE, after_step), *sinks)

    @property
    def last_step(self) -> int:
        """Step of the last row in the file; 0 if there is none."""
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

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a `metrics.jsonl`; a last line cut off by a kill is left out."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def _scalars(row: Row) -> dict[str, float]:
    return {key: value for key, value in row.items() if isinstance(value, (int, float))}


def _truncate(path: Path, after_step: int) -> int:
    """Cut `path` behind the last row whose step is at most `after_step`; returns that row's step."""
    if not path.is_file():
        return 0
    last_step, end = 0, 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            step = json.loads(line)["step"]
            if step > after_step:
                break
            last_step, end = step, end + len(line)
    os.truncate(path, end)
    return last_step
