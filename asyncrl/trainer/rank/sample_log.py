"""The log of trained samples (`samples.every`): the head of each data index writes its own files.

All log-probabilities are those of training. The behaviour policy's came with the trajectory; the proximal and the
reference policy's are recorded as calls write them. Deferred ones are computed for the kept samples alone, before the
actor changes, and do not replace anything that training reads. So training is the same with and without the log. A
thread writes the files while training continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import SAMPLES_DIR
from asyncrl.config.variants import role_of_policy
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.observe.samples import TOKEN_SCORES, Row, forget_after, rows_of, write_samples
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.parallel.world import World

_log = logging.getLogger(__name__)


class SampleLog:
    """Writes samples of one rank.

    Args:
        folder: folder of the files.
        every: keep every N-th rollout of the data order.
        max_bytes: limit on the size of all of this rank's files.
        writer: this rank's name in the files; None if another rank with the same samples writes.
        decode: turns token ids into text.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        max_bytes: int,
        writer: str | None,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._folder, self._every, self._max_bytes = folder, every, max_bytes
        self._writer, self._decode = writer, decode
        self._trajectories: list[tuple[Trajectory, int]] = []  # each with the position of its first token
        self._wanted_T = torch.zeros(0, dtype=torch.bool)
        self._scores: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writing: Future[Path] | None = None

    def begin(self, trajectories: Sequence[Trajectory], batch: StepBatch) -> None:
        """Select the samples to keep of a step that begins with `batch`, built from `trajectories`."""
        self._trajectories, self._scores, start = [], {}, 0
        self._wanted_T = torch.zeros(batch.num_tokens, dtype=torch.bool, device=batch.device)
        for trajectory in trajectories:
            size = int(trajectory.columns.lengths.sum())
            if trajectory.order % self._every == 0:
                self._trajectories.append((trajectory, start))
                self._wanted_T[start : start + size] = True
            start += size

    def called(self, writes: Sequence[str], batch: StepBatch) -> None:
        """Record the columns `writes` that a call wrote. Called on every rank of the batch: it may run a collective."""
        for key in writes:
            if key in TOKEN_SCORES and (compute := batch.deferred(key)) is not None:
                self._scores[key] = compute(self._wanted_T & batch["loss_mask"])

    def end(self, batch: StepBatch) -> None:
        """Begin to write the kept samples of the step, which is complete."""
        kept, self._trajectories = self._trajectories, []
        if self._writer is None or not kept:
            return
        for key in TOKEN_SCORES:
            if key not in self._scores and key in batch and batch.deferred(key) is None:
                self._scores[key] = batch[key]
        scores = {key: column.detach().to("cpu", torch.float32).numpy().copy() for key, column in self._scores.items()}
        self._scores = {}
        self._finish()
        self._writing = self._thread.submit(self._write, kept, batch.version + 1, self._writer, scores)

    def forget_after(self, version: int) -> None:
        """Forget samples after `version`, from which the run resumes."""
        if self._writer is not None:
            forget_after(self._folder, version, self._writer)

    def close(self) -> None:
        """Wait for the write in progress."""
        self._finish()
        self._thread.shutdown()

    def _finish(self) -> None:
        """Wait for the last write and log its failure.

        Training does not read the samples, so a lost sample must not fail a step.
        """
        writing, self._writing = self._writing, None
        if writing is not None and (error := writing.exception()) is not None:
            _log.warning("the samples of a step could not be kept in %s: %r", self._folder, error)

    def _write(
        self, kept: Sequence[tuple[Trajectory, int]], step: int, writer: str, scores: dict[str, NDArray[np.float32]]
    ) -> Path:
        rows: list[Row] = []
        for trajectory, start in kept:
            stop = start + int(trajectory.columns.lengths.sum())
            rows += rows_of(trajectory, step, self._decode, {key: values[start:stop] for key, values in scores.items()})
        return write_samples(self._folder, step, writer, rows, self._max_bytes)


def open_sample_logs(config: ExperimentConfig, world: World, run_dir: Path) -> dict[str, SampleLog]:
    """Open the writers of this rank's samples, by trained policy."""
    samples, policies = config.samples, ("", *config.trained_policies)
    here = [policy for policy in policies if world.hosts(role_of_policy(policy, ACTOR))]
    if not here:
        return {}
    decode = load_tokenizer(str(config.model.path)).decode
    opened = {}
    for policy in here:
        position = world.position(role_of_policy(policy, ACTOR))
        ranks, max_bytes = position.data, int(samples.max_gb * 1e9 / position.data.world / len(policies))
        name = "-".join([f"head-{ranks.rank}", *([policy] if policy else [])])
        writer = name if position.copy.leads else None
        opened[policy] = SampleLog(run_dir / SAMPLES_DIR, samples.every, max_bytes, writer, decode)
    return opened
