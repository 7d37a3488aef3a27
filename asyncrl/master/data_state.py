"""The used prompts and the curriculum's measurements: a file that RolloutWorkers and the GserverManager begin with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.buffer import SampleBuffer
from asyncrl.master.run_files import write_data_state
from asyncrl.plugins.datasets.curriculum import Curriculum
from asyncrl.runtime.run_dir import DATA_STATE_FILE


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

    def restore(self, curriculum: Sequence[Sequence[float]]) -> None:
        """Continue from the state of a curriculum."""
        settings = self._settings
        self.curriculum = Curriculum(settings.low, settings.high, settings.rest, curriculum)

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
