"""Trajectories from RolloutWorkers to data-parallel heads, each acknowledged, over ZMQ.

    pusher ─▶ puller    [ Numbers, header, payload ]    trajectories of `trajectory_codec` and their numbers
    puller ─▶ pusher    [ Accepted | Refused ]          by the same connection

The puller acknowledges only what its consumer has accepted. So nothing is lost when a puller dies: the pusher still
holds every trajectory that was not consumed and sends it again, if necessary to another puller. Trajectories pushed at
about the same time share a message of up to BATCH_TRAJECTORIES and BATCH_BYTES, because most of the cost of a small one
is per message. A message of more than BATCH_BYTES holds a single trajectory, so that a refusal for size affects no
other. A pusher sends the next message without waiting for the acknowledgement.

Life of a pushed trajectory; `Outbox` decides what is sent where, without sockets or clocks:

    add ─▶ waiting ─take─▶ in flight ─acked─▶ forgotten
              ▲                │
              └─ expire / lost / untake / set_peers without its peer

If it is in flight for longer than `resend_after_s`, it waits again for the same peer: a slow peer must not cause a copy
at a second one. If its connection is lost or its peer leaves, it may go to any peer. New ones go to the peer with the
fewest in flight. Delivery is at least once: receivers drop duplicates by rollout id, and if two peers received the same
rollout, the MasterWorker keeps the first.

Memory is bounded at both ends. Once a pusher holds `high_water` trajectories, `push` waits. A puller whose consumer has
no room stops reading, which fills libzmq's buffers (also bounded) and then the pusher's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeAlias

import msgspec
import zmq

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm.ended_rollouts import AT_LEAST, RecentIds
from asyncrl.comm.security import SocketSecurity, SourceLog
from asyncrl.comm.sockets import Frame, PeerLink, PeerRouter, SocketThread, peer_address
from asyncrl.comm.trajectory_codec import CodecError, Prepared, decode_each, decode_typed, encode_prepared, prepare
from asyncrl.comm.typed import msgpack_decoder
from asyncrl.comm.waits import PATIENCE_S

_log = logging.getLogger(__name__)

BATCH_BYTES = 1 << 20  # of arrays in one message: above this size the cost per message is negligible
BATCH_TRAJECTORIES = 64  # in one message: a quarter of what a pusher holds by default, so that both ends have work
MAX_REASON = 500  # characters of a refusal's reason
MAX_BYTES = MAX_MESSAGE_BYTES = 256 << 20
"""Limits of one trajectory at its sender, and of a message at its receiver, in bytes: 20 million tokens."""
DEFAULT_RESEND_AFTER_S = 10.0
"""Longer than any pause of a healthy puller. A broken connection is noticed at once, so this does not delay it."""
_SOCKET_HIGH_WATER = 16  # batches in libzmq's own buffer per connection, at both ends; the outbox holds the rest
_REPLIES_HIGH_WATER = 100_000  # acknowledgements: more than any pusher has trajectories in flight, some 10 bytes each

Numbers: TypeAlias = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]


class Accepted(msgspec.Struct, tag="accepted", frozen=True):
    """The trajectories with these numbers were accepted. Duplicates get this reply again."""

    numbers: Numbers


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The trajectories with these numbers are invalid and must not be sent again."""

    numbers: Numbers
    reason: str


Reply: TypeAlias = Accepted | Refused
_NUMBERS = msgpack_decoder(Numbers)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgpack_decoder(Reply)


def encode(message: list[int] | Reply) -> bytes:
    """Return the frame of numbers or of a reply."""
    return msgspec.msgpack.encode(message)


def decode_numbers(frame: Frame) -> list[int]:
    """Return the numbers in the first frame of a pusher's message; raise CodecError if it is malformed."""
    return decode_typed(_NUMBERS, frame, "numbers of trajectories")


def decode_reply(frame: Frame) -> Reply:
    """Return a puller's reply; raise CodecError if it is none."""
    return decode_typed(_REPLY, frame, "reply")


# The sender, for an asyncio loop.


class TrajectoryRejected(Exception):
    """The puller refused the trajectory. It is invalid, or sender and receiver have different versions or limits."""


class PushTimeout(Exception):
    """No acknowledgement came within the time limit; the trajectory is kept and will be sent again."""


@dataclass(slots=True, eq=False)
class Push:
    """A pushed trajectory, and the call of `push` that waits for `accepted`.

    The call first waits for a slot in the outbox, unless there is one, and then, held there, for its acknowledgement.
    It ends at its time limit, but a held trajectory stays in the outbox and is delivered later.

    Attributes:
        seq: its number in the outbox; -1 before it has a slot there.
        peer: the peer that it was sent to or must go to; None: any.
    """

    rollout_id: str
    prepared: Prepared
    accepted: asyncio.Future[None]
    seq: int = -1
    peer: str | None = None
    sends: int = 0
    due: float = math.inf
    done: bool = False

    def settle(self, error: Exception | None) -> None:
        """Make the call return, or raise `error` from it, unless it has ended."""
        if self.accepted.done():
            return
        if error is None:
            self.accepted.set_result(None)
        else:
            self.accepted.set_exception(error)


class Outbox:
    """The unacknowledged trajectories and their states. Times are seconds of any monotonic clock."""

    def __init__(self, *, high_water: int, resend_after_s: float) -> None:
        self._high_water = high_water
        self._resend_after_s = resend_after_s
        self._in_flight_at: dict[str, int] = {}  # by peer
        self._entries: dict[int, Push] = {}
        self._waiting: deque[Push] = deque()
        self._in_flight: dict[int, Push] = {}  # in the order of sending, which is the order of due times
        self._next_seq = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        """True while `high_water` trajectories are unacknowledged."""
        return len(self._entries) >= self._high_water

    @property
    def entries(self) -> list[Push]:
        """The unacknowledged trajectories, oldest first."""
        return list(self._entries.values())

    @property
    def peers(self) -> list[str]:
        """The peers in use."""
        return list(self._in_flight_at)

    def add(self, entry: Push) -> None:
        """Keep a new trajectory, unless the outbox is `full`; it waits to be sent."""
        entry.seq = self._next_seq
        self._next_seq += 1
        self._entries[entry.seq] = entry
        self._waiting.append(entry)

    def take(self, writable: Collection[str], now: float) -> tuple[Push, str] | None:
        """Move the first waiting entry that a writable peer may take in flight; return both."""
        while self._waiting and self._waiting[0].done:
            self._waiting.popleft()
        if not writable:
            return None
        for position, entry in enumerate(self._waiting):
            if not entry.done and (entry.peer is None or entry.peer in writable):
                del self._waiting[position]
                peer = entry.peer or min(writable, key=self._in_flight_at.__getitem__)
                entry.peer, entry.due = peer, now + self._resend_after_s
                entry.sends += 1
                self._in_flight[entry.seq] = entry
                self._in_flight_at[peer] += 1
                return entry, peer
        return None

    def untake(self, entries: list[Push]) -> None:
        """Put `entries` back at the front of the waiting ones: the connection did not accept them."""
        for entry in entries:
            entry.sends -= 1
        self._wait_again(entries, keep_peer=False)

    def acked(self, seq: int) -> Push | None:
        """Forget entry `seq`, and return it; None if it was acknowledged before."""
        entry = self._entries.pop(seq, None)
        if entry is None:
            return None
        entry.done = True
        self._land(entry)
        return entry

    def expire(self, now: float) -> list[Push]:
        """Let overdue entries wait again, for the same peer; return them."""
        expired = []
        for entry in self._in_flight.values():
            if entry.due > now:
                break
            expired.append(entry)
        self._wait_again(expired, keep_peer=True)
        return expired

    def lost(self, peer: str) -> None:
        """Record that `peer`'s connection broke: entries in flight to it, or waiting for it, may go to any peer."""
        self._wait_again([entry for entry in self._in_flight.values() if entry.peer == peer], keep_peer=False)
        for entry in self._waiting:
            if entry.peer == peer:
                entry.peer = None

    def set_peers(self, peers: Iterable[str]) -> None:
        """Use these peers from now on. Entries of the others may go to any peer."""
        kept = {peer: self._in_flight_at.get(peer, 0) for peer in peers}
        for gone in [peer for peer in self._in_flight_at if peer not in kept]:
            self.lost(gone)
        self._in_flight_at = kept

    def next_due(self) -> float | None:
        """Return the time at which the next entry expires; None if nothing is in flight."""
        return next((entry.due for entry in self._in_flight.values()), None)

    def _wait_again(self, entries: list[Push], *, keep_peer: bool) -> None:
        for entry in reversed(entries):
            self._land(entry)
            if not keep_peer:
                entry.peer = None
            self._waiting.appendleft(entry)

    def _land(self, entry: Push) -> None:
        if self._in_flight.pop(entry.seq, None) is not None and entry.peer in self._in_flight_at:
            self._in_flight_at[entry.peer] -= 1


class Batch:
    """Trajectories that share one message."""

    def __init__(self) -> None:
        self.entries: list[Push] = []
        self._nbytes = 0

    def add(self, entry: Push) -> bool:
        """Add `entry` and return True, or return False if it does not fit. An empty batch takes any entry."""
        nbytes = self._nbytes + entry.prepared.nbytes
        if self.entries and (nbytes > BATCH_BYTES or len(self.entries) == BATCH_TRAJECTORIES):
            return False
        self.entries.append(entry)
        self._nbytes = nbytes
        return True

    def pack(self) -> list[Frame]:
        """Return the message that carries the entries."""
        numbers = encode([entry.seq for entry in self.entries])
        return [numbers, *encode_prepared([entry.prepared for entry in self.entries])]


class TrajectoryPusher:
    """Sends trajectories to the pullers at `addresses` and holds each until it is acknowledged.

    Create and use it in one running asyncio loop.

    Args:
        addresses: endpoints of the pullers; may be empty at first, see `set_addresses`.
        identity: name in logs and errors, e.g. `rollout_worker/0`.
        resend_after_s: seconds without acknowledgement after which a trajectory is sent again.
        high_water: trajectories held at most; further `push` calls wait.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        security: SocketSecurity | None,
        *,
        identity: str,
        resend_after_s: float = DEFAULT_RESEND_AFTER_S,
        high_water: int = 256,
    ) -> None:
        self._identity = identity
        self._outbox = Outbox(high_water=high_water, resend_after_s=resend_after_s)
        self._security = security
        self._links: dict[str, PeerLink] = {}  # by address
        self._log = SourceLog("reply")
        self._queued: deque[Push] = deque()  # calls that wait for a slot in the outbox
        self._resending: asyncio.TimerHandle | None = None
        self._drained = asyncio.Event()
        self._drained.set()
        self._closed = False
        self._pump_scheduled = False
        self.resent = 0
        """Number of sends in addition to each trajectory's first."""
        self.set_addresses(addresses)

    @property
    def unacked_ids(self) -> list[str]:
        """Rollout ids of the trajectories held, oldest first."""
        return [push.rollout_id for push in self._outbox.entries]

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Send to these pullers from now on. Trajectories in flight to other pullers are sent again to one of these.

        Raises:
            ValueError: an address is not an endpoint.
        """
        addresses = list(dict.fromkeys(addresses))
        for gone in [address for address in self._links if address not in addresses]:
            self._links.pop(gone).router.close()
        for address in addresses:
            if address not in self._links:
                router = PeerRouter(self._security, high_water=_SOCKET_HIGH_WATER)
                try:
                    self._links[address] = router.connect(
                        address,
                        on_writable=self._pump,
                        on_message=partial(self._on_message, address),
                        on_lost=partial(self._on_lost, address),
                    )
                except ValueError:
                    router.close()
                    raise
        self._outbox.set_peers(addresses)
        self._pump()

    async def push(self, trajectory: Trajectory, timeout_s: float = PATIENCE_S) -> None:
        """Send `trajectory` and return once a puller has accepted it.

        Once there is room for it, cancelling the call does not cancel the delivery.

        Raises:
            CodecError: it cannot be encoded; nothing was sent.
            TrajectoryRejected: the puller refused it, for the reason in the message; it is no longer held.
            PushTimeout: no acknowledgement, or no slot, within `timeout_s` seconds.
        """
        prepared = prepare(trajectory)
        if prepared.nbytes > MAX_BYTES:
            raise CodecError(f"trajectory {trajectory.rollout_id!r} takes {prepared.nbytes} bytes, limit {MAX_BYTES}")
        if self._closed:
            raise PushTimeout(f"{self._identity} was closed")
        loop = asyncio.get_running_loop()
        push = Push(trajectory.rollout_id, prepared, loop.create_future())
        self._queued.append(push)
        self._hold_queued()
        limit = loop.call_later(timeout_s, push.settle, TimeoutError())  # a fifth of the time of `asyncio.timeout`
        try:
            await push.accepted
        except TimeoutError as error:
            awaited = "a slot among those held" if push.seq < 0 else "an acknowledgement"
            with contextlib.suppress(ValueError):
                self._queued.remove(push)
            raise PushTimeout(
                f"trajectory {push.rollout_id!r} of {self._identity} waited too long for {awaited}: "
                f"{len(self._outbox)} are held, pullers {list(self._links)}, connected {self._writable}"
            ) from error
        finally:
            limit.cancel()

    async def close(self, timeout_s: float) -> list[str]:
        """Wait up to `timeout_s` seconds for acknowledgements, then close; return the ids never acknowledged.

        Without a connection to a puller it closes at once. Pushes that are still waiting raise PushTimeout.
        """
        if not self._closed:
            self._closed = True
            closed = PushTimeout(f"{self._identity} was closed")
            for push in self._queued:
                push.settle(closed)
            self._queued.clear()
            if not self._any_connected():
                self._drained.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._drained.wait()
            if self._outbox:
                _log.warning("%s closes with %d trajectories unacknowledged", self._identity, len(self._outbox))
            if self._resending is not None:
                self._resending.cancel()
            for push in self._outbox.entries:
                push.settle(closed)
            for link in self._links.values():
                link.router.close()
        return self.unacked_ids

    @property
    def _writable(self) -> list[str]:
        """The pullers whose connections accept a message now."""
        return [address for address, link in self._links.items() if link.writable]

    def _hold_queued(self) -> None:
        """Put queued trajectories whose call was not cancelled in the outbox, in order, as far as it has room."""
        while self._queued and not self._outbox.full:
            push = self._queued.popleft()
            if not push.accepted.done():
                self._outbox.add(push)
                self._drained.clear()
                self._pump_soon()

    def _pump_soon(self) -> None:
        """Send in the event loop's next turn, together with what other tasks push until then."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Send waiting trajectories for as long as the pullers' connections accept them."""
        self._pump_scheduled = False
        now = asyncio.get_running_loop().time()
        filling: dict[str, Batch] = {}  # by puller
        writable = self._writable
        while (taken := self._outbox.take(writable, now)) is not None:
            entry, address = taken
            batch = filling.get(address)
            if batch is None or not batch.add(entry):
                if batch is not None:
                    self._send(address, batch)  # if the puller accepts no more now, at most this entry is taken back
                    writable = self._writable
                filling[address] = batch = Batch()
                batch.add(entry)
        for address, batch in filling.items():
            self._send(address, batch)
        if self._resending is None and (due := self._outbox.next_due()) is not None:
            self._resending = asyncio.get_running_loop().call_at(due, self._resend)

    def _send(self, address: str, batch: Batch) -> None:
        link = self._links[address]
        if link.writable and link.send(batch.pack()):
            self.resent += sum(entry.sends > 1 for entry in batch.entries)
        else:
            self._outbox.untake(batch.entries)
        if not link.writable and self._writable:
            self._pump_soon()  # other pullers may accept these entries

    def _resend(self) -> None:
        """Send overdue trajectories again."""
        self._resending = None
        if expired := self._outbox.expire(asyncio.get_running_loop().time()):
            _log.warning(
                "%s: %d trajectories without acknowledgement, sending them again; the first is %r, at %s",
                self._identity, len(expired), expired[0].rollout_id, expired[0].peer,
            )  # fmt: skip
        self._pump()

    def _any_connected(self) -> bool:
        return any(link.connected for link in self._links.values())

    def _on_lost(self, address: str) -> None:
        self._outbox.lost(address)
        if self._closed and not self._any_connected():
            self._drained.set()
        self._pump()

    def _on_message(self, address: str, frames: list[memoryview]) -> None:
        try:
            reply = decode_reply(b"".join(frames))
        except CodecError as error:
            self._log.note(address, str(error))
            return
        for number in reply.numbers:
            if (push := self._outbox.acked(number)) is not None:
                refusal = None
                if isinstance(reply, Refused):
                    refusal = TrajectoryRejected(f"trajectory {push.rollout_id!r} was refused: {reply.reason}")
                push.settle(refusal)
        self._hold_queued()
        if not self._outbox:
            self._drained.set()


Groups = dict[str, tuple[str, ...]]
"""Pusher to its pullers, sorted."""


def group(pushers: Iterable[str], pullers: Iterable[str]) -> Groups:
    """Assign pushers to pullers, for any number of either; without pullers every pusher has none.

    The larger side is assigned to the smaller in turn. With at least as many pushers as pullers, every pusher has one
    puller, and the pullers' loads differ by at most one. With fewer, every puller has one pusher, and the pushers'
    shares differ by at most one. So no puller is left without data.

        group(["a", "b", "c"], ["P"])         {"a": ("P",), "b": ("P",), "c": ("P",)}
        group(["a", "b", "c"], ["P", "Q"])    {"a": ("P",), "b": ("Q",), "c": ("P",)}
        group(["a"], ["P", "Q"])              {"a": ("P", "Q")}

    The result depends only on the present members, so every pusher computes its own share and all agree. To keep more
    of the previous assignment when a member joins or leaves, the pushers would have to agree on that assignment. If two
    pushers saw the others arrive in different orders, a puller could be left without a pusher.
    """
    pushers, pullers = sorted(set(pushers)), sorted(set(pullers))
    if not pushers or not pullers:
        return dict.fromkeys(pushers, ())
    dealt: dict[str, list[str]] = {pusher: [] for pusher in pushers}
    for turn in range(max(len(pushers), len(pullers))):
        dealt[pushers[turn % len(pushers)]].append(pullers[turn % len(pullers)])
    return {pusher: tuple(targets) for pusher, targets in dealt.items()}


# The receiver. A background thread receives, so that the process may compute in its main thread.


class InvalidTrajectory(ValueError):
    """The consumer will never accept this trajectory; the message has the reason."""


class TrajectoryPuller:
    """Receives trajectories at `endpoint`, drops duplicates, acknowledges what its consumer has accepted.

    The consumer, `on_message(trajectory)`, is called in the puller's thread and accepts by returning; it may block for
    a while, which slows the senders. If it raises `InvalidTrajectory`, the trajectory is refused for good, and `push`
    raises the reason at its sender. If it raises anything else, the trajectory is sent again.

    Args:
        remembered: number of ids that are kept to recognize duplicates (`ids_remembered`).
        accepted: ids that an earlier process accepted and this one still has. If the acknowledgement was lost with that
            process, the sender repeats the trajectory.

    Attributes:
        counts: arrivals by what became of them, a message that cannot be decoded as one: `received` (accepted by the
            consumer), `duplicate` (acknowledged again), `malformed` (also: too large, or invalid for the consumer),
            `refused` (the consumer raised another error).
    """

    def __init__(
        self,
        bind_host: str,
        security: SocketSecurity | None,
        *,
        on_message: Callable[[Trajectory], None],
        remembered: int = AT_LEAST,
        accepted: Iterable[str] = (),
    ) -> None:
        self._consume = on_message
        self._seen: RecentIds[bool] = RecentIds(remembered)
        for rollout_id in accepted:
            self._seen.put(rollout_id, True)
        self.counts = Counter[str]()
        self._log = SourceLog("trajectory")
        # A message of up to twice the limit is read, counted and refused. For a larger one libzmq ends the connection.
        self._io = SocketThread(
            bind_host,
            security,
            self._on_message,
            name="trajectory-puller",
            requests_high_water=_SOCKET_HIGH_WATER,
            replies_high_water=_REPLIES_HIGH_WATER,
            max_frame_bytes=2 * MAX_MESSAGE_BYTES,
        )
        self.endpoint = self._io.endpoint
        self._io.start()

    @property
    def unauthenticated(self) -> int:
        """Connections that failed the handshake."""
        return self._io.unauthenticated

    def close(self) -> None:
        """Stop receiving. Accepted trajectories are acknowledged; the others stay with their senders."""
        self._io.close()

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        """Deliver one message and answer it at once: the sender prepares the next one while this end decodes."""
        sender, *message = frames
        for reply in self._deliver(message):
            self._io.send([sender.bytes, encode(reply)])

    def _deliver(self, frames: list[zmq.Frame]) -> list[Reply]:
        """Decode and deliver one message, which holds one or more trajectories; return the answers to its sender."""
        numbers: list[int] = []
        try:
            numbers = decode_numbers(frames[0].buffer)
            decoded = decode_each([frame.buffer for frame in frames[1:]], max_bytes=MAX_MESSAGE_BYTES)
            if len(decoded) != len(numbers):
                raise CodecError(f"message has {len(numbers)} numbers for {len(decoded)} trajectories")
        except CodecError as error:
            refusal = self._refused(frames, numbers, error)
            return [refusal] if numbers else []  # nothing to answer to a message without numbers
        accepted: list[int] = []
        replies: list[Reply] = []
        for number, trajectory in zip(numbers, decoded, strict=True):
            try:
                if isinstance(trajectory, CodecError):
                    raise trajectory
                if self._accept(trajectory):
                    accepted.append(number)
            except (CodecError, InvalidTrajectory) as error:
                replies.append(self._refused(frames, [number], error))
        return [*replies, Accepted(accepted)] if accepted else replies

    def _accept(self, trajectory: Trajectory) -> bool:
        """Deliver the trajectory unless it is a duplicate; return True if it must be acknowledged."""
        if trajectory.rollout_id in self._seen:
            self.counts["duplicate"] += 1
            return True
        try:
            self._consume(trajectory)
        except InvalidTrajectory:
            raise
        except Exception:
            self.counts["refused"] += 1
            _log.exception("trajectory %r was not accepted, it will be sent again", trajectory.rollout_id)
            return False
        self._seen.put(trajectory.rollout_id, True)
        self.counts["received"] += 1
        return True

    def _refused(self, frames: list[zmq.Frame], numbers: list[int], error: Exception) -> Refused:
        """Count these trajectories of a message, and return the reply that makes the sender drop them."""
        self.counts["malformed"] += 1
        self._log.note(peer_address(frames), str(error))
        return Refused(numbers, str(error)[:MAX_REASON])
