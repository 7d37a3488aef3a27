"""Running jobs: their outputs as they arrive, their rids, and the answers that are due."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from asyncrl.api.generation import FinishReason
from asyncrl.inference.embedded.decoding.sequence import Sequence
from asyncrl.inference.embedded.engine_io import GenerationOutput, Job, RequestError


@dataclass(slots=True)
class _Progress:
    job: Job
    outputs: list[GenerationOutput | None]
    left: int


class JobTable:
    """Jobs that were submitted and are not answered yet.

    The submitting threads call `reserve`, the engine's thread everything else.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rids: set[str] = set()
        self._open: dict[int, _Progress] = {}
        self._complete: list[_Progress] = []
        self.arrivals = 0
        """Number of samples that have arrived so far."""
        self.finished = 0
        self.aborted = 0

    @property
    def due(self) -> bool:
        """True if a complete job waits for its answer."""
        return bool(self._complete)

    def reserve(self, job: Job) -> None:
        """Claim the job's rids.

        Raises:
            RequestError: a rid is in use, or the job names one twice.
        """
        rids = {request.rid for request in job.inputs}
        with self._lock:
            taken = self._rids & rids
            if taken or len(rids) < len(job.inputs):
                raise RequestError(f"Duplicate request ID detected: {min(taken or rids)}")
            self._rids |= rids

    def release(self, job: Job) -> None:
        """Release the rids of a job that was not accepted after all."""
        with self._lock:
            self._rids -= {request.rid for request in job.inputs}

    def open(self, job: Job) -> list[Sequence]:
        """Begin a job; return its samples, numbered by arrival."""
        count = len(job.inputs)
        self._open[id(job)] = _Progress(job, [None] * count, count)
        sequences = [Sequence.of(job, index, self.arrivals + index) for index in range(count)]
        self.arrivals += count
        return sequences

    def note(self, sequence: Sequence, output: GenerationOutput) -> None:
        """Record that a sample has finished."""
        assert output.finish is not None
        self.finished += 1
        self.aborted += output.finish.reason == FinishReason.abort
        with self._lock:
            self._rids.discard(output.rid)
        progress = self._open[id(sequence.job)]
        progress.outputs[sequence.index] = output
        progress.left -= 1
        if progress.job.on_progress is not None:
            progress.job.on_progress(sequence.index, output)
        if progress.left == 0:
            self._complete.append(self._open.pop(id(sequence.job)))

    def answer(self) -> None:
        """Answer complete jobs."""
        complete, self._complete = self._complete, []
        for progress in complete:
            if not progress.job.future.set_running_or_notify_cancel():
                continue
            if progress.job.failure is not None:
                progress.job.future.set_exception(progress.job.failure)
            else:
                progress.job.future.set_result([output for output in progress.outputs if output is not None])

    def fail(self, error: BaseException) -> None:
        """Answer complete jobs, and fail the others."""
        self.answer()
        for progress in self._open.values():
            if progress.job.future.set_running_or_notify_cancel():
                progress.job.future.set_exception(error)
        self._open.clear()
