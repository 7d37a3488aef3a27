"""Evaluations on the running servers, and the versions they pin.

An evaluation measures one version, so the servers must stay at it: while one runs, newer versions are not announced.
Training goes on meanwhile; what it publishes is put off, and of several only the newest is announced when the
evaluation ends. A version that is to be evaluated itself is never skipped: its announcement waits for the evaluation
before it.

    publish 5 ─▶ announce 5 ─▶ evaluate 5 ───────────────┐
                 publish 6 (put off)  publish 7 (put off) └▶ announce 7
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

from asyncrl.rollout.messages import EvaluationResult

_log = logging.getLogger(__name__)


class VersionAnnouncer:
    """Announces versions and evaluates those that are due.

    Args:
        announce: makes a version known to the servers; takes the folder of its weights too.
        evaluate: measures a version; it has a time limit of its own.
        is_due: whether a version is to be evaluated.
        on_end: takes the version of every evaluation that ended, and its result or why there is none.
        clock: seconds, to tell since when none is under way.
    """

    def __init__(
        self,
        announce: Callable[[int, str], None],
        evaluate: Callable[[int], Awaitable[EvaluationResult]],
        is_due: Callable[[int], bool],
        on_end: Callable[[int, EvaluationResult | str], None],
        clock: Callable[[], float],
    ) -> None:
        self._announce = announce
        self._evaluate = evaluate
        self._is_due = is_due
        self._on_end = on_end
        self._clock = clock
        self._put_off: tuple[int, str] | None = None
        self._running: asyncio.Task[None] | None = None
        self._ended_at = -math.inf

    @property
    def free_since(self) -> float:
        """Since when no evaluation pins a version, in seconds of `clock`; now, while one does."""
        return self._ended_at if self._running is None else self._clock()

    @property
    def put_off(self) -> tuple[int, ...]:
        """The published version whose announcement waits for an evaluation, if there is one."""
        return (self._put_off[0],) if self._put_off else ()

    async def published(self, version: int, path: str) -> None:
        """`version` lies at `path`: announce it, now or once the evaluation under way ends, and evaluate it if due."""
        if self._is_due(version):
            self._put_off = None  # of the versions put off only the newest would be announced: this one
            await self.evaluation_ended()
        elif self._running is not None:
            self._put_off = (version, path)
            return
        self._announce(version, path)
        self.evaluate_if_due(version)

    def evaluate_if_due(self, version: int) -> None:
        """Evaluate `version`, the one announced last, if it is due."""
        if self._is_due(version):
            self._running = asyncio.create_task(self._run(version))

    async def evaluation_ended(self) -> None:
        """Wait for the end of the evaluation under way, if any."""
        if self._running is not None:
            await asyncio.shield(self._running)

    async def close(self) -> None:
        """Give up the evaluation under way."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self, version: int) -> None:
        outcome: EvaluationResult | str = "given up, as the run ended"
        try:
            outcome = await self._evaluate(version)
        except Exception as error:
            _log.warning("the evaluation of version %d failed", version, exc_info=error)
            outcome = f"{type(error).__name__}: {error}".partition("\n")[0]
        finally:
            self._running, self._ended_at = None, self._clock()
            self._on_end(version, outcome)
            if self._put_off is not None:
                self._announce(*self._put_off)
                self._put_off = None
