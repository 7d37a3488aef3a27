"""The sending end of push-pull, for an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm.push_pull.outbox import Outbox, OutboxEntry
from asyncrl.comm.push_pull.puller import (
    BATCH_BYTES,
    BATCH_TRAJECTORIES,
    DEFAULT_MAX_BYTES,
    Refused,
    decode_reply,
    encode,
)
from asyncrl.comm.security.peer_gate import SourceLog
from asyncrl.comm.security.run_secret import SocketSecurity
from asyncrl.comm.sockets import Context, Frame, PeerLink, PeerRouter
from asyncrl.comm.trajectory_codec import CodecError, Prepared, encode_prepared, prepare
from asyncrl.comm.waits.limits import PATIENCE_S

_log = logging.getLogger(__name__)

DEFAULT_RESEND_AFTER_S = 10.0
"""Longer than any pause of a healthy puller. A broken connection is noticed at once, so this does not delay it."""


_SOCKET_HIGH_WATER = 16  # batches in libzmq's own buffer per puller; the outbox holds the rest


class TrajectoryRejected(Exception):
    """The puller refused the trajectory. It is invalid, or sender and receiver have different versions or limits."""


class PushTimeout(Exception):
    """No acknowledgement came within the time limit; the trajectory is kept and will be sent again."""


@dataclass(slots=True)
class Push:
    """A call of `push` that waits until `deadline`, in seconds of the loop's clock.

    It first waits for a place in the outbox, unless there is one, and then, held there, for its acknowledgement. The
    call ends at its deadline, but a held trajectory stays in the outbox and is delivered later.
    """

    rollout_id: str
    prepared: Prepared
    deadline: float
    accepted: asyncio.Future[None]

    def settle(self, error: Exception | None) -> None:
        """Make the call return, or raise `error` from it, unless it has ended."""
        if self.accepted.done():
            return
        if error is None:
            self.accepted.set_result(None)
        else:
            self.accepted.set_exception(error)


class Batch:
    """Trajectories that share one message."""

    def __init__(self) -> None:
        self.entries: list[OutboxEntry[Push]] = []
        self._nbytes = 0

    def add(self, entry: OutboxEntry[Push]) -> bool:
        """Add `entry` and return True, or return False if it does not fit. An empty batch takes any entry."""
        nbytes = self._nbytes + entry.content.prepared.nbytes
        if self.entries and (nbytes > BATCH_BYTES or len(self.entries) == BATCH_TRAJECTORIES):
            return False
        self.entries.append(entry)
        self._nbytes = nbytes
        return True

    def pack(self) -> list[Frame]:
        """Return the message that carries the entries."""
        numbers = encode([entry.seq for entry in self.entries])
        return [numbers, *encode_prepared([entry.content.prepared for entry in self.entries])]


class _Alarm:
    """One timer that calls `act` at the earliest of the requested times. A timer per push would cost as much as
    sending.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf

    def by(self, due: float) -> None:
        """Call `act` at `due` at the latest, in seconds of the loop's clock."""
        if self._due > due:
            if self._timer is not None:
                self._timer.cancel()
            self._due = due
            self._timer = asyncio.get_running_loop().call_at(due, self._fire)

    def stop(self) -> None:
        """Never call `act` again."""
        if self._timer is not None:
            self._timer.cancel()
        self._due = -math.inf

    def _fire(self) -> None:
        self._timer, self._due = None, math.inf
        self._act()


class TrajectoryPusher:
    """Sends trajectories to the pullers at `addresses` and holds each until it is acknowledged.

    Create and use it in one running asyncio loop.

    Args:
        addresses: endpoints of the pullers; may be empty at first, see `set_addresses`.
        security: the run's keys, or None for plaintext.
        identity: name in logs and errors, e.g. `rollout_worker/0`.
        resend_after_s: seconds without acknowledgement after which a trajectory is sent again.
        high_water: trajectories held at most; further `push` calls wait.
        max_bytes: limit of one trajectory; the pullers' must not be smaller.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        security: SocketSecurity | None,
        *,
        identity: str,
        resend_after_s: float = DEFAULT_RESEND_AFTER_S,
        high_water: int = 256,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        self._identity = identity
        self._max_bytes = max_bytes
        self._outbox: Outbox[Push] = Outbox((), high_water=high_water, resend_after_s=resend_after_s)
        self._security, self._context = security, Context()
        self._links: dict[str, PeerLink] = {}  # by address
        self._writable: dict[str, PeerLink] = {}  # those that accept a message now
        self._log = SourceLog("reply")
        self._queued: deque[Push] = deque()  # calls that wait for a place in the outbox
        self._alarm = _Alarm(self._on_alarm)
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
        return self._outbox.labels

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Send to these pullers from now on. Trajectories in flight to other pullers are sent again to one of these.

        Raises:
            ValueError: an address is not an endpoint.
        """
        addresses = list(dict.fromkeys(addresses))
        for gone in [address for address in self._links if address not in addresses]:
            self._writable.pop(gone, None)
            self._links.pop(gone).router.close()
        for address in addresses:
            if address not in self._links:
                router = PeerRouter(self._security, high_water=_SOCKET_HIGH_WATER, context=self._context)
                try:
                    self._links[address] = router.connect(
                        address,
                        on_writable=partial(self._on_writable, address),
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
            PushTimeout: no acknowledgement, or no place, within `timeout_s` seconds.
        """
        prepared = prepare(trajectory)
        if prepared.nbytes > self._max_bytes:
            raise CodecError(
                f"trajectory {trajectory.rollout_id!r} takes {prepared.nbytes} bytes, limit {self._max_bytes}"
            )
        if self._closed:
            raise PushTimeout(f"{self._identity} was closed")
        loop = asyncio.get_running_loop()
        push = Push(trajectory.rollout_id, prepared, loop.time() + timeout_s, loop.create_future())
        self._queued.append(push)
        self._hold_queued()
        self._alarm.by(push.deadline)
        await push.accepted

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
            self._alarm.stop()
            for push in self._outbox.contents:
                push.settle(closed)
            self._writable.clear()
            for link in self._links.values():
                link.router.close()
            self._context.term()
        return self._outbox.labels

    def _hold_queued(self) -> None:
        """Put queued trajectories whose call was not cancelled in the outbox, in order, as far as it has room."""
        while self._queued and not self._outbox.full:
            push = self._queued.popleft()
            if not push.accepted.done():
                self._outbox.add(push.rollout_id, push)
                self._drained.clear()
                self._pump_soon()

    def _timeout(self, push: Push, awaited: str) -> PushTimeout:
        return PushTimeout(
            f"trajectory {push.rollout_id!r} of {self._identity} waited too long for {awaited}: "
            f"{len(self._outbox)} are held, pullers {list(self._links)}, connected {list(self._writable)}"
        )

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
        while (taken := self._outbox.take(self._writable, now)) is not None:
            entry, address = taken
            batch = filling.get(address)
            if batch is None or not batch.add(entry):
                if batch is not None:
                    self._send(address, batch)  # if the puller accepts no more now, at most this entry is taken back
                filling[address] = batch = Batch()
                batch.add(entry)
        for address, batch in filling.items():
            self._send(address, batch)
        if (due := self._outbox.next_due()) is not None:
            self._alarm.by(due)

    def _send(self, address: str, batch: Batch) -> None:
        link = self._links[address]
        if link.writable and link.send(batch.pack()):
            self.resent += sum(entry.sends > 1 for entry in batch.entries)
        else:
            self._outbox.untake(batch.entries)
        if not link.writable:
            self._writable.pop(address, None)
            if self._writable:
                self._pump_soon()  # other pullers may accept these entries

    def _on_alarm(self) -> None:
        """End expired pushes and send overdue trajectories again."""
        now = asyncio.get_running_loop().time()
        due = math.inf
        awaited = ((self._outbox.contents, "an acknowledgement"), (self._queued, "a place among those held"))
        for pushes, what in awaited:
            for push in pushes:
                if push.deadline <= now:
                    push.settle(self._timeout(push, what))
                elif not push.accepted.done():
                    due = min(due, push.deadline)
        self._queued = deque(push for push in self._queued if not push.accepted.done())
        if expired := self._outbox.expire(now):
            _log.warning(
                "%s: %d trajectories without acknowledgement, sending them again; the first is %r, at %s",
                self._identity, len(expired), expired[0].label, expired[0].peer,
            )  # fmt: skip
        self._pump()
        self._alarm.by(due)

    def _any_connected(self) -> bool:
        return any(link.connected for link in self._links.values())

    def _on_writable(self, address: str) -> None:
        self._writable[address] = self._links[address]
        self._pump()

    def _on_lost(self, address: str) -> None:
        self._writable.pop(address, None)
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
            if (entry := self._outbox.acked(number)) is not None:
                refusal = None
                if isinstance(reply, Refused):
                    refusal = TrajectoryRejected(f"trajectory {entry.label!r} was refused: {reply.reason}")
                entry.content.settle(refusal)
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
