"""Connections of the master to the other processes, over real sockets."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import zmq

from asyncrl.comm import names
from asyncrl.comm.name_files import FileResolver
from asyncrl.comm.request_reply import PeerGone, RequestClient, RequestServer, decode, encode
from asyncrl.comm.security import RunSecret, SocketSecurity
from asyncrl.comm.sockets import DESCRIPTORS_PER_CONNECTION, PeerRouter
from asyncrl.master.peers import (
    NameBoard,
    ReplaceableWorker,
    connect,
    router_of_peers,
)
from asyncrl.master.policy_versions import NothingEvaluated, evaluate
from asyncrl.rollout.messages import Evaluate, EvaluatedAnswer, EvaluationResult
from asyncrl.runtime.process.starting import NotStarted
from asyncrl.runtime.process.waiting import StopRequested, await_name, or_stop

LIMIT_S = 300.0
LIMIT_MS = 60_000
ELSEWHERE = "127.0.0.3"
"""An address at which nobody else binds, so that a port which is left can be taken again."""


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


def addresses(port: int) -> Iterator[str]:
    """Addresses of what listens at `port` of every interface: Linux has all of 127.0.0.0/8."""
    for high, low in product(range(8), range(1, 251)):
        yield f"tcp://127.0.{high}.{low}:{port}"


async def test_hundreds_of_peers_share_a_socket_and_a_low_soft_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    peers, secret = 300, RunSecret.create(tmp_path / "secret").sockets()

    async def share(request: Evaluate) -> EvaluationResult:
        return EvaluationResult((answered(request.version),), 0, 0, 0)

    serving = RequestServer("0.0.0.0", secret, immediate={Evaluate: share})
    try:
        with soft_limit(max(map(int, os.listdir("/proc/self/fd"))) + 64):
            threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
            router = router_of_peers(Registered([], secret), peers)
            at = addresses(int(serving.endpoint.rpartition(":")[2]))
            clients = [RequestClient(next(at), router) for _ in range(peers)]
            calls = [client.call(Evaluate("x", number), timeout_s=60.0) for number, client in enumerate(clients)]
            replies = await asyncio.gather(*calls)
            assert [reply.answers[0].row for reply in replies] == list(range(peers))
            assert len(os.listdir("/proc/self/task")) - threads <= 4
            of_the_server = peers
            taken = len(os.listdir("/proc/self/fd")) - files - of_the_server
            assert taken <= DESCRIPTORS_PER_CONNECTION * peers + 16
            for client in clients:
                client.close()
            router.close()
    finally:
        serving.close()


class Registered:
    """A worker that finds the others in a table."""

    def __init__(self, endpoints: list[str], security: SocketSecurity | None = None) -> None:
        self.resolver, self.security = None, security
        self._found = {
            names.worker_key(names.ROLLOUT_WORKER, index): names.WorkerAddress(endpoint, 1).encode()
            for index, endpoint in enumerate(endpoints)
        }

    async def registered(self, key: str, kind: str) -> str:
        return self._found[key]


async def test_clients_of_a_kind_reach_each_of_its_workers_and_one_that_leaves_takes_no_other_along() -> None:
    with rollout_worker([0], 5) as first, rollout_worker([1], 5) as second:
        router = PeerRouter(None)
        clients = await connect(Registered([first.endpoint, second.endpoint]), names.ROLLOUT_WORKER, 2, router)
        assert (await evaluate(clients, "hard", 5, LIMIT_S)).answers == tuple(map(answered, (0, 1)))
        clients[0].close()
        assert (await evaluate(clients[1:], "hard", 5, LIMIT_S)).answers == (answered(1),)
        router.close()


async def test_a_peer_that_dies_ends_its_own_calls_alone_and_at_its_address_another_is_found() -> None:
    router = PeerRouter(None)
    dies, lives = Holding(ELSEWHERE), Holding("127.0.0.1")
    first, second = (RequestClient(each.server.endpoint, router) for each in (dies, lives))
    calls = [asyncio.ensure_future(each.call(Evaluate("x", 0), timeout_s=60.0)) for each in (first, second)]
    await asyncio.gather(dies.asked.wait(), lives.asked.wait())
    port = dies.server.endpoint.rpartition(":")[2]
    dies.server.close()
    with pytest.raises(PeerGone, match="the connection broke"):
        await calls[0]
    dies.answer.set()
    lives.answer.set()
    assert (await calls[1]).answers == (answered(0),)
    # The successor at its address: the same call is made again, over a connection of its own.
    context = zmq.Context()
    successor = context.socket(zmq.ROUTER)
    successor.bind(f"tcp://{ELSEWHERE}:{port}")
    again = asyncio.ensure_future(first.call(Evaluate("x", 7), timeout_s=60.0))
    assert await asyncio.to_thread(successor.poll, LIMIT_MS)
    sender, number, body = successor.recv_multipart()
    assert decode(memoryview(body), Evaluate) == Evaluate("x", 7)
    successor.send_multipart([sender, number, encode(EvaluationResult((answered(7),), 0, 0, 0))])
    assert (await again).answers == (answered(7),)
    successor.close(linger=0)
    context.term()
    for each in (first, second, router, lives.server):
        each.close()


async def test_calls_that_are_not_sent_wait_for_a_peer_to_come_and_those_given_up_are_never_sent() -> None:
    router, context = PeerRouter(None), zmq.Context()
    late, taken = context.socket(zmq.ROUTER), socket.socket()
    taken.bind((ELSEWHERE, 0))  # and does not listen
    address = f"tcp://{ELSEWHERE}:{taken.getsockname()[1]}"
    client = RequestClient(address, router)
    with pytest.raises(PeerGone, match=r"no connection within 0\.1 s"):
        await client.call(Evaluate("given up", 0), timeout_s=0.1)
    waiting = asyncio.ensure_future(client.call(Evaluate("waits", 1), timeout_s=60.0))
    await asyncio.sleep(0)
    taken.close()
    late.bind(address)
    assert await asyncio.to_thread(late.poll, LIMIT_MS)
    sender, number, body = late.recv_multipart()
    assert decode(memoryview(body), Evaluate) == Evaluate("waits", 1)
    late.send_multipart([sender, number, encode(EvaluationResult((), 0, 1, 1))])
    assert (await waiting).min_version == 1
    client.close()
    router.close()
    late.close(linger=0)
    context.term()


async def test_one_address_has_one_client_of_a_router() -> None:
    router = PeerRouter(None)
    with rollout_worker([0], 5) as worker:
        client = RequestClient(worker.endpoint, router)
        with pytest.raises(ValueError, match=r"has a connection: close it first"):
            RequestClient(worker.endpoint, router)
        client.close()
        with pytest.raises(
            ValueError,
            match=r"address 'localhost:80' is not an endpoint: use tcp://<IP "
            r"address>:<port>",
        ):
            RequestClient("localhost:80", router)
        again = RequestClient(worker.endpoint, router)
        assert (await again.call(Evaluate("hard", 5), timeout_s=LIMIT_S)).answers == (answered(0),)
        again.close()
    router.close()


class Holding:
    """A worker that holds its answers until it may give them."""

    def __init__(self, host: str) -> None:
        loop, self.asked, self.answer = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        async def share(request: Evaluate) -> EvaluationResult:
            loop.call_soon_threadsafe(self.asked.set)
            await asyncio.to_thread(self.answer.wait, LIMIT_S)
            return EvaluationResult((answered(request.version),), 0, 0, 0)

        self.server = RequestServer(host, None, immediate={Evaluate: share})


def test_too_few_open_files_are_refused_with_how_many_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (256, 1024))
    monkeypatch.setattr("resource.setrlimit", lambda kind, limits: None)
    refused = r"1256 other processes take 1384 open files and the hard limit is 1024: raise it.*\(ulimit -Hn 1384\)"
    with pytest.raises(OSError, match=refused):
        router_of_peers(Registered([]), 1256)


async def test_an_evaluation_whose_worker_dies_is_asked_of_its_successor(tmp_path: Path) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def never(request: Evaluate) -> EvaluationResult:
        loop.call_soon_threadsafe(asked.set)
        return await asyncio.Event().wait()  # type: ignore[return-value]

    key = names.worker_key(names.ROLLOUT_WORKER, 0)
    dies = RequestServer("127.0.0.1", None, immediate={Evaluate: never})
    with FileResolver(str(tmp_path)) as resolver, rollout_worker([1], 5) as successor:
        router = PeerRouter(None)
        worker = ReplaceableWorker(resolver, key, names.WorkerAddress(dies.endpoint, 1).encode(), router)
        evaluation = asyncio.create_task(evaluate([worker], "hard", 5, LIMIT_S))
        await asked.wait()
        dies.close()
        resolver.add(key, names.WorkerAddress(successor.endpoint, 2).encode())
        assert [answer.row for answer in (await evaluation).answers] == [1]
        worker.close()
        router.close()


async def test_a_name_is_awaited_until_its_limit_unless_the_run_stops(tmp_path: Path) -> None:
    def over() -> None:
        raise NotStarted("its limit is over")

    with FileResolver(str(tmp_path)) as resolver:
        stop = asyncio.Event()
        with pytest.raises(NotStarted):
            await await_name(resolver, "gserver_manager", over, stop)
        resolver.add("gserver_manager", "http://here")
        assert await await_name(resolver, "gserver_manager", over, stop) == "http://here"
        waiting = asyncio.create_task(await_name(resolver, "nobody", stop.set, stop))
        with pytest.raises(StopRequested):
            await waiting


def test_no_step_can_come_while_all_that_make_rollouts_are_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_at_first(resolver: FileResolver) -> Iterator[dict[str, dict[str, str]]]:
        """No entries; then they are as they are put below."""
        while not resolver._closing.wait(0.01):
            yield {subtree.root: {} for subtree in resolver._subtrees() if not subtree.await_first(0.0)}

    monkeypatch.setattr(FileResolver, "_snapshots", only_at_first)
    with FileResolver(str(tmp_path)) as resolver:
        board = NameBoard(resolver)
        assert not board.producers_start(), "as where kept samples are trained on"
        servers, workers = (
            resolver.follow(f"{names.STATUSES}/{kind}") for kind in (names.GENERATION_SERVER, names.ROLLOUT_WORKER)
        )
        ready, loading = (names.WorkerStatus(state, 1).encode() for state in ("ready", "starting"))
        for server, worker, starts in ((loading, ready, True), (ready, loading, True), (ready, ready, False)):
            servers.replace({names.status_key(names.GENERATION_SERVER, 0): server})
            workers.replace({names.status_key(names.ROLLOUT_WORKER, 0): worker})
            assert board.producers_start() is starts
        servers.replace(servers.entries() | {names.status_key(names.GENERATION_SERVER, 1): loading})
        assert not board.producers_start(), "one server is enough"


def test_announcements_are_what_the_readers_expect(tmp_path: Path) -> None:
    with FileResolver(str(tmp_path)) as resolver:
        board = NameBoard(resolver)
        assert board.announced_version() == 0
        board.announce_version(3, "/w/v3")
        board.announce_version(4, "/w/v4")
        assert board.announced_version() == 4
        published = names.PublishedVersion.decode(resolver.get(names.model_version_key("actor")))
        assert (published.version, published.path) == (4, "/w/v4")


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
