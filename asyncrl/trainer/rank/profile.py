"""Profiles of chosen steps of a training rank (`profile.steps`), in the run's folder:

profile/step-10.rank-0.trace.json.gz    torch's trace, for ui.perfetto.dev or chrome://tracing
        step-10.rank-0.memory.pickle    history of the GPU's memory, for pytorch.org/memory_viz
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from asyncrl.observe.settings import ProfileConfig

_MEMORY_EVENTS = 200_000
"""Number of the newest allocations and frees that the history keeps."""

_log = logging.getLogger(__name__)


class StepProfile:
    """Records the work of a rank between `begin` and `end` of the steps listed in `settings`.

    Args:
        rank: index of the ModelWorker.
        folder: folder of the files; created with the first file.
    """

    def __init__(self, settings: ProfileConfig, rank: int, folder: Path, device: torch.device) -> None:
        self._steps = frozenset(settings.steps) if rank in settings.ranks else frozenset[int]()
        self._rank, self._folder = rank, folder
        self._on_gpu = device.type == "cuda"
        self._memory = settings.memory and self._on_gpu
        if self._steps and settings.memory and not self._on_gpu:
            _log.info("profile.memory: the history of a GPU's memory; this rank computes on the %s", device.type)
        self._step = 0
        self._profile: profile | None = None

    def begin(self, step: int) -> None:
        """Start recording if `step` is to be profiled; an unfinished recording is dropped."""
        self._drop()
        if step not in self._steps:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._step, self._profile = step, profile(activities=activities, record_shapes=True)
        self._profile.start()
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)

    def call(self, name: str) -> AbstractContextManager[object]:
        """Label everything within this block as `name` in the trace."""
        return nullcontext() if self._profile is None else record_function(name)

    def end(self) -> list[Path]:
        """End the step and write its files; returns them."""
        if self._profile is None:
            return []
        self._profile.stop()
        try:
            files = self._write(self._profile)
        except (OSError, RuntimeError) as error:  # for example a full disk; the step is trained anyway
            _log.warning("the profile of step %d could not be written: %s", self._step, error)
            files = []
        self._drop(stopped=True)
        if files:
            _log.info("profile of step %d: %s", self._step, ", ".join(map(str, files)))
        return files

    def _write(self, recorded: profile) -> list[Path]:
        self._folder.mkdir(exist_ok=True)
        stem = f"step-{self._step}.rank-{self._rank}"
        files = [self._folder / f"{stem}.trace.json.gz"]
        recorded.export_chrome_trace(str(files[0]))
        if self._memory:
            files.append(self._folder / f"{stem}.memory.pickle")
            torch.cuda.memory._dump_snapshot(str(files[1]))  # type: ignore[no-untyped-call]
        return files

    def _drop(self, *, stopped: bool = False) -> None:
        if self._profile is None:
            return
        if not stopped:
            self._profile.stop()
        if self._memory:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profile = None
