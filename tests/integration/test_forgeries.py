"""Forgeries with the run's own keys: messages of valid form that no process of the run would send are refused and
counted, and nothing of them is kept."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import zmq
from aiohttp import web

from asyncrl.api import Sample, Trajectory
from asyncrl.comm.http_client import HttpRefused, HttpUnreachable, JsonHttp
from asyncrl.comm.http_server import HttpRoute, HttpServer, json_response
from asyncrl.comm.push_pull import InvalidTrajectory, TrajectoryPuller, TrajectoryPusher, TrajectoryRejected
from asyncrl.comm.request_reply import Done, RemoteError, Request, RequestClient, RequestServer, pack
from asyncrl.comm.security import HttpSecurity, RunSecret
from asyncrl.comm.sockets import Frame
from asyncrl.comm.trajectory_codec import encode_trajectories
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.messages import (
    ConsumedReport,
    DroppedRollout,
    FinishedRollout,
    ReceivedReport,
    ReceivedRollout,
    RunBegin,
    TrainedRollout,
)
from asyncrl.manager.process import manager_registry
from asyncrl.manager.service import ManagerHttp, ManagerService
from asyncrl.manager.settings import UpdateMode
from tests.trajectory_frames import taken_apart

ORDER = DataOrder(9, 0)

HOST, LIMIT_S = "127.0.0.1", 300.0
RUN = RunSecret(b"r" * 32).sockets()


def trajectory(name: str = "r", reward: float = 1.0) -> Trajectory:
    tokens = np.arange(4, dtype=np.int32)
    versions = np.zeros(4, np.int32)
    mask, rewards = np.array([0, 1, 1, 1], np.uint8), np.array([0, 0, 0.5, 0], np.float32)
    sample = Sample(
        *(tokens, mask, np.zeros(4, np.float32), versions, reward),
        token_rewards=rewards,
        reward_parts={"format": 1.0},
        metrics={"turns": 2.0},
    )
    return Trajectory(name, "p", 0, (sample,))


class Received:
    """A puller that keeps what is delivered; it will never take what is named `invalid`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.puller = TrajectoryPuller(HOST, RUN, on_message=self.take)

    def take(self, trajectory: Trajectory) -> None:
        if trajectory.rollout_id == "invalid":
            raise InvalidTrajectory("'invalid' is not for this run")
        self.names.append(trajectory.rollout_id)


@pytest.fixture
def received() -> Iterator[Received]:
    received = Received()
    with closing(received.puller):
        yield received


@pytest.fixture
def insider() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        RUN.secure_client(socket)
        yield socket


async def test_what_the_consumer_will_never_take_is_refused_for_good(received: Received) -> None:
    pusher = TrajectoryPusher([received.puller.endpoint], RUN, identity="rollout_worker/0", resend_after_s=3600.0)
    with pytest.raises(TrajectoryRejected, match="not for this run"):
        await pusher.push(trajectory("invalid"), LIMIT_S)
    await pusher.push(trajectory("sound"), LIMIT_S)
    assert await pusher.close(LIMIT_S) == []
    assert received.names == ["sound"]
    assert (received.puller.counts["malformed"], received.puller.counts["received"]) == (1, 1)


def forged_header(change: Any) -> list[Frame]:
    """A sound message whose header is changed."""
    message = taken_apart([trajectory("forged")])
    change(message.header)
    return message.frames()


def forged_array(name: str, index: int, value: float) -> list[Frame]:
    """A sound message with one value of a column replaced."""
    message = taken_apart([trajectory("forged")])
    message.columns[0][name][index] = value
    return message.frames()


def forged_size(name: str, size: int) -> list[Frame]:
    """A sound message in which a column has another size than its part of the payload."""
    message = taken_apart([trajectory("forged")])
    return message.frames([[size if each == name else len(own) for each, own in message.columns[0].items()]])


def entry(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["trajectories"][0]
    return found


FORGED: dict[str, Callable[[], list[Frame]]] = {
    "NaN log-probability": lambda: forged_array("behave_logprobs", 1, math.nan),
    "infinite reward": lambda: forged_array("rewards", 0, math.inf),
    "negative token": lambda: forged_array("tokens", 2, -7),
    "loss_mask of 2": lambda: forged_array("loss_mask", 0, 2),
    "version below -1": lambda: forged_array("versions", 0, -2),
    "longer than its tokens": lambda: forged_array("lengths", 0, 5),
    "length that overflows": lambda: forged_array("lengths", 0, (1 << 63) - 1),
    "negative length": lambda: forged_array("lengths", 0, -4),
    "more samples than there are": lambda: forged_size("lengths", 2),
    "a prompt that is not there": lambda: forged_size("prompts", 1),
    "negative episode": lambda: forged_array("episodes", 0, -1),
    "NaN reward of a turn": lambda: forged_array("token_rewards", 1, math.nan),
    "infinite reward of a turn": lambda: forged_array("token_rewards", 1, -math.inf),
    "rewarded prompt": lambda: forged_array("token_rewards", 0, 1.0),
    "rewards of turns that are not there": lambda: forged_size("token_rewards", 0),
    "rewards of turns of half of the tokens": lambda: forged_size("token_rewards", 1),
    "NaN reward part": lambda: forged_header(lambda content: entry(content)["reward_parts"].update(x=[math.nan])),
    "infinite metric": lambda: forged_header(lambda content: entry(content)["sample_metrics"].update(x=[math.inf])),
    "a reward part too many": lambda: forged_header(
        lambda content: entry(content)["reward_parts"].update(x=[1.0, 2.0])
    ),
    "a metric of no sample": lambda: forged_header(lambda content: entry(content)["sample_metrics"].update(x=[])),
    "a metric that is text": lambda: forged_header(lambda content: entry(content)["sample_metrics"].update(x=["1"])),
    "metrics without names": lambda: forged_header(lambda content: entry(content).update(sample_metrics=[1.0])),
    "empty id": lambda: forged_header(lambda content: entry(content).update(rollout_id="")),
    "long id": lambda: forged_header(lambda content: entry(content).update(rollout_id="r" * 300)),
    "order of a wrong type": lambda: forged_header(lambda content: entry(content).update(order="0")),
    "NaN metric": lambda: forged_header(lambda content: entry(content).update(metrics={"m": math.nan})),
    "another protocol": lambda: forged_header(lambda content: content.update(protocol=1)),
    "another magic": lambda: forged_header(lambda content: content.update(magic="other")),
    "an entry too many": lambda: forged_header(lambda content: content["trajectories"].append(entry(content))),
    "no payload": lambda: forged_header(lambda content: None)[:1],
}


async def test_forged_trajectories_are_refused_and_counted_and_none_is_delivered(
    received: Received, insider: zmq.Socket[bytes]
) -> None:
    insider.connect(received.puller.endpoint)
    insider.rcvtimeo = int(LIMIT_S * 1000)
    for number, (name, make) in enumerate(FORGED.items()):
        insider.send_multipart([msgspec.msgpack.encode([number]), *make()])
        reply = msgspec.msgpack.decode(await asyncio.to_thread(insider.recv))
        assert (reply["type"], reply["numbers"]) == ("refused", [number]), name
    for numbers in ([1, 2], [-1], [], ["a"], None):  # of one trajectory
        insider.send_multipart([msgspec.msgpack.encode(numbers), *encode_trajectories([trajectory("forged")])])
    insider.send_multipart([msgspec.msgpack.encode([99]), *encode_trajectories([trajectory("sound")])])
    reply = {"type": ""}
    while reply["type"] != "accepted":
        reply = msgspec.msgpack.decode(await asyncio.to_thread(insider.recv))
    assert reply["numbers"] == [99]
    assert received.names == ["sound"]
    assert received.puller.counts["malformed"] == len(FORGED) + 5


class Step(Request[Done], frozen=True):
    version: int


async def test_forged_calls_are_refused_and_counted_and_no_handler_sees_them(insider: zmq.Socket[bytes]) -> None:
    seen = []

    async def step(request: Step) -> Done:
        seen.append(request.version)
        return Done()

    with closing(RequestServer(HOST, RUN, immediate={Step: step})) as server:
        insider.connect(server.endpoint)
        sound = pack(7, "step", Step(3))
        bodies = [{}, {"version": "3"}, {"version": 3.5}, {"version": None}, {"version": 3, "more": 1}, [3], b"\xc1"]
        for body in bodies:
            insider.send_multipart([sound[0], body if isinstance(body, bytes) else msgspec.msgpack.encode(body)])
        for frames in (
            [b"", sound[1]],
            [sound[0]],
            [*sound, b"x"],
            pack(7, "exec", Step(3)),
            pack(7, "", Step(3)),
        ):
            insider.send_multipart(frames)
        client = RequestClient(server.endpoint, RUN)
        await client.call(Step(4), timeout_s=LIMIT_S)
        with pytest.raises(RemoteError, match="UnknownCall"):
            await client.call(Unserved(), timeout_s=LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            while server.malformed < len(bodies) + 6:  # noqa: ASYNC110 - there is no event for a refusal
                await asyncio.sleep(0.01)
        client.close()
    assert seen == [4]


class Unserved(Request[Done], frozen=True):
    pass


async def test_a_forged_report_to_the_manager_changes_nothing(http_security: HttpSecurity) -> None:
    service = ManagerService(
        batch_size=2, max_staleness=1, routing="least_requests", lease_s=30.0, order=DataOrder(9, 0)
    )
    service.begin(RunBegin())
    http = ManagerHttp(
        service.methods(),
        security=http_security,
        registry=manager_registry(service, FleetDecisions(UpdateMode.interrupt, 1.0)),
    )
    client = ManagerClient(await http.start(HOST), "rollout_worker/0", http_security, retry_s=LIMIT_S)
    await client.allocate(["a", "b"], timeout_s=LIMIT_S)
    client.finish([FinishedRollout("a", True)])
    await client.flush()
    assert (await client.call(ReceivedReport([ReceivedRollout("a", "e0-0", 0, 0, 4)]))).refused == []
    stepped = await client.call(ConsumedReport(1, [trained("a", 0)]))
    before = service.gate.counts()
    assert (before.submitted, before.trained, before.running) == (2, 1, 1)
    with pytest.raises(HttpRefused, match="cannot be trained yet"):
        await client.call(ConsumedReport(1_000_000, [trained("b", 1)]))
    again, unknown = ReceivedRollout("a", "e0-0", 0, 0, 4), ReceivedRollout("x", "e0-2", 2, 0, 4)
    assert (await client.call(ReceivedReport([again, unknown]))).refused == ["a", "x"]
    with pytest.raises(HttpRefused, match=r"\['a', 'x'\] do not count, 2 in all"):
        await client.call(ConsumedReport(2, [trained("a", 0), trained("x", 2)]))
    again_stepped = await client.call(ConsumedReport(1, [trained("b", 1)]))
    assert again_stepped == stepped, "the step is known: nothing is trained again"
    await client.call(ConsumedReport(1, [], [DroppedRollout("a", "stale"), DroppedRollout("y", "stale")]))
    client.finish([FinishedRollout("b", True)])
    with pytest.raises(HttpRefused, match="'a' was used before"):
        await client.allocate(["a"], timeout_s=0.0)
    await client.call(RunBegin(7, received=[unknown]))
    assert service.gate.counts() == before
    assert http.refused == {"malformed": 3}
    await client.close()
    await http.close()


def trained(rollout: str, order: int) -> TrainedRollout:
    return TrainedRollout(rollout, f"e0-{order}", order, {0: 4}, 1, 1, 1.0)


class Stranger:
    """Listens where a forged entry leads, and keeps what it is sent."""

    def __init__(self, tls: Any) -> None:
        async def keep(request: web.BaseRequest, body: bytes) -> web.Response:
            self.sent.append((request.headers.get("Authorization"), body))
            return json_response({"status": "ok"})

        self.sent: list[tuple[str | None, bytes]] = []
        self.http = HttpServer({"/call": HttpRoute(keep)}, token=None, tls=tls)


@pytest.mark.parametrize("proof", ["none", "another run's certificate", "adopted"])
async def test_a_server_that_does_not_prove_itself_is_sent_nothing(
    proof: str, http_security: HttpSecurity, tmp_path: Path
) -> None:
    other = RunSecret.create(tmp_path / "other").http()
    stranger = Stranger(other.server_context() if "certificate" in proof else None)
    url = await stranger.http.start(HOST)
    security = dataclasses.replace(http_security, adopted=frozenset({url})) if proof == "adopted" else http_security
    client = JsonHttp(security)
    if proof == "adopted":  # it is spoken to, and not sent the token
        await client.call("POST", f"{url}/call", {"a": 1}, timeout_s=LIMIT_S)
        assert stranger.sent == [(None, b'{"a":1}')]
        with pytest.raises(HttpUnreachable, match="not a server of this run"):
            await client.call("POST", f"{url}1/call", {"a": 1}, timeout_s=LIMIT_S)
    else:
        with pytest.raises(HttpUnreachable):
            await client.call("POST", f"{url}/call", {"a": 1}, timeout_s=LIMIT_S)
        assert stranger.sent == []
    await client.close()
    await stranger.http.close()


async def test_a_server_of_the_run_is_spoken_to_wherever_it_is(http_security: HttpSecurity) -> None:
    stranger = Stranger(http_security.server_context())
    url = await stranger.http.start(HOST)
    client = JsonHttp(http_security)
    await client.call("POST", f"{url}/call", timeout_s=LIMIT_S)
    await client.call("POST", f"{url.replace(HOST, 'localhost')}/call", timeout_s=LIMIT_S)
    assert {token for token, _ in stranger.sent} == {f"Bearer {http_security.token}"}
    await client.close()
    await stranger.http.close()


async def test_a_redirect_is_not_followed(http_security: HttpSecurity) -> None:
    async def elsewhere(request: web.BaseRequest, body: bytes) -> web.Response:
        return web.Response(status=307, headers={"Location": "http://127.0.0.1:9/"})

    server = HttpServer({"/call": HttpRoute(elsewhere)}, token=None, tls=http_security.server_context())
    url = await server.start(HOST)
    client = JsonHttp(http_security)
    with pytest.raises(HttpRefused, match="answered 307"):
        await client.call("POST", f"{url}/call", timeout_s=LIMIT_S)
    await client.close()
    await server.close()


async def test_the_token_alone_opens_no_connection_in_the_clear(http_security: HttpSecurity) -> None:
    server = Stranger(http_security.server_context())
    url = await server.http.start(HOST)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {http_security.token}"}) as session:
        with pytest.raises(aiohttp.ClientError):
            await session.post(url.replace("https", "http") + "/call")
    assert server.sent == []
    await server.http.close()
