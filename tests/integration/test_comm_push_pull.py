from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import zmq

from asyncrl.api import Sample, Trajectory
from asyncrl.comm import push_pull, sockets
from asyncrl.comm.push_pull import (
    BATCH_BYTES,
    Accepted,
    PushTimeout,
    TrajectoryPuller,
    TrajectoryPusher,
    TrajectoryRejected,
    decode_reply,
    encode,
)
from asyncrl.comm.security import RunSecret, SocketSecurity
from asyncrl.comm.sockets import Frame
from asyncrl.comm.trajectory_codec import CodecError, encode_trajectories

HOST = "127.0.0.1"
PATIENCE_S = 60.0
BYTES_PER_TOKEN = 13
SECRET = RunSecret(b"s" * 32)


def make_trajectory(name: object, tokens: int = 5) -> Trajectory:
    array = np.arange(tokens, dtype=np.int32)
    sample = Sample(array, np.ones(tokens, np.uint8), -array.astype(np.float32), array, 1.0)
    return Trajectory(f"rollout-{name}", f"prompt-{name}", 0, (sample, sample))


def make_pusher(*addresses: str, security: SocketSecurity | None = None, **settings: float) -> TrajectoryPusher:
    """One that sends nothing again by itself because a machine is slow, unless it is told to."""
    settings = {"resend_after_s": 3600.0} | settings
    return TrajectoryPusher(addresses, security, identity="rollout_worker/0", **settings)  # type: ignore[arg-type]


class Puller(TrajectoryPuller):
    """A puller whose consumer keeps what it accepts, once `open` is set."""

    def __init__(self, security: SocketSecurity | None = None, host: str = HOST) -> None:
        self.accepted: queue.SimpleQueue[Trajectory] = queue.SimpleQueue()
        self.open = threading.Event()
        self.open.set()
        super().__init__(host, security, on_message=self._keep)

    def _keep(self, trajectory: Trajectory) -> None:
        assert self.open.wait(PATIENCE_S)
        self.accepted.put(trajectory)

    def fetch(self, count: int) -> list[str]:
        """Ids of the next `count` trajectories."""
        return [self.accepted.get(timeout=PATIENCE_S).rollout_id for _ in range(count)]


@pytest.fixture
def puller() -> Iterator[Puller]:
    with closing(Puller()) as puller:
        yield puller


@pytest.fixture
def silent() -> Iterator[zmq.Socket[bytes]]:
    """A puller's socket that a test answers by hand, or not."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.rcvtimeo = int(1000 * PATIENCE_S)
        socket.bind(f"tcp://{HOST}:*")
        yield socket


def endpoint(socket: zmq.Socket[bytes]) -> str:
    address = socket.last_endpoint
    assert isinstance(address, bytes)
    return address.decode()


@pytest.mark.parametrize("security", [None, SECRET.sockets()], ids=["plain", "curve"])
@pytest.mark.parametrize("tokens", [5, 200_000], ids=["small", "large"])
@pytest.mark.parametrize("host", [HOST, "::1"])
async def test_a_trajectory_arrives_whole_and_is_acknowledged(
    security: SocketSecurity | None, tokens: int, host: str
) -> None:
    with closing(Puller(security, host)) as puller:
        pusher = make_pusher(puller.endpoint, security=security)
        sent = make_trajectory(1, tokens)
        await pusher.push(sent, PATIENCE_S)
        assert pusher.unacked_ids == []
        received = puller.accepted.get(timeout=PATIENCE_S)
        assert received.rollout_id == sent.rollout_id
        np.testing.assert_array_equal(received.samples[1].tokens, sent.samples[1].tokens)
        assert await pusher.close(PATIENCE_S) == []


async def test_many_at_once_arrive_in_order_each_once(puller: Puller) -> None:
    pusher = make_pusher(puller.endpoint, high_water=50)
    sizes = [5, 50_000, 100, 2_000] * 50
    await asyncio.gather(*(pusher.push(make_trajectory(i, size), PATIENCE_S) for i, size in enumerate(sizes)))
    assert puller.fetch(len(sizes)) == [f"rollout-{i}" for i in range(len(sizes))]
    assert puller.counts["received"] == len(sizes)
    assert puller.counts["duplicate"] == 0
    await pusher.close(PATIENCE_S)


async def test_several_pushers_and_pullers_deliver_everything_once() -> None:
    pullers = [Puller() for _ in range(3)]
    pushers = [make_pusher(*(puller.endpoint for puller in pullers)) for _ in range(2)]
    await asyncio.gather(
        *(p.push(make_trajectory((i, j)), PATIENCE_S) for i, p in enumerate(pushers) for j in range(30))
    )
    counts = [puller.counts["received"] for puller in pullers]
    assert sum(counts) == 60
    ids = [name for puller, count in zip(pullers, counts, strict=True) for name in puller.fetch(count)]
    assert len(set(ids)) == 60
    for end in pullers:
        end.close()
    for pusher in pushers:
        await pusher.close(PATIENCE_S)


async def test_the_same_rollout_is_delivered_once_and_acknowledged_twice(puller: Puller) -> None:
    pusher = make_pusher(puller.endpoint)
    await pusher.push(make_trajectory("twin"), PATIENCE_S)
    await pusher.push(make_trajectory("twin"), PATIENCE_S)
    assert puller.counts["duplicate"] == 1
    assert puller.fetch(1) == ["rollout-twin"]
    assert puller.accepted.empty()
    await pusher.close(PATIENCE_S)


def test_every_message_is_acknowledged_to_a_sender_that_does_not_read(puller: Puller) -> None:
    count, frames = 20_000, encode_trajectories([make_trajectory("same")])
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvhwm = 1
        socket.rcvtimeo = int(1000 * PATIENCE_S)
        socket.connect(puller.endpoint)
        for seq in range(count):
            socket.send_multipart([encode([seq]), *frames])
        replies = [decode_reply(socket.recv()) for _ in range(count)]
    assert all(isinstance(reply, Accepted) for reply in replies)
    assert sorted(number for reply in replies for number in reply.numbers) == list(range(count))


async def test_closing_a_puller_acknowledges_what_it_has_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_CLOSE_LINGER_MS", int(1000 * PATIENCE_S))
    accepted = threading.Event()
    puller = TrajectoryPuller(HOST, None, on_message=lambda _: accepted.set())
    pusher = make_pusher(puller.endpoint)
    pushing = asyncio.create_task(pusher.push(make_trajectory(1), PATIENCE_S))
    assert await asyncio.to_thread(accepted.wait, PATIENCE_S)
    await asyncio.to_thread(puller.close)
    await pushing
    puller.close()
    await pusher.close(PATIENCE_S)


async def test_what_the_consumer_did_not_accept_comes_again() -> None:
    offered: queue.SimpleQueue[str] = queue.SimpleQueue()

    def accept(trajectory: Trajectory) -> None:
        offered.put(trajectory.rollout_id)
        if offered.qsize() == 1:
            raise RuntimeError("not now")

    with closing(TrajectoryPuller(HOST, None, on_message=accept)) as puller:
        pusher = make_pusher(puller.endpoint, resend_after_s=0.1)
        await pusher.push(make_trajectory(1), PATIENCE_S)
        assert offered.qsize() == 2
        assert (puller.counts["refused"], puller.counts["received"]) == (1, 1)
        await pusher.close(PATIENCE_S)


async def test_without_acknowledgement_a_trajectory_is_sent_again(silent: zmq.Socket[bytes]) -> None:
    pusher = make_pusher(endpoint(silent), resend_after_s=0.05)
    pushing = asyncio.create_task(pusher.push(make_trajectory(1), PATIENCE_S))
    first = await asyncio.to_thread(silent.recv_multipart)
    assert await asyncio.to_thread(silent.recv_multipart) == first
    assert pusher.unacked_ids == ["rollout-1"]
    silent.send_multipart([first[0], encode(Accepted([0]))])
    await pushing
    assert pusher.resent >= 1
    assert pusher.unacked_ids == []
    await pusher.close(PATIENCE_S)


async def test_a_lost_puller_hands_over_to_another_member(silent: zmq.Socket[bytes], puller: Puller) -> None:
    pusher = make_pusher(endpoint(silent))
    pushing = [asyncio.create_task(pusher.push(make_trajectory(i), PATIENCE_S)) for i in range(5)]
    await asyncio.to_thread(silent.recv_multipart)
    pusher.set_addresses([endpoint(silent), puller.endpoint])
    silent.close()
    await asyncio.gather(*pushing)
    assert sorted(puller.fetch(5)) == [f"rollout-{i}" for i in range(5)]
    await pusher.close(PATIENCE_S)


async def test_a_puller_that_is_no_longer_a_member_hands_over(silent: zmq.Socket[bytes], puller: Puller) -> None:
    pusher = make_pusher(endpoint(silent))
    pushing = asyncio.create_task(pusher.push(make_trajectory(1), PATIENCE_S))
    await asyncio.to_thread(silent.recv_multipart)
    pusher.set_addresses([puller.endpoint])
    await pushing
    assert puller.fetch(1) == ["rollout-1"]
    await pusher.close(PATIENCE_S)


async def test_a_pusher_may_start_before_its_pullers(puller: Puller) -> None:
    pusher = make_pusher()
    pushing = asyncio.create_task(pusher.push(make_trajectory(1), PATIENCE_S))
    await asyncio.sleep(0)
    pusher.set_addresses([puller.endpoint])
    await pushing
    await pusher.close(PATIENCE_S)


_PULLER_PROCESS = """
import sys
from asyncrl.comm.push_pull import TrajectoryPuller
def accept(trajectory):
    print(trajectory.rollout_id, flush=True)
    if sys.argv[1] == "stuck":
        sys.stdin.read()
puller = TrajectoryPuller("127.0.0.1", None, on_message=accept)
print(puller.endpoint, flush=True)
sys.stdin.read()
"""


def start_puller_process(mode: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PULLER_PROCESS, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


async def test_a_puller_killed_with_sigkill_loses_nothing() -> None:
    victim, address = start_puller_process("stuck")
    heir, heir_address = start_puller_process("accepting")
    with victim, heir:
        try:
            assert victim.stdout is not None
            assert heir.stdout is not None
            pusher = make_pusher(address)
            pushing = [asyncio.create_task(pusher.push(make_trajectory(i), PATIENCE_S)) for i in range(10)]
            assert await asyncio.to_thread(victim.stdout.readline) == "rollout-0\n"
            victim.kill()
            pusher.set_addresses([heir_address])
            await asyncio.gather(*pushing)
            arrived = {await asyncio.to_thread(heir.stdout.readline) for _ in range(10)}
            assert arrived == {f"rollout-{i}\n" for i in range(10)}
            await pusher.close(PATIENCE_S)
        finally:
            victim.kill()
            heir.kill()


async def test_a_consumer_without_room_and_a_full_outbox_hold_the_sender_back(puller: Puller) -> None:
    puller.open.clear()
    pusher = make_pusher(puller.endpoint, high_water=3)
    pushing = [asyncio.create_task(pusher.push(make_trajectory(i), PATIENCE_S)) for i in range(20)]
    await asyncio.sleep(0)
    with pytest.raises(PushTimeout, match=r"a slot among those held: 3 are held"):
        await pusher.push(make_trajectory("late"), 0.2)
    assert (puller.counts["received"], len(pusher.unacked_ids)) == (0, 3)
    puller.open.set()
    await asyncio.gather(*pushing)
    assert puller.fetch(20) == [f"rollout-{i}" for i in range(20)]
    await pusher.close(PATIENCE_S)


async def test_a_push_that_times_out_names_what_it_waited_for_and_is_still_delivered(silent: zmq.Socket[bytes]) -> None:
    pusher = make_pusher(endpoint(silent))
    with pytest.raises(PushTimeout, match=r"'rollout-1' of rollout_worker/0 .* acknowledgement"):
        await pusher.push(make_trajectory(1), 0.05)
    assert pusher.unacked_ids == ["rollout-1"]
    assert await pusher.close(0.0) == ["rollout-1"]


async def test_a_cancelled_push_is_still_delivered(puller: Puller) -> None:
    pusher = make_pusher()
    pushing = asyncio.create_task(pusher.push(make_trajectory(1), PATIENCE_S))
    await asyncio.sleep(0)
    pushing.cancel()
    pusher.set_addresses([puller.endpoint])
    assert await asyncio.to_thread(puller.fetch, 1) == ["rollout-1"]
    assert await pusher.close(PATIENCE_S) == []


async def test_a_push_cancelled_before_there_is_room_is_not_sent(puller: Puller) -> None:
    pusher = make_pusher(high_water=1)
    first, second, third = (asyncio.create_task(pusher.push(make_trajectory(i), PATIENCE_S)) for i in range(3))
    await asyncio.sleep(0)
    assert pusher.unacked_ids == ["rollout-0"]
    second.cancel()
    pusher.set_addresses([puller.endpoint])
    await asyncio.gather(first, third)
    assert puller.fetch(2) == ["rollout-0", "rollout-2"]
    assert puller.accepted.empty()
    assert await pusher.close(PATIENCE_S) == []


async def test_closing_fails_the_pushes_that_wait_and_refuses_further_ones(silent: zmq.Socket[bytes]) -> None:
    pusher = make_pusher(endpoint(silent), high_water=1)
    pushing = [asyncio.create_task(pusher.push(make_trajectory(i), PATIENCE_S)) for i in range(2)]
    await asyncio.to_thread(silent.recv_multipart)
    await pusher.close(0.0)
    for task in pushing:
        with pytest.raises(PushTimeout, match="closed"):
            await task
    with pytest.raises(PushTimeout, match="closed"):
        await pusher.push(make_trajectory(3), PATIENCE_S)


async def test_closing_waits_for_no_acknowledgement_that_cannot_come(silent: zmq.Socket[bytes]) -> None:
    pusher = make_pusher(endpoint(silent))
    pushing = asyncio.create_task(pusher.push(make_trajectory(1), PATIENCE_S))
    await asyncio.to_thread(silent.recv_multipart)
    async with asyncio.timeout(PATIENCE_S):
        closing = asyncio.create_task(pusher.close(math.inf))
        await asyncio.sleep(0)
        assert not closing.done()
        silent.close(linger=0)  # as training ranks that are stopped too
        assert await closing == ["rollout-1"]
        alone = make_pusher()
        asyncio.create_task(alone.push(make_trajectory(2), PATIENCE_S)).add_done_callback(lambda task: task.exception())
        await asyncio.sleep(0)
        assert await alone.close(math.inf) == ["rollout-2"]
    with pytest.raises(PushTimeout, match="closed"):
        await pushing


async def test_an_invalid_trajectory_raises_where_it_was_made(puller: Puller) -> None:
    pusher = make_pusher(puller.endpoint)
    with pytest.raises(CodecError, match="no samples"):
        await pusher.push(Trajectory("r", "p", 0, ()), PATIENCE_S)
    unsound = dataclasses.replace(make_trajectory(1).samples[0], tokens=np.full(5, -1, np.int32))
    bad, good = dataclasses.replace(make_trajectory("bad"), samples=(unsound,)), make_trajectory("good")
    delivered = asyncio.create_task(pusher.push(good, PATIENCE_S))
    with pytest.raises(TrajectoryRejected, match=r"'rollout-bad' was refused.*trajectory\.\w+ has -1"):
        await pusher.push(bad, PATIENCE_S)
    await delivered
    assert (puller.counts["malformed"], puller.counts["received"]) == (1, 1)
    assert await pusher.close(PATIENCE_S) == []


async def test_a_trajectory_over_the_pushers_limit_is_not_sent(puller: Puller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_pull, "MAX_BYTES", 1000)
    pusher = make_pusher(puller.endpoint)
    with pytest.raises(CodecError, match=r"'rollout-1' takes 1342 bytes, limit 1000"):
        await pusher.push(make_trajectory(1, 50), PATIENCE_S)
    assert await pusher.close(PATIENCE_S) == []


async def test_a_trajectory_over_the_pullers_limit_is_refused_and_the_rest_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 2 * BATCH_BYTES
    monkeypatch.setattr(push_pull, "MAX_MESSAGE_BYTES", limit)
    with closing(Puller()) as puller:
        pusher = make_pusher(puller.endpoint)
        names = ["large-1", "small-1", "large-2", "small-2"]
        large = limit * 3 // 4 // BYTES_PER_TOKEN  # tokens of each of its two samples
        trajectories = [make_trajectory(name, large if "large" in name else 5) for name in names]
        results = await asyncio.gather(*(pusher.push(t, PATIENCE_S) for t in trajectories), return_exceptions=True)
        assert [type(result) for result in results] == [TrajectoryRejected, type(None)] * 2
        assert f"limit of {limit}" in str(results[0])
        assert (puller.counts["malformed"], puller.counts["received"]) == (2, 2)
        assert len([record for record in caplog.records if "trajectory from" in record.getMessage()]) == 1
        await pusher.close(PATIENCE_S)


async def test_garbage_is_counted_logged_once_and_survived(puller: Puller, caplog: pytest.LogCaptureFixture) -> None:
    seq = encode([0])
    garbage: list[list[Frame]] = [
        [b""],
        [b"x" * 100],
        [seq],
        [seq, b"header"],
        [seq, b"a", b"b", b"c"],
        [seq * 2, *encoded_trajectory()],
        [encode([-1]), *encoded_trajectory()],
        [encode([0, 1]), *encoded_trajectory()],
    ]
    with caplog.at_level(logging.WARNING), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        socket.connect(puller.endpoint)
        for frames in garbage:
            socket.send_multipart(frames)
        pusher = make_pusher(puller.endpoint)
        while puller.counts["malformed"] < len(garbage):
            await pusher.push(make_trajectory(puller.counts["received"]), PATIENCE_S)
        await pusher.close(PATIENCE_S)
    assert len([record for record in caplog.records if "dropped" in record.getMessage()]) == 1


def encoded_trajectory() -> list[Frame]:
    return encode_trajectories([make_trajectory("unasked")])


async def test_an_address_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match="'nonsense'"):
        make_pusher("nonsense")
