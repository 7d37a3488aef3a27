"""Runs from Python: `asyncrl.run` starts one and yields its rows as they come, `asyncrl.load_run` reads one.

    for row in asyncrl.run("async_grpo", {"model.path": "my-model", "reward.path": "my_reward.py:score"}):
        print(row["step"], row["reward/mean"])

A run is the same as by the command, with the same processes, files and checkpoints. It is in a separate session, so
Ctrl-C in a notebook reaches it once and in order. It ends with the program that started it, unless that is killed by
SIGKILL.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.run_dir import METRICS_FILE, SAMPLES_DIR, run_dir_of
from asyncrl.config.setting import ConfigError
from asyncrl.config.values import plain
from asyncrl.launch.before_start.setting_checks import validate
from asyncrl.launch.commands import ERROR
from asyncrl.observe.doctor import Diagnosis, examine
from asyncrl.observe.history import History
from asyncrl.observe.samples import read_samples, sample_files
from asyncrl.observe.tail import JsonlTail
from asyncrl.runtime.settings import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_OK
from asyncrl.runtime.trials.claim import SAVE_LIMIT_S

Row = dict[str, Any]
LOOK_S = 0.2
"""Interval, in seconds, of the check for new rows."""
_LAST_LINES = 20


class RunFailed(RuntimeError):
    """A run failed; the message has the end of its output, `exit_code` its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run(
    experiment: str, settings: Mapping[str, Any] | Sequence[str] = (), *, config_dir: str | Path | None = None
) -> Run:
    """Start a run of `experiment`.

    Args:
        settings: by their names, such as `{"rollout.max_concurrent": 8}`, or nested, as in YAML; or `setting=value`
            texts. Values are Python's: numbers (also numpy's), texts, lists, mappings, paths. A function or class of
            yours stands for its import path.
        config_dir: folder of your own experiments.

    Raises:
        ConfigError: a setting is wrong; nothing was started.
    """
    overrides = [] if isinstance(settings, Mapping) else list(settings)
    values = settings if isinstance(settings, Mapping) else {}
    folder = None if config_dir is None else Path(config_dir)
    config = load_experiment(experiment, overrides, folder, values=values)
    if not isinstance(config, ExperimentConfig):
        raise ConfigError(f"{experiment}: makes a base model and has no steps to follow; start it by its command")
    validate(config)
    command = [sys.executable, "-m", "asyncrl.launch", experiment, "logging.display=plain"]
    if folder is not None:
        command += ["--config-dir", str(folder)]
    return Run(command, run_dir_of(config), msgspec.msgpack.encode((overrides, plain(values))))


def load_run(folder: str | Path) -> LoadedRun:
    """Read the run in `folder`, which may be running, have ended or have died.

    Raises:
        ValueError: the folder holds no run.
    """
    return LoadedRun(History(Path(folder)))


class LoadedRun:
    """A run as its files show it; `refresh` reads new data."""

    def __init__(self, history: History) -> None:
        self.history = history

    def refresh(self) -> None:
        """Read new data."""
        self.history.refresh()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.history.folder

    @property
    def state(self) -> str:
        """`running`, `finished`, `stopped` or `died`."""
        return str(self.history.state)

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved settings, as nested mappings."""
        return self.history.config

    @property
    def metrics(self) -> list[Row]:
        """Return the rows of metrics, in the order of their steps."""
        return [row for _, row in sorted(self.history.rows.items())]

    @property
    def evaluations(self) -> list[Row]:
        """Return the steps and figures of the evaluations."""
        kept = [{name: row[name] for name in row if name == "step" or name.startswith("eval/")} for row in self.metrics]
        return [row for row in kept if len(row) > 1]

    @property
    def summary(self) -> Mapping[str, Any] | None:
        """Return the summary that the run wrote at its end; None if it did not end normally."""
        return self.history.summary

    def table(self) -> Any:
        """Return the metrics as a `pyarrow.Table` with one column each (`.to_pandas()` turns it into a data frame).

        Raises:
            ImportError: pyarrow is not installed (`pip install 'asyncrl[data]'`).
        """
        import pyarrow as pa

        names = list(dict.fromkeys(name for row in self.metrics for name in row))
        return pa.table({name: [row.get(name) for row in self.metrics] for name in names})

    def samples(self) -> Iterator[Row]:
        """Yield the kept samples, one row each (docs/samples.md); none if the run saves none."""
        folder = self.folder / SAMPLES_DIR
        yield from read_samples(sample_files(folder)) if folder.is_dir() else ()

    def doctor(self) -> Diagnosis:
        """Return the doctor's diagnosis: the pace of the run, and its problems."""
        return examine(self.history)


class Run(Iterator[Row]):
    """A run in progress. Iterate over it for its rows of metrics; `result` waits for its end.

    Leaving the loop, a `with` block or the program ends the run, after a checkpoint; the same call continues from it.

    Attributes:
        folder: the run's folder.
    """

    def __init__(self, command: Sequence[str], folder: Path, settings: bytes) -> None:
        self.folder = folder
        self._output = tempfile.NamedTemporaryFile(prefix="asyncrl-run-", suffix=".log")  # noqa: SIM115 - as long as self
        self._settings = tempfile.NamedTemporaryFile(prefix="asyncrl-settings-")  # noqa: SIM115 - as long as self
        self._settings.write(settings)  # not in the command, which every user of the machine can read
        self._settings.flush()
        self._tail = JsonlTail(folder / METRICS_FILE)
        self._tail.read()  # rows of earlier launches
        self._rows: list[Row] = []
        self._stopped = False
        self._process = subprocess.Popen(
            [*command, "--settings-file", self._settings.name],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._finalizer = weakref.finalize(self, _end, self._process)  # at the program's end at the latest

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Row:
        """Wait for the next row and return it.

        Raises:
            StopIteration: the run has ended normally.
            ConfigError: its data or code is wrong, which was found before anything started.
            RunFailed: it failed.
        """
        try:
            while not self._rows:
                ended = self._process.poll() is not None  # before the look: a row may come just before the end
                self._rows += self._tail.read()
                if self._rows:
                    break
                if ended:
                    self._check()
                    raise StopIteration
                time.sleep(LOOK_S)
        except KeyboardInterrupt:
            self.stop()
            raise
        return self._rows.pop(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the run after a checkpoint; return once it has ended. No effect if it has ended already."""
        self._stopped = True
        self._finalizer()

    def result(self) -> LoadedRun:
        """Wait for the run's end and return it.

        Raises:
            ConfigError, RunFailed: see `__next__`.
        """
        try:
            self._process.wait()
        except KeyboardInterrupt:
            self.stop()
            raise
        self._check()
        return load_run(self.folder)

    @property
    def output(self) -> str:
        """Return the output of the command so far."""
        return Path(self._output.name).read_text(errors="replace")

    def _check(self) -> None:
        """Raise the error that the run's exit code means."""
        code = self._process.poll()
        if code in (EXIT_OK, None) or (self._stopped and code == EXIT_INTERRUPTED):
            return
        lines = self.output.splitlines()
        if code == EXIT_CONFIG:
            errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
            raise ConfigError("\n".join(errors or lines[-_LAST_LINES:]))
        end = "\n".join(lines[-_LAST_LINES:])
        raise RunFailed(f"the run in {self.folder} ended with exit code {code}:\n{end}", code)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run: after a checkpoint, or at once if that takes too long."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):  # the second one ends it at once
        if process.poll() is not None:
            return
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SAVE_LIMIT_S)
    process.wait()
