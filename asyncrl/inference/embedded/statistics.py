"""Load of the engine: seconds spent in steps, tokens per second during them, and snapshots for other threads."""

from __future__ import annotations

from asyncrl.inference.embedded.decoding.batch import DecodeBatch
from asyncrl.inference.embedded.engine_io import EngineStats
from asyncrl.inference.embedded.limits import EngineLimits
from asyncrl.inference.embedded.serving.jobs import JobTable
from asyncrl.models.pictures.picture_rows import Pictures

INTERVAL_S = 0.1
"""Interval in seconds between readings of a working engine."""
WINDOW_S = 1.0
"""Longest time in seconds between two readings that gives a speed: the first reading after a pause does not."""


class WorkMeter:
    """Receives, after every step, the time in seconds and the number of tokens generated so far."""

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self.tokens_per_s = 0.0
        self._read_at = 0.0
        self._tokens = 0

    def worked(self, begin: float, end: float, tokens: int) -> bool:
        """Record a step from `begin` to `end`; return True if a reading was due."""
        self.busy_seconds += end - begin
        passed = end - self._read_at
        if passed <= INTERVAL_S:
            return False
        if passed < WINDOW_S:
            self.tokens_per_s = (tokens - self._tokens) / passed
        self._read_at, self._tokens = end, tokens
        return True


class Statistics:
    """Takes snapshots on the engine's thread; any thread may read the `latest`.

    Args:
        pictures: pictures of the model; None if it serves text alone.

    Attributes:
        latest: the newest snapshot, at most `INTERVAL_S` old while the engine works.
        due: something other than a step has changed the state, so that the next step takes a snapshot.
        retractions: samples that pauses sent back to the queue.
    """

    def __init__(self, batch: DecodeBatch, jobs: JobTable, limits: EngineLimits, pictures: Pictures | None) -> None:
        self._batch, self._jobs, self._limits, self._pictures = batch, jobs, limits, pictures
        self._prefilled_before = batch.prefills.forward.computed_tokens  # by the check of the model
        self._meter = WorkMeter()
        self.latest = EngineStats()
        self.due = True
        self.retractions = 0

    def worked(self, begin: float, end: float) -> None:
        """Record a step from `begin` to `end`; take a snapshot if one is due."""
        if self._meter.worked(begin, end, self._batch.counts.generated) or self.due:
            self.take(paused=False)

    def take(self, *, paused: bool) -> None:
        """Take a snapshot."""
        self.due = False
        batch = self._batch
        self.latest = EngineStats(
            running=batch.samples.live,
            waiting=batch.waiting,
            paused=paused,
            used_tokens=batch.used_tokens,
            max_total_tokens=self._limits.max_total_tokens,
            max_running_requests=self._limits.max_running_requests,
            prompt_tokens=batch.counts.prompt,
            cached_tokens=batch.counts.cached,
            generated_tokens=batch.counts.generated,
            prefilled_tokens=batch.prefills.forward.computed_tokens - self._prefilled_before,
            kept_tokens=batch.prefills.kept_tokens,
            finished_requests=self._jobs.finished,
            aborted_requests=self._jobs.aborted,
            retractions=self.retractions,
            steps=batch.steps,
            busy_seconds=self._meter.busy_seconds,
            gen_throughput=0.0 if paused or not batch.runnable else self._meter.tokens_per_s,
            weight_version=batch.version,
            encoded_pictures=0 if self._pictures is None else self._pictures.tower.encoded,
        )
