"""Runs a step's graph on the ModelWorkers.

Mechanism. A call may start once its predecessors are done, so independent calls overlap where their roles live on
different workers. A worker serves the calls sent to it one after the other, in the order of arrival.

One order of collectives. Two calls that run collectives over the same ranks must reach all of them in the same order,
or the ranks wait for each other for ever. It is so because (1) one coroutine decides what starts next, (2) of the
calls that are ready it starts the one that comes first in the graph's topological order, (3) it hands a call to all
workers of its role before it looks at the next call, without giving up the event loop in between, and (4) requests to
one worker arrive in the order in which they were handed over (request-reply is FIFO per peer, and a worker's queue is
FIFO). So any two calls arrive in the same order on every worker that gets both.

Only metadata passes through: names and keys go out, statistics come back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.comm.request_reply.client import RequestClient
from asyncrl.master.graph.types import Call, Graph
from asyncrl.trainer.messages import CallStats, RunCall

Stats = dict[str, Any]


class ExecutionError(RuntimeError):
    """A call failed or was late; the message names the call, its role and the worker."""


class Executor:
    """Executes `graph`, step after step.

    Args:
        graph: a validated graph.
        placement: for every role the workers that host it.
        workers: the ModelWorkers by index.
        timeout_s: limit of one call, queueing behind other calls included.
    """

    def __init__(
        self, graph: Graph, placement: Mapping[str, Sequence[int]], workers: Sequence[RequestClient], timeout_s: float
    ) -> None:
        self._order = graph.order()
        self._before = graph.predecessors()
        self._placement = placement
        self._workers = workers
        self._timeout_s = timeout_s

    async def run(self) -> Stats:
        """Run every call once; returns the statistics of all calls and `time/<call>_s` of each.

        Raises:
            ExecutionError: a call failed on a worker or exceeded the limit. Calls that had started are cancelled.
        """
        stats: Stats = {}
        done: set[str] = set()
        waiting = list(self._order)
        running: dict[asyncio.Task[Stats], Call] = {}
        try:
            while waiting or running:
                for call in [call for call in waiting if self._before[call.name] <= done]:
                    waiting.remove(call)
                    running[asyncio.create_task(self._run_call(call), name=call.name)] = call
                finished, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(finished, key=lambda task: self._order.index(running[task])):
                    stats |= task.result()
                    done.add(running.pop(task).name)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return stats

    async def _run_call(self, call: Call) -> Stats:
        started = time.perf_counter()
        request = RunCall(call.name, call.role, call.function, call.reads, call.writes, dict(call.args))
        # Tasks start in the order of their creation: all workers are sent this call before any is sent the next one.
        replies = [asyncio.ensure_future(self._call(worker, request)) for worker in self._placement[call.role]]
        try:
            first, *_ = await asyncio.gather(*replies)
        finally:
            for reply in replies:
                reply.cancel()
        # Functions reduce their statistics over all ranks, so every worker reports the same ones.
        return {**first.stats, f"time/{call.name}_s": time.perf_counter() - started}

    async def _call(self, worker: int, request: RunCall) -> CallStats:
        where = f"call {request.name!r} (function {request.function!r}, role {request.role!r}) on model_worker/{worker}"
        try:
            return await self._workers[worker].call(request, timeout_s=self._timeout_s)
        except TimeoutError as error:
            raise ExecutionError(f"{where} did not finish within {self._timeout_s:g} s") from error
        except Exception as error:
            raise ExecutionError(f"{where} failed: {error}") from error
