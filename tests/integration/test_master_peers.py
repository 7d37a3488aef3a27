"""How the master reaches the other processes, over real sockets."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.comm import names
from asyncrl.comm.name_resolve import FileResolver
from asyncrl.comm.name_resolve.errors import NameResolveTimeout
from asyncrl.comm.request_reply import RequestClient, RequestServer
from asyncrl.comm.security import RunSecret
from asyncrl.comm.sockets import DESCRIPTORS_PER_LINK
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.connections import (
    NameBoard,
    NothingEvaluated,
    ReplaceableWorker,
    connect,
    context_of_peers,
    evaluate,
)
from asyncrl.master.graph.builtin import grpo
from asyncrl.rollout.messages import Evaluate, EvaluatedAnswer, EvaluationResult
from asyncrl.runtime.waiting import StopRequested, await_name, or_stop
from asyncrl.trainer.worker_grid import WorkerGrid

LIMIT_S = 10.0


@contextmanager
def rollout_worker(rows: list[int], version: int) -> Iterator[RequestServer]:
    async def share(request: Evaluate) -> EvaluationResult:
        assert (request.name, request.version) == ("hard", 5)
        return EvaluationResult(tuple(map(answered, rows)), 1, version, version)

    serving = RequestServer("127.0.0.1", None, immediate={Evaluate: share})
    try:
        yield serving
    finally:
        serving.close()


def answered(row: int) -> EvaluatedAnswer:
    return EvaluatedAnswer(row, float(row), None, 4, False)


async def test_an_evaluation_is_the_shares_of_all_rollout_workers() -> None:
    with rollout_worker([0, 3], 5) as first, rollout_worker([], 5) as second, rollout_worker([2], 6) as third:
        clients = [RequestClient(peer.endpoint, None) for peer in (first, second, third)]
        result = await evaluate(clients, "hard", 5, LIMIT_S)
        with pytest.raises(NothingEvaluated, match="none of the 1 rows of 'hard' was answered"):
            await evaluate(clients[1:2], "hard", 5, LIMIT_S)
        for client in clients:
            client.close()
    assert result == EvaluationResult(tuple(map(answered, (0, 2, 3))), 3, min_version=5, max_version=6)


@contextmanager
def soft_limit(descriptors: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_peers_share_threads_and_a_low_soft_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    peers, secret = 200, RunSecret.create(tmp_path / "secret").sockets()

    async def share(request: Evaluate) -> EvaluationResult:
        return EvaluationResult((answered(request.version),), 0, 0, 0)

    serving = RequestServer("127.0.0.1", secret, immediate={Evaluate: share})
    try:
        with soft_limit(256):
            threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
            context = context_of_peers(peers)
            clients = [RequestClient(serving.endpoint, secret, context=context) for _ in range(peers)]
            calls = [client.call(Evaluate("x", number), timeout_s=60.0) for number, client in enumerate(clients)]
            replies = await asyncio.gather(*calls)
            assert [reply.answers[0].row for reply in replies] == list(range(peers))
            assert len(os.listdir("/proc/self/task")) - threads <= 4
            of_the_server = peers
            taken = len(os.listdir("/proc/self/fd")) - files - of_the_server
            assert taken <= DESCRIPTORS_PER_LINK * peers + 16
            for client in clients:
                client.close()
            context.destroy(linger=0)
    finally:
        serving.close()


class Registered:
    """A worker that finds the others in a table."""

    security = None

    def __init__(self, endpoints: list[str]) -> None:
        self.resolver = None
        self._found = {
            names.worker_key(names.ROLLOUT_WORKER, index): names.WorkerAddress(endpoint, 1).encode()
            for index, endpoint in enumerate(endpoints)
        }

    async def registered(self, key: str) -> str:
        return self._found[key]


async def test_clients_of_a_kind_reach_each_of_its_workers_and_one_that_leaves_takes_no_other_along() -> None:
    with rollout_worker([0], 5) as first, rollout_worker([1], 5) as second:
        context = context_of_peers(2)
        found: Any = Registered([first.endpoint, second.endpoint])
        clients = await connect(found, names.ROLLOUT_WORKER, 2, context)
        assert (await evaluate(clients, "hard", 5, LIMIT_S)).answers == tuple(map(answered, (0, 1)))
        clients[0].close()
        assert (await evaluate(clients[1:], "hard", 5, LIMIT_S)).answers == (answered(1),)
        context.destroy(linger=0)


def test_too_few_open_files_are_refused_with_how_many_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.master.connections.allow_descriptors", lambda: 1024)
    with pytest.raises(OSError, match=r"1256 other processes take 5152 open files and the hard limit is 1024"):
        context_of_peers(1256)
    context_of_peers(200).destroy()


async def test_an_evaluation_whose_worker_dies_is_asked_of_its_successor(tmp_path: Path) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def never(request: Evaluate) -> EvaluationResult:
        loop.call_soon_threadsafe(asked.set)
        return await asyncio.Event().wait()  # type: ignore[return-value]

    key = names.worker_key(names.ROLLOUT_WORKER, 0)
    dies = RequestServer("127.0.0.1", None, immediate={Evaluate: never})
    with FileResolver(str(tmp_path)) as resolver, rollout_worker([1], 5) as successor:
        worker = ReplaceableWorker(resolver, key, names.WorkerAddress(dies.endpoint, 1).encode(), None)
        evaluation = asyncio.create_task(evaluate([worker], "hard", 5, LIMIT_S))
        await asked.wait()
        dies.close()
        resolver.add(key, names.WorkerAddress(successor.endpoint, 2).encode())
        assert [answer.row for answer in (await evaluation).answers] == [1]
        worker.close()


async def test_a_name_is_awaited_for_so_long_unless_the_run_stops(tmp_path: Path) -> None:
    with FileResolver(str(tmp_path)) as resolver:
        stop = asyncio.Event()
        with pytest.raises(NameResolveTimeout, match=r"'gserver_manager'.*0\.05 s"):
            await await_name(resolver, "gserver_manager", 0.05, stop)
        waiting = asyncio.create_task(await_name(resolver, "gserver_manager", LIMIT_S, stop))
        resolver.add("gserver_manager", "http://here")
        assert await waiting == "http://here"
        stop.set()
        with pytest.raises(StopRequested):
            await await_name(resolver, "nobody", LIMIT_S, stop)


def test_announcements_are_what_the_readers_expect(tmp_path: Path) -> None:
    with FileResolver(str(tmp_path)) as resolver:
        board = NameBoard(resolver)
        assert board.announced_version() == 0
        board.announce_version(3, "/w/v3")
        board.announce_version(4, "/w/v4")
        assert board.announced_version() == 4
        board.announce_data_state(Path("/run/data_state.json"), {"failed": 2})
        published = names.PublishedVersion.decode(resolver.get(names.model_version_key("actor")))
        assert (published.version, published.path) == (4, "/w/v4")
        state = names.DataState.decode(resolver.get(names.DATA_STATE_KEY))
        assert (state.path, state.dropped) == ("/run/data_state.json", {"failed": 2})


def placed(grid: WorkerGrid) -> tuple[dict[str, list[int]], tuple[int, ...]]:
    config = ExperimentConfig()
    config.algorithm.kl_coef = 0.1
    routes = grid.routing_table(grpo(config).roles())
    return routes.placement, routes.data_workers


def test_every_rank_hosts_a_shard_of_every_role_and_the_heads_take_in_trajectories() -> None:
    assert placed(WorkerGrid(data=2)) == ({"ref": [0, 1], "actor": [0, 1]}, (0, 1))
    assert placed(WorkerGrid(data=2, tensor=2)) == ({"ref": [0, 1, 2, 3], "actor": [0, 1, 2, 3]}, (0, 2))


async def test_what_has_ended_counts_though_a_stop_came_too() -> None:
    stop = asyncio.Event()
    stop.set()

    async def at_once() -> int:
        return 7

    assert await or_stop(at_once(), stop, LIMIT_S) == 7
    with pytest.raises(StopRequested):
        await or_stop(asyncio.Event().wait(), stop, LIMIT_S)
    with pytest.raises(TimeoutError):
        await or_stop(asyncio.Event().wait(), asyncio.Event(), 0.01)
