"""Versions of trained weights: ranks publish them, servers load the announced one, and evaluations pin it.

An evaluation measures one version on the sets that are due, one after the other, even if a set fails. The servers must
stay at that version, so newer versions are not announced meanwhile. Training continues; its versions are put off, and
of several only the newest is announced when the evaluation ends. A version that is due for evaluation is never skipped:
its announcement waits for the previous evaluation.

    publish 5 ─▶ announce 5 ─▶ evaluate 5 ───────────────┐
                 publish 6 (put off)  publish 7 (put off) └▶ announce 7
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from asyncrl.comm.ended_rollouts import CUT_SHORT
from asyncrl.comm.request_reply import RequestClient, RequestTimeout
from asyncrl.comm.waits import ASK_S, LOOK_S, RunningClock, running_wait
from asyncrl.manager.settings import VersionPoolConfig
from asyncrl.master.metrics_log import MetricsLog
from asyncrl.master.peers import NameBoard, RankClients, ReplaceableWorker
from asyncrl.observe import observer
from asyncrl.rollout.messages import Evaluate, EvaluationResult, StillThere
from asyncrl.runtime.process.waiting import cancel
from asyncrl.trainer.messages import CollectWeights, Publish

if TYPE_CHECKING:  # optional, see `asyncrl.runtime.plan`
    from asyncrl.master.win_rates import WinRates

_log = logging.getLogger(__name__)

_Worker: TypeAlias = RequestClient | ReplaceableWorker


class NothingEvaluated(RuntimeError):
    """No prompt of a set was answered."""


async def evaluate(workers: Sequence[_Worker], name: str, version: int, limit_s: float) -> EvaluationResult:
    """Evaluate `version` on the whole set `name`; each RolloutWorker does a share. It may take any time: each episode
    has a limit of its own.

    Args:
        limit_s: longest silence of a worker, in seconds in which this process ran.

    Raises:
        NothingEvaluated: the agent answered not a single prompt of the set.
        TimeoutError: a worker is silent.
    """
    request = Evaluate(name, version)
    replies = await asyncio.gather(*(_share(worker, at, request, limit_s) for at, worker in enumerate(workers)))
    shares = [share for share in replies if share.answers]
    left_out = sum(share.left_out for share in replies)
    if not shares:
        raise NothingEvaluated(f"none of the {left_out} rows of {name!r} was answered: they make no prompt")
    return EvaluationResult(
        answers=tuple(sorted((answer for share in shares for answer in share.answers), key=attrgetter("row"))),
        left_out=left_out,
        min_version=min(share.min_version for share in shares),
        max_version=max(share.max_version for share in shares),
    )


async def _share(worker: _Worker, number: int, request: Evaluate, limit_s: float) -> EvaluationResult:
    """Return the worker's share of an evaluation."""
    evaluating = asyncio.ensure_future(worker.call(request, timeout_s=math.inf))
    try:
        while True:
            await running_wait(evaluating, limit_s=min(ASK_S, limit_s / 4))
            if evaluating.done():
                return evaluating.result()
            await worker.call(StillThere(), timeout_s=limit_s)
    except RequestTimeout as error:
        raise TimeoutError(
            f"RolloutWorker {number} showed no sign of life for {limit_s:g} s (system.stall_timeout_s)"
        ) from error
    finally:
        await cancel(evaluating)


class VersionAnnouncer:
    """Announces versions to the servers and evaluates those that are due.

    Args:
        win_rates: of prioritised pools, announced with each version; None without such pools.
        limit_s: longest silence of a worker that evaluates.

    Attributes:
        announced: version that the servers have to load; 0 is the initial model, which is never announced.
    """

    def __init__(
        self,
        board: NameBoard,
        rollouts: Sequence[_Worker],
        metrics_log: MetricsLog,
        win_rates: WinRates | None,
        clock: RunningClock,
        limit_s: float,
    ) -> None:
        self.announced = 0
        self._board, self._rollouts, self._metrics_log = board, rollouts, metrics_log
        self._win_rates, self._clock, self._limit_s = win_rates, clock, limit_s
        self._put_off: tuple[int, str] | None = None
        self._abandoned = False
        self._running: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        """Error at the end of an evaluation: its row was not written, or the version put off was not announced."""
        self._ended_at = -math.inf

    @property
    def free_since(self) -> float:
        """The time since which no evaluation pins a version, in seconds of `clock`; the current time while one does."""
        return self._ended_at if self._running is None else self._clock()

    @property
    def evaluating(self) -> bool:
        """True while an evaluation runs."""
        return self._running is not None

    @property
    def put_off(self) -> tuple[int, ...]:
        """The published version whose announcement waits for an evaluation, if there is one."""
        return (self._put_off[0],) if self._put_off else ()

    async def published(self, version: int, path: str) -> None:
        """Announce `version`, whose weights are in `path`, now or after the running evaluation, and evaluate it if
        due.
        """
        self._check()
        if self._metrics_log.evaluations.due(version):
            self._put_off = None  # of the versions put off only the newest would be announced: this one
            await self.evaluation_ended()
        elif self._running is not None:
            self._put_off = (version, path)
            return
        self.announce(version, path)
        self.evaluate_if_due()

    def announce(self, version: int, path: str) -> None:
        """Announce `version`, which servers have to load from now on."""
        self._board.announce_version(version, path, None if self._win_rates is None else self._win_rates.at(version))
        self.announced = version

    def evaluate_if_due(self) -> None:
        """Evaluate the version announced last, if that is due."""
        if names := self._metrics_log.evaluations.due(self.announced):
            self._running = asyncio.create_task(self._run(self.announced, names))
            self._running.add_done_callback(self._keep_failure)

    async def evaluation_ended(self) -> None:
        """Wait until a running evaluation ends; raise the error of one that could not be recorded."""
        if self._running is not None:
            await asyncio.shield(self._running)
        self._check()

    async def abandon(self) -> None:
        """As `close`, but report nothing about the evaluation: the process that replaces this one repeats it."""
        self._abandoned = True
        await self.close()

    async def close(self) -> None:
        """Cancel a running evaluation."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self, version: int, names: Sequence[str]) -> None:
        outcomes: dict[str, EvaluationResult | str] = dict.fromkeys(names, CUT_SHORT)
        seconds: dict[str, float] = {}
        try:
            for name in names:
                began = time.time()
                try:
                    while self._board.producers_start():  # noqa: ASYNC110 - the resolver's thread has no event of this loop
                        await asyncio.sleep(LOOK_S)
                    outcomes[name] = await evaluate(self._rollouts, name, version, self._limit_s)
                except Exception as error:
                    _log.warning("the evaluation of version %d on %s failed", version, name, exc_info=error)
                    outcomes[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
                finally:
                    ended = time.time()
                    seconds[name] = ended - began
                    observer.span("evaluation", began, ended, version=version, set=name)
        finally:
            self._running, self._ended_at = None, self._clock()
            if not self._abandoned:
                self._metrics_log.evaluated(version, outcomes, seconds)
                if self._put_off is not None:
                    self.announce(*self._put_off)
                    self._put_off = None

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _keep_failure(self, ended: asyncio.Task[None]) -> None:
        if not ended.cancelled():
            self._failure = ended.exception()


class Publishing:
    """Has the ranks publish each version of every trained policy, and remove versions that no process reads.

    Args:
        actors: by role, the ranks that hold the actor of each trained policy; the run's own comes first.
        pools: pools whose members agents play with; the members' weights are kept.
    """

    def __init__(
        self,
        ranks: RankClients,
        actors: Mapping[str, Sequence[RequestClient]],
        announcer: VersionAnnouncer,
        pools: Sequence[VersionPoolConfig] = (),
    ) -> None:
        self.on_disk = 0
        """Newest version whose weights are in a folder; 0 is the base model."""
        self._ranks, self._actors, self._announcer, self._pools = ranks, actors, announcer, pools

    async def publish(self, version: int, in_use: Collection[int], *, to_disk: bool) -> str:
        """Make the weights available as `version`, the current one; return the folder of the run's own policy, which
        holds the weights themselves if `to_disk`. Versions that no process reads are removed, except the newest on
        disk.

        Args:
            in_use: versions that servers read.
        """
        if to_disk:
            self.on_disk = version
        kept = {version, version - 1, self.on_disk, self._announcer.announced, *self._announcer.put_off, *in_use}
        # All trained policies, those on ranks of their own at the same time. They are handed over in this order, which
        # is then that of every rank's collectives.
        publishing = [self._ranks.some(ranks, Publish(role, version, to_disk)) for role, ranks in self._actors.items()]
        ((own, *_), *_), _ = await asyncio.gather(asyncio.gather(*publishing), self.collect(version, kept))
        return own.path

    async def collect(self, version: int, kept: Collection[int]) -> None:
        """Remove all versions but those `kept` and the members of pools at `version`."""
        members = {member for pool in self._pools for member in pool.needed(version)}
        for role in self._actors:
            await self._ranks.all(CollectWeights(role, tuple(sorted(members.union(kept)))))
