"""Weights from the trainer's memory to servers: what is held, the connections, and the manager's side of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.comm import names
from asyncrl.comm.http_client import JsonHttp
from asyncrl.comm.name_resolve import make_resolver
from asyncrl.comm.request_reply import Done, RequestServer
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.client import GenerationServerClient, UpdateFailed
from asyncrl.manager.fleet.fleet_runner import ServerUpdater
from asyncrl.manager.fleet.servers import BeginUpdate, Target
from asyncrl.trainer.client import PublisherClient
from asyncrl.trainer.messages import AskPulse, RankPulse, SendWeights
from asyncrl.weights.transports import from_memory
from asyncrl.weights.transports.from_memory import (
    AskPublisher,
    MemoryTrainerEnd,
    ServerConnection,
    TensorTransport,
)

from ..late_stream import LateStream

LIMIT_S = 300.0


def trainer_end(transport: TensorTransport) -> MemoryTrainerEnd:
    return transport.trainer_end(ExperimentConfig(), None, torch.device("cpu"))


def test_a_held_version_is_a_copy_and_is_forgotten_when_nobody_wants_it() -> None:
    held, weight = trainer_end(TensorTransport("tensor")), torch.ones(2)
    for version in (1, 2, 3):
        held.hold(version, [("w", weight)])
        weight += 1
    ((name, kept),) = held.held(2).ready()
    assert (name, kept.tolist()) == ("w", [2.0, 2.0])
    held.keep([3, 7])
    with pytest.raises(LookupError, match=r"v2 is not held in memory \(held: \[3\]\)"):
        held.held(2)
    assert kept.tolist() == [2.0, 2.0]  # what a send under way has of it


def test_a_version_is_held_beside_training_and_copied_before_its_tensors_change() -> None:
    end, stream, weight = trainer_end(TensorTransport("tensor")), LateStream(), torch.empty(2)
    end._copies = stream.copies()
    end.hold(1, ((name, weight.fill_(value)) for name, value in (("a", 1.0), ("b", 2.0))))  # gathered into one buffer
    weight.fill_(7.0)
    assert [(name, kept.tolist()) for name, kept in end.held(1).ready()] == [("a", [1.0] * 2), ("b", [2.0] * 2)]
    assert "device" in stream.waits


class Connection(ServerConnection):
    """Notes what happens to it; a send waits for `gate`, and fails where told to."""

    made: list[Connection]
    gate: asyncio.Event
    begun: asyncio.Queue[str]
    broken = False

    def __init__(self, url: str) -> None:
        super().__init__(url, JsonHttp(None), timeout_s=LIMIT_S)
        self.url = url
        self.events: list[str] = []
        self.made.append(self)

    async def open(self) -> None:
        self.events.append("open")

    async def close(self) -> None:
        self.events.append("close")

    async def send(self, tensors: Any, version: int, *, keep_cache: bool = False) -> None:
        self.events.append(f"send {version}")
        self.begun.put_nowait(self.url)
        await self.gate.wait()
        if self.broken:
            raise UpdateFailed("connection reset")

    async def _send_bucket(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError


class Connections(TensorTransport):
    """Makes `Connection`s."""

    def connection(self, config: Any, url: str, *_: Any) -> Connection:  # type: ignore[override]
        return Connection(url)


@pytest.fixture
async def sender() -> AsyncIterator[MemoryTrainerEnd]:
    """A sender of versions 1 and 2 over `Connection`s."""
    Connection.made, Connection.gate, Connection.broken = [], asyncio.Event(), False
    Connection.begun = asyncio.Queue()
    Connection.gate.set()
    sender = trainer_end(Connections("tensor"))
    for version in (1, 2):
        sender.hold(version, [("w", torch.ones(1))])
    yield sender
    await sender.close()
    assert all(connection.events[-1] == "close" for connection in Connection.made)


async def test_a_connection_is_opened_once_and_serves_every_version(sender: MemoryTrainerEnd) -> None:
    for version in (1, 2):
        await sender.send(SendWeights(0, "http://a", version, False, LIMIT_S))
    (connection,) = Connection.made
    assert connection.events == ["open", "send 1", "send 2"]


async def test_a_server_at_a_new_address_gets_a_new_connection(sender: MemoryTrainerEnd) -> None:
    await sender.send(SendWeights(0, "http://a", 1, False, LIMIT_S))
    await sender.send(SendWeights(0, "http://b", 1, False, LIMIT_S))
    await asyncio.sleep(0)
    assert [(c.url, c.events) for c in Connection.made] == [
        ("http://a", ["open", "send 1", "close"]),
        ("http://b", ["open", "send 1"]),
    ]


async def test_a_connection_that_failed_is_made_anew(sender: MemoryTrainerEnd) -> None:
    Connection.broken = True
    with pytest.raises(UpdateFailed, match="connection reset"):
        await sender.send(SendWeights(0, "http://a", 1, False, LIMIT_S))
    Connection.broken = False
    await sender.send(SendWeights(0, "http://a", 1, False, LIMIT_S))
    assert [connection.events[0] for connection in Connection.made] == ["open", "open"]


async def test_a_slow_server_holds_no_other_and_its_next_send_waits(sender: MemoryTrainerEnd) -> None:
    Connection.gate.clear()
    slow = asyncio.create_task(sender.send(SendWeights(0, "http://a", 1, False, LIMIT_S)))
    again = asyncio.create_task(sender.send(SendWeights(0, "http://a", 2, False, LIMIT_S)))
    other = asyncio.create_task(sender.send(SendWeights(1, "http://b", 1, False, LIMIT_S)))
    async with asyncio.timeout(LIMIT_S):
        assert {await Connection.begun.get() for _ in range(2)} == {"http://a", "http://b"}
    assert Connection.made[0].events == ["open", "send 1"]
    assert Connection.made[1].events == ["open", "send 1"]
    Connection.gate.set()
    await asyncio.gather(slow, again, other)
    assert Connection.made[0].events == ["open", "send 1", "send 2"]


class Trainer:
    """ModelWorker 0 as the manager sees it: a fake server's weights change when it is told to send."""

    def __init__(self, server: Any, folder: Path) -> None:
        self.server = server
        self.calls: list[SendWeights] = []
        self.refuse = False
        self.asked = 0
        self.done_after = 0
        """Number of questions for signs of life before it has sent."""
        self.requests = RequestServer("127.0.0.1", None, immediate={SendWeights: self.send, AskPulse: self.pulse})
        self.resolver = make_resolver("file", str(folder))
        address = names.WorkerAddress(self.requests.endpoint, 1).encode()
        self.resolver.add(names.worker_key("model_worker", 0), address)

    async def send(self, request: SendWeights) -> Done:
        self.calls.append(request)
        if self.refuse:
            raise LookupError("v1 is not held in memory (held: [2])")
        assert self.server.paused
        while self.asked < self.done_after:  # noqa: ASYNC110 - it stands for work
            await asyncio.sleep(0.01)
        self.server.version = str(request.version)
        return Done()

    async def pulse(self, request: AskPulse) -> RankPulse:
        self.asked += 1
        return RankPulse()

    def close(self) -> None:
        self.requests.close()
        self.resolver.close()


async def test_the_manager_has_the_trainer_send_to_a_paused_server(start_fake_server: Any, tmp_path: Path) -> None:
    server = await start_fake_server()
    trainer = Trainer(server, tmp_path)
    publisher, http = PublisherClient(trainer.resolver, None, 0), JsonHttp(None)
    updater = ServerUpdater(http, AskPublisher(publisher), timeout_s=LIMIT_S)
    order = BeginUpdate(3, server.url, 1, Target(1, "/announced/v1"), pause="in_place")
    await updater.update(order)
    assert trainer.calls == [SendWeights(3, server.url, 1, keep_cache=True, timeout_s=LIMIT_S)]
    assert (server.version, server.paused) == ("1", False)
    assert "update_weights_from_disk" not in server.calls

    trainer.refuse = True
    with pytest.raises(UpdateFailed, match=r"could not send v1 .* LookupError: v1 is not held"):
        await updater.update(order)
    assert server.paused, "its weights are unknown"

    trainer.resolver.delete(names.worker_key("model_worker", 0))
    with pytest.raises(UpdateFailed, match="did not send v1"):
        await updater.update(order)
    publisher.close()
    await http.close()
    trainer.close()


async def test_a_trainer_that_sends_for_longer_than_the_limit_shows_signs_of_life(
    start_fake_server: Any, tmp_path: Path
) -> None:
    server = await start_fake_server()
    trainer = Trainer(server, tmp_path)
    publisher, http = PublisherClient(trainer.resolver, None, 0), JsonHttp(None)
    order, signs = BeginUpdate(3, server.url, 1, Target(1, "/announced/v1"), pause="in_place"), list[int]()
    trainer.done_after = 6  # asked at most every quarter of the limit
    await ServerUpdater(http, AskPublisher(publisher), timeout_s=1.0).update(order, sending=lambda: signs.append(1))
    assert (server.version, len(signs)) == ("1", 6)
    publisher.close()
    await http.close()
    trainer.close()


async def test_a_server_that_was_sent_to_but_names_another_version_has_failed(
    start_fake_server: Any, tmp_path: Path
) -> None:
    server = await start_fake_server()
    trainer = Trainer(server, tmp_path)
    server.model_info_version = "0"
    publisher, http = PublisherClient(trainer.resolver, None, 0), JsonHttp(None)
    client = GenerationServerClient(http, server.url)
    await client.pause("abort")
    with pytest.raises(UpdateFailed, match="sent version 1 but names 0"):
        await AskPublisher(publisher).bring(client, SendWeights(0, server.url, 1, False, LIMIT_S), "", lambda: None)
    publisher.close()
    await http.close()
    trainer.close()


def test_a_full_shared_memory_is_told_with_the_transport_that_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(from_memory.ForkingPickler, "dump", full)
    with pytest.raises(OSError, match=r"/dev/shm has no room .* or set manager.weight_transport=disk"):
        from_memory._shared_handle([("weight", torch.ones(2))])
