"""Runs a step's graph on the ModelWorkers.

Mechanism. A call may start once its predecessors are done, so independent calls overlap if their roles are on different
workers. A worker serves its calls one after the other, in the order of arrival.

One order of collectives. Two calls that run collectives over the same ranks must reach all of them in the same order,
or the ranks wait for each other for ever. Any two calls arrive in the same order on every worker that gets both,
because

1. one coroutine decides what starts next;
2. of the ready calls it starts the one that comes first in the graph's topological order;
3. it hands a call to all workers of its role before it looks at the next call, without yielding to the event loop;
4. requests to one worker arrive in the order in which they were handed over: request-reply is FIFO per peer, and so is
   a worker's queue.

Only metadata is exchanged: names and keys go out, statistics come back.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from asyncrl.comm.request_reply import R, Request, RequestClient
from asyncrl.master.graph.call_graph import Call, Graph
from asyncrl.master.peers.rank_clients import while_ranks_work
from asyncrl.trainer.messages import MoveColumns, RunCall

Stats = dict[str, Any]


class ExecutionError(RuntimeError):
    """A call failed; the message names the call, its role and the worker."""


class Executor:
    """Executes `graph`, step after step.

    Args:
        graph: a validated graph.
        placement: for every role, the workers that host it.
        workers: the ModelWorkers by index.
        limit_s: longest silence of the ranks (`while_ranks_work`).
        moves: the result of `column_moves`; empty if all roles have one layout.
    """

    def __init__(
        self,
        graph: Graph,
        placement: Mapping[str, Sequence[int]],
        workers: Sequence[RequestClient],
        limit_s: float,
        moves: Mapping[str, Sequence[MoveColumns]] | None = None,
    ) -> None:
        self._order = graph.order()
        self._before = graph.predecessors()
        self._placement = placement
        self._workers = workers
        self._limit_s = limit_s
        self._moves = moves or dict.fromkeys(graph.names(), ())

    async def run(self, idle: Collection[str] = ()) -> Stats:
        """Run every call once, except those of `idle` policies; return the statistics of all calls and `time/<call>_s`
        of each. Those of a further policy are named `policy/<name>/...`.

        Raises:
            ExecutionError: a call failed on a worker.
            Stalled: the ranks do not compute.
            In both cases calls under way are cancelled.
        """
        running: dict[asyncio.Task[Stats], Call] = {}

        def what() -> str:
            return ", ".join(f"call {call.name!r} (role {call.role!r})" for call in running.values())

        return await while_ranks_work(self._run_calls(idle, running), self._workers, self._limit_s, what)

    async def _run_calls(self, idle: Collection[str], running: dict[asyncio.Task[Stats], Call]) -> Stats:
        """Run the calls; `running` has those under way."""
        stats: Stats = {}
        done = {call.name for call in self._order if call.policy in idle}
        waiting = [call for call in self._order if call.policy not in idle]
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
        first, *_ = await self._on(self._placement[call.role], RunCall.of(call))
        for move in self._moves[call.name]:
            await self._on(sorted({*self._placement[move.source], *self._placement[move.target]}), move)
        # Functions reduce their statistics over all ranks, so every worker reports the same ones.
        took = {f"time/{call.name.removeprefix(f'{call.policy}/')}_s": time.perf_counter() - started}
        about = f"policy/{call.policy}/" if call.policy else ""
        return {about + name: value for name, value in {**first.stats, **took}.items()}

    async def _on(self, workers: Sequence[int], request: Request[R]) -> list[R]:
        # Tasks start in the order of their creation: all workers are sent this call before any is sent the next one.
        replies = [asyncio.ensure_future(self._send(worker, request)) for worker in workers]
        try:
            return await asyncio.gather(*replies)
        finally:
            for reply in replies:
                reply.cancel()

    async def _send(self, worker: int, request: Request[R]) -> R:
        try:
            return await self._workers[worker].call(request, timeout_s=math.inf)
        except Exception as error:
            what = f"{request}"
            if isinstance(request, RunCall):
                what = f"call {request.name!r} (function {request.function!r}, role {request.role!r})"
            raise ExecutionError(f"{what} on model_worker/{worker} failed: {error}") from error


def column_moves(graph: Graph, layouts: Mapping[str, Hashable]) -> dict[str, tuple[MoveColumns, ...]]:
    """Return for every call the moves of its columns to the roles in other layouts that read them, one move per layout.

    Args:
        layouts: the layout of every role of the graph; roles of equal layouts share their batch.
    """
    moves: dict[str, tuple[MoveColumns, ...]] = {}
    for call in graph.calls:
        wanted: dict[Hashable, tuple[str, dict[str, None]]] = {}
        for reader in graph.calls:
            keys = dict.fromkeys(key for key in call.writes if key in reader.reads and reader.policy == call.policy)
            if keys and layouts[reader.role] != layouts[call.role]:
                wanted.setdefault(layouts[reader.role], (reader.role, {}))[1].update(keys)
        moves[call.name] = tuple(
            MoveColumns(tuple(keys), call.role, role, call.policy) for role, keys in wanted.values()
        )
    return moves
