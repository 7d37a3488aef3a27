"""A step on the ModelWorkers: the plan of its minibatches and ranks, and the run of its graph.

Plan
----
**Minibatches** depend only on (seed, version, pass) and the rewards. So runs with different numbers of ranks take the
same optimizer steps. Groups in data order are permuted by `default_rng([seed, version])`, in later passes over the
batch by `default_rng([seed, version, pass])`; those whose rewards differ come first, and all are dealt to the
minibatches in turn. So the minibatches' numbers of groups with a signal differ by at most one.

**Ranks.** Within a minibatch the groups are dealt so that token counts are nearly equal, as the slowest rank sets the
pace: longest first, each to the rank with the fewest tokens among those with room. Every rank gets the same number of
groups (one more for some if they do not divide). Each of these shares goes to the rank that already holds most of its
tokens, so that few are moved. The tokens counted are those that ranks compute: if they share prefixes, a prefix of
several samples of a group counts once. For n groups over R ranks that is O(n log n + R^2), the R^2 in numpy alone. The
shares wait in a heap. Only pairs of rank and share that overlap are visited one by one, n at most.

With several passes a group stays on one rank, in whatever minibatch a pass puts it. So a rank cannot have the same
number of groups of every minibatch. Groups are dealt longest first, each to the rank that has the fewest tokens in the
group's minibatches. So all ranks have nearly as many tokens in each minibatch.

**Requests.** Each rollout goes from the data head that received it to one copy of every grid of roles. A rank receives
only its own part: the destinations of its rollouts (`BeginStep.leaving`), and for each of its grids the rollouts of its
copy, with their senders (`GridShare`). So its work grows with its share of the batch, not with the batch. For n
rollouts, g grids and R ranks the plan takes O(n g^2 + R g).

Shapes: G groups of the batch, M groups of a minibatch, R ranks and shares.

Run
---
A call may start once its predecessors are done, so independent calls overlap if their roles are on different workers. A
worker serves its calls one after the other, in the order of arrival.

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
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.comm.request_reply import R, Request, RequestClient
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.data.sample_buffer import TrainBatch
from asyncrl.master.graph import Call, Graph
from asyncrl.master.peers import while_ranks_work
from asyncrl.trainer.messages import BeginStep, GridShare, MoveColumns, RolloutRecord, RunCall
from asyncrl.trainer.parallel.placement import Placement


@dataclass(frozen=True, slots=True)
class Dealing:
    """Division of a step's batch: `minibatches` in each of `passes`, shuffled by the run's `seed`.

    `policies`: trained beside the run's own, each with a division of its own.
    """

    minibatches: int
    passes: int = 1
    seed: int = 0
    policies: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: ExperimentConfig) -> Dealing:
        """Return the division that `config` sets."""
        trainer = config.trainer
        return cls(trainer.ppo_minibatches, trainer.ppo_epochs, config.seed, config.trained_policies)

    @property
    def optimizer_steps(self) -> int:
        """Number of minibatches in all passes."""
        return self.minibatches * self.passes


def plan_batch(batch: TrainBatch, placement: Placement, dealing: Dealing) -> list[BeginStep]:
    """Return the request to each ModelWorker, by index: `batch` dealt to the copies of every grid."""
    cuts = [assign(batch.records, grid.data, dealing, batch.version) for grid in placement.distinct]
    version, oldest, steps = batch.version, batch.min_version, dealing.optimizer_steps
    return plan_step(cuts, placement, version=version, min_version=oldest, minibatches=steps)


def plan_step(
    cuts: Sequence[Sequence[Assignment]],
    placement: Placement,
    *,
    version: int,
    min_version: int,
    minibatches: int,
) -> list[BeginStep]:
    """Return the request to each ModelWorker, by index.

    Args:
        cuts: for each grid of `placement.distinct`, how the batch is dealt to its copies, all in the same order.
        minibatches: number in all passes.
    """
    grids, (received, *_) = placement.distinct, cuts
    copies = {grid: grid.data_heads for grid in grids}  # each look at it would make it anew
    sources = [copies[grids[0]][entry.src] for entry in received]
    heads = [[workers[entry.dst] for entry in cut] for workers, cut in zip(copies.values(), cuts, strict=True)]
    leaving = _by_worker(sources)
    shares = {
        (grid, worker): GridShare(
            tuple(received[row].rollout_id for row in rows),
            tuple(received[row].minibatches for row in rows),
            tuple(sources[row] for row in rows),
            tuple(tuple(of_grid[row] for row in rows) for of_grid in heads),
        )
        for grid, of_grid in zip(grids, heads, strict=True)
        for worker, rows in _by_worker(of_grid, copies[grid]).items()
    }
    return [
        BeginStep(
            version=version,
            min_version=min_version,
            num_minibatches=minibatches,
            leaving=tuple(received[row].rollout_id for row in leaving.get(worker, ())),
            targets=tuple(tuple(of_grid[row] for row in leaving.get(worker, ())) for of_grid in heads),
            shares=tuple(
                shares[grid, copies[grid][grid.coordinates(worker).data]] if worker in grid.members else None
                for grid in grids
            ),
        )
        for worker in range(placement.workers)
    ]


def _by_worker(workers: Sequence[int], known: Sequence[int] = ()) -> dict[int, list[int]]:
    """Return the rows of each worker, ascending; workers in `known` always have an entry."""
    rows: dict[int, list[int]] = {worker: [] for worker in known}
    for row, worker in enumerate(workers):
        rows.setdefault(worker, []).append(row)
    return rows


Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Rollout `rollout_id` moves from the actor's data index `src` to `dst` and is trained in `minibatches`.

    Minibatches are numbered over all passes, then over those of each further policy; the rollout is in one of each
    pass.
    """

    rollout_id: str
    src: int
    dst: int
    minibatches: tuple[int, ...]


def minibatches_of_groups(signals: Sequence[bool], dealing: Dealing, version: int) -> Ints:
    """Return the minibatch [G, passes] of each group in data order, given `RolloutRecord.has_signal` of each.

    `dealing.minibatches` divides G. The minibatches of a pass are numbered after those of the previous pass.
    """
    signal_G = np.array(signals, dtype=np.bool_)
    assigned = np.empty((len(signal_G), dealing.passes), dtype=np.int64)
    for number in range(dealing.passes):
        key = [dealing.seed, version, number] if number else [dealing.seed, version]
        permuted = np.random.default_rng(key).permutation(len(signal_G))
        dealt = permuted[np.argsort(~signal_G[permuted], kind="stable")]
        first = number * dealing.minibatches
        assigned[dealt, number] = first + np.arange(len(signal_G)) % dealing.minibatches
    return assigned


def assign(records: Sequence[RolloutRecord], ranks: int, dealing: Dealing, version: int) -> list[Assignment]:
    """Deal the batch `records` (in data order) to `ranks` ranks; the result is in the same order. Deterministic.

    Ranks are chosen by the minibatches of the run's own policy.
    """
    minibatches_GE, *of_others = (
        minibatches_of_groups([record.has_signal_of(policy, dealing.policies) for record in records], dealing, version)
        for policy in ("", *dealing.policies)
    )
    tokens_G = np.array([record.computed_tokens for record in records], dtype=np.int64)
    heads_G = np.array([record.head for record in records], dtype=np.int64)
    if dealing.passes > 1:
        share_G = _shares_of_all_passes(tokens_G, minibatches_GE, dealing.optimizer_steps, ranks)
        destination_G = _nearest_ranks(tokens_G, heads_G, share_G, ranks)[share_G]
    else:
        destination_G = np.empty(len(records), dtype=np.int64)
        for part in range(dealing.minibatches):
            members_M = np.flatnonzero(minibatches_GE[:, 0] == part)
            share_M = _balanced_shares(tokens_G[members_M], ranks)
            destination_G[members_M] = _nearest_ranks(tokens_G[members_M], heads_G[members_M], share_M, ranks)[share_M]
    dealt = np.concatenate([minibatches_GE, *of_others], axis=1).tolist()
    return [
        Assignment(record.rollout_id, record.head, destination, tuple(minibatches))
        for record, destination, minibatches in zip(records, destination_G.tolist(), dealt, strict=True)
    ]


def _shares_of_all_passes(tokens_G: Ints, minibatches_GE: Ints, minibatches: int, ranks: int) -> Ints:
    """Return the share [G] of each group: longest first, to the share with the fewest tokens in its minibatches."""
    held = np.zeros((ranks, minibatches), dtype=np.int64)
    share_G = np.empty(len(tokens_G), dtype=np.int64)
    for group in np.argsort(-tokens_G, kind="stable").tolist():
        theirs = minibatches_GE[group]
        share = share_G[group] = int(held[:, theirs].sum(1).argmin())
        held[share, theirs] += tokens_G[group]
    return share_G


def _balanced_shares(tokens_M: Ints, ranks: int) -> Ints:
    """Return the share [M] of each group: shares differ by one group at most, and their sums are nearly equal."""
    small, larger_left = divmod(len(tokens_M), ranks)
    full = small + 1 if larger_left else small
    sizes, share_of = [0] * ranks, [0] * len(tokens_M)
    # An entry is sum * ranks + share: the smallest is the share with the fewest tokens, of several the first.
    waiting, steps = list(range(ranks)), (tokens_M * ranks).tolist()
    for group in np.argsort(-tokens_M, kind="stable").tolist():
        entry = waiting[0]
        share = entry % ranks
        share_of[group] = share
        sizes[share] += 1
        if sizes[share] < full:
            heapreplace(waiting, entry + steps[group])
            continue
        heappop(waiting)
        larger_left -= 1
        if not larger_left:  # nobody else has room for one more
            full = small
            waiting = [entry for entry in waiting if sizes[entry % ranks] < full]
            heapify(waiting)
    return np.array(share_of, dtype=np.int64)


def _nearest_ranks(tokens_M: Ints, heads_M: Ints, share_M: Ints, ranks: int) -> Ints:
    """Return a rank [R] for each share, greedily by the overlap in tokens of rank and share, largest first."""
    overlaps = np.zeros(ranks * ranks, dtype=np.int64)  # by rank * ranks + share
    dealt_M = heads_M < ranks  # what others hold must be moved anyway
    np.add.at(overlaps, (heads_M * ranks + share_M)[dealt_M], tokens_M[dealt_M])
    pairs = np.flatnonzero(overlaps)
    rank_of = np.full(ranks, -1, dtype=np.int64)
    free = np.ones(ranks, dtype=np.bool_)
    pairs = pairs[np.argsort(-overlaps[pairs], kind="stable")]
    for rank, share in zip((pairs // ranks).tolist(), (pairs % ranks).tolist(), strict=True):
        if free[rank] and rank_of[share] < 0:
            rank_of[share] = rank
            free[rank] = False
    rank_of[rank_of < 0] = np.flatnonzero(free)
    return rank_of


Stats = dict[str, Any]


class ExecutionError(RuntimeError):
    """A call failed; the message names the call, its role and the worker."""


class Executor:
    """Executes `graph`, step after step.

    Args:
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
