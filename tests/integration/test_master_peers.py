"""How the master reaches the other processes, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.comm import names
from asyncrl.comm.codec import Message
from asyncrl.comm.name_resolve import make_resolver
from asyncrl.comm.name_resolve.errors import NameResolveTimeout
from asyncrl.comm.request_reply import RequestServer
from asyncrl.comm.request_reply.client import RemoteError, RequestClient
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.connections import Evaluators, NameBoard, WorkerClients, await_name, placement_of
from asyncrl.master.graph.builtin import grpo
from asyncrl.runtime.waiting import StopRequested, or_stop

LIMIT_S = 10.0


@contextmanager
def server(**immediate: Any) -> Iterator[RequestServer]:
    serving = RequestServer("127.0.0.1", None, immediate=immediate)
    try:
        yield serving
    finally:
        serving.close()


def share(rewards: list[float], version: int) -> Any:
    async def evaluate(request: Message) -> Message:
        assert request.meta["version"] == 5
        lengths = [len(rewards)] * len(rewards)
        meta = {"rewards": rewards, "lengths": lengths, "min_version": version, "max_version": version}
        return Message("evaluation", meta)

    return evaluate


async def test_an_evaluation_is_the_shares_of_all_rollout_workers() -> None:
    with (
        server(evaluate=share([1.0, 0.0], 5)) as first,
        server(evaluate=share([], 5)) as second,
        server(evaluate=share([1.0], 6)) as third,
    ):
        clients = WorkerClients([RequestClient(peer.endpoint, None) for peer in (first, second, third)])
        result = await Evaluators(clients).evaluate(5, LIMIT_S)
        clients.close()
    assert list(result.rewards) == [1.0, 0.0, 1.0]
    assert list(result.lengths) == [2, 2, 1]
    assert (result.min_version, result.max_version) == (5, 6)


async def test_a_late_reply_is_a_timeout_and_a_failure_tells_the_remote_one() -> None:
    async def never(request: Message) -> Message:
        await asyncio.Event().wait()
        return request

    async def broken(request: Message) -> Message:
        raise ValueError("no such rollout")

    with server(never=never, broken=broken) as peer:
        clients = WorkerClients([RequestClient(peer.endpoint, None, name="model_worker/0")])
        with pytest.raises(RemoteError, match="no such rollout"):
            await clients.request(0, "broken", {}, LIMIT_S)
        with pytest.raises(TimeoutError, match="model_worker/0"):
            await clients.request(0, "never", {}, 0.1)
        clients.close()


async def test_a_name_is_awaited_for_so_long_unless_the_run_stops() -> None:
    with make_resolver("memory", "test_master_peers") as resolver:
        stop = asyncio.Event()
        with pytest.raises(NameResolveTimeout, match=r"'gserver_manager'.*0\.05 s"):
            await await_name(resolver, "gserver_manager", 0.05, stop)
        waiting = asyncio.create_task(await_name(resolver, "gserver_manager", LIMIT_S, stop))
        resolver.add("gserver_manager", "http://here")
        assert await waiting == "http://here"
        stop.set()
        with pytest.raises(StopRequested):
            await await_name(resolver, "nobody", LIMIT_S, stop)


def test_announcements_are_what_the_readers_expect() -> None:
    with make_resolver("memory", "test_master_board") as resolver:
        board = NameBoard(resolver)
        board.announce_version(3, "/w/v3")
        board.announce_version(4, "/w/v4")
        board.announce_data_state(Path("/run/data_state.json"), 2)
        assert json.loads(resolver.get(names.model_version_key("actor"))) == {"version": 4, "path": "/w/v4"}
        assert json.loads(resolver.get(names.data_state_key())) == {"path": "/run/data_state.json", "epoch": 2}


def test_every_rank_hosts_a_shard_of_every_role() -> None:
    config = ExperimentConfig()
    config.algorithm.kl_coef = 0.1
    assert placement_of(grpo(config), 2) == {"ref": [0, 1], "actor": [0, 1]}


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
