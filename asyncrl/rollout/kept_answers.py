"""Optional: answers of evaluations as files (`samples.eval_every`). Each worker writes those of its share of a set."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from asyncrl.api import Trajectory
from asyncrl.comm.files import remove_leftover
from asyncrl.observe.samples import forget_after, rows_of, sample_files, write_samples
from asyncrl.rollout.episode import Answer

_log = logging.getLogger(__name__)

_WRITER = "worker-"
_WRITTEN = re.compile(rf"step-(\d+)\.{_WRITER}(\d+)\.parquet", re.ASCII)


class KeptAnswers:
    """Writes the answers of one worker.

    Args:
        folder: folder with a subfolder for each set.
        every: keep every N-th row of a set.
        max_bytes: limit on the size of this worker's files of one set.
        index, workers: this worker's number, and the number of workers that share a set.
        decode: turns token ids into text.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        max_bytes: int,
        decode: Callable[[Sequence[int]], str],
        *,
        index: int,
        workers: int,
    ) -> None:
        self._folder, self._every, self._max_bytes, self._decode = folder, every, max_bytes, decode
        self._index, self._workers = index, workers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")

    async def keep(self, name: str, version: int, answers: Mapping[int, Sequence[Answer]]) -> None:
        """Write `answers` to the set `name`, given by row and then by member; a failed write is only a warning."""
        kept = {row: group for row, group in answers.items() if row % self._every == 0}
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._write, name, version, kept)
        except OSError as error:
            _log.warning("answers of version %d to %s are not kept: %s", version, name, error)

    def _write(self, name: str, version: int, answers: Mapping[int, Sequence[Answer]]) -> None:
        folder, writer = self._folder / name, f"{_WRITER}{self._index}"
        forget_after(folder, version, writer)  # of an earlier launch that got further
        if self._index == 0:
            self._forget_workers(folder, version)
        rows = [
            row | {"set": name, "right": answer.right, "staleness": None}
            for number, group in answers.items()
            for member, answer in enumerate(group)
            for row in rows_of(_rollout(name, version, number, member, answer), version, self._decode, {})
        ]
        write_samples(folder, version, writer, rows, self._max_bytes)

    def _forget_workers(self, folder: Path, version: int) -> None:
        """Remove the answers to `version` and later ones that a launch with more workers kept."""
        for file in sample_files(folder):
            written = _WRITTEN.fullmatch(file.name)  # None: not a file of this class
            if written is not None and int(written[2]) >= self._workers and int(written[1]) >= version:
                remove_leftover(file, _log)


def _rollout(name: str, version: int, row: int, member: int, answer: Answer) -> Trajectory:
    """Return an answer as a rollout of its own, whose prompt is the row."""
    samples = [replace(sample, episode=member) for sample in answer.samples]
    return Trajectory(f"{name}-{row}-v{version}-{member}", f"{name}-{row}", row, samples, dict(answer.metrics))
