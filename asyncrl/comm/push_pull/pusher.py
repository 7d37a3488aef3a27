"""The sending end of push-pull, for an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm.codec import CodecError
from asyncrl.comm.push_pull import messages
from asyncrl.comm.push_pull.outbox import Outbox, OutboxEntry
from asyncrl.comm.security.peer_gate import SourceLog
from asyncrl.comm.security.run_secret import SocketSecurity
from asyncrl.comm.sockets import Context, PeerLink
from asyncrl.comm.trajectory_codec import Prepared, prepare

_log = logging.getLogger(__name__)

DEFAULT_RESEND_AFTER_S = 10.0
"""Longer than any pause of a healthy puller. It does not delay anything when a connection breaks: that is noticed at
once."""
DEFAULT_PUSH_TIMEOUT_S = 600.0
_SOCKET_HIGH_WATER = 16  # batches in libzmq's own buffer per puller; the outbox holds the rest


class TrajectoryRejected(Exception):
    """The puller refused the trajectory: it is invalid, or the sender's version or limits differ from the
    receiver's.
    """


class PushTimeout(Exception):
    """No acknowledgement came within the time limit; the trajectory is kept and will be sent again."""


@dataclass(slots=True)
class _Push:
    """A call of `push` that waits until `deadline`, in seconds of the loop's clock."""

    rollout_id: str
    content: Prepared
    deadline: float
    accepted: asyncio.Future[None]


class TrajectoryPusher:
    """Sends trajectories to the pullers at `addresses` and holds each until it is acknowledged.

    Make and use it in one running asyncio loop.

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
        max_bytes: int = messages.DEFAULT_MAX_BYTES,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = Context()
        self._security = security
        self._identity = identity
        self._max_bytes = max_bytes
        self._outbox: Outbox[Prepared] = Outbox((), high_water=high_water, resend_after_s=resend_after_s)
        self._links: dict[str, PeerLink] = {}
        self._writable: dict[str, PeerLink] = {}
        self._pushes: dict[int, _Push] = {}  # those in the outbox, by its number
        self._waiting: deque[_Push] = deque()  # those without a place in it
        self._drained = asyncio.Event()
        self._drained.set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = math.inf
        self._log = SourceLog("reply")
        self._closed = False
        self._pump_scheduled = False
        self.resent = 0
        self.set_addresses(addresses)

    @property
    def unacked_ids(self) -> list[str]:
        """Rollout ids of the trajectories held, oldest first."""
        return self._outbox.labels

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Send to these pullers from now on; trajectories in flight to others are sent again to one of these."""
        addresses = list(dict.fromkeys(addresses))
        for gone in [address for address in self._links if address not in addresses]:
            self._writable.pop(gone, None)
            self._links.pop(gone).close()
        for address in addresses:
            if address not in self._links:
                self._links[address] = self._link(address)
        self._outbox.set_peers(addresses)
        self._pump()

    async def push(self, trajectory: Trajectory, timeout_s: float = DEFAULT_PUSH_TIMEOUT_S) -> None:
        """Send `trajectory` and return once a puller has accepted it.

        Once there is room for it, cancelling the call does not cancel the delivery.

        Raises:
            CodecError: it cannot be encoded; nothing was sent.
            TrajectoryRejected: the puller found it invalid; the message says why, and it is no longer held.
            PushTimeout: no acknowledgement, or no place, within `timeout_s` seconds.
        """
        prepared = prepare(trajectory)
        if prepared.nbytes > self._max_bytes:
            raise CodecError(
                f"trajectory {trajectory.rollout_id!r} takes {prepared.nbytes} bytes, limit {self._max_bytes}"
            )
        if self._closed:
            raise PushTimeout(f"{self._identity} was closed")
        deadline = self._loop.time() + timeout_s
        push = _Push(trajectory.rollout_id, prepared, deadline, self._loop.create_future())
        if self._waiting or self._outbox.full:
            self._waiting.append(push)
        else:
            self._hold(push)
        if self._timer_due > deadline:
            self._set_timer(deadline)
        await push.accepted

    async def close(self, timeout_s: float) -> list[str]:
        """Wait up to `timeout_s` seconds for acknowledgements, then close; return the ids never acknowledged.

        Without a connection to a puller it closes at once. Pushes that are still waiting raise PushTimeout.
        """
        if not self._closed:
            self._closed = True
            self._fail(self._waiting)
            self._waiting.clear()
            if self._is_alone:
                self._drained.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._drained.wait()
            if self._outbox:
                _log.warning("%s closes with %d trajectories unacknowledged", self._identity, len(self._outbox))
            if self._timer is not None:
                self._timer.cancel()
            self._writable.clear()
            for link in self._links.values():
                link.close()
            self._fail(self._pushes.values())
            self._context.term()
        return self._outbox.labels

    @property
    def _is_alone(self) -> bool:
        return not any(link.connected for link in self._links.values())

    def _fail(self, pushes: Iterable[_Push]) -> None:
        """Tell these that the pusher was closed."""
        for push in pushes:
            if not push.accepted.done():
                push.accepted.set_exception(PushTimeout(f"{self._identity} was closed"))

    def _hold(self, push: _Push) -> None:
        """Put the pushed trajectory in the outbox, which has room."""
        self._pushes[self._outbox.add(push.rollout_id, push.content).seq] = push
        self._drained.clear()
        self._pump_soon()

    def _timeout(self, rollout_id: str, awaited: str) -> PushTimeout:
        return PushTimeout(
            f"trajectory {rollout_id!r} of {self._identity} waited too long for {awaited}: "
            f"{len(self._outbox)} are held, pullers {list(self._links)}, connected {list(self._writable)}"
        )

    def _link(self, address: str) -> PeerLink:
        return PeerLink(
            self._context,
            address,
            self._security,
            high_water=_SOCKET_HIGH_WATER,
            on_writable=self._on_writable,
            on_message=self._on_reply,
            on_lost=self._on_lost,
        )

    def _pump_soon(self) -> None:
        """Send in the loop's next round, together with what other tasks push until then."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send waiting trajectories for as long as the pullers' connections accept them."""
        self._pump_scheduled = False
        now = self._loop.time()
        filling: dict[str, messages.Batch] = {}  # by puller
        while (taken := self._outbox.take(self._writable, now)) is not None:
            entry, address = taken
            batch = filling.get(address)
            if batch is None or not batch.add(entry):
                if batch is not None:
                    self._send(address, batch)  # if the puller now takes no more, at most this entry was taken in vain
                filling[address] = batch = messages.Batch()
                batch.add(entry)
        for address, batch in filling.items():
            self._send(address, batch)
        if (due := self._outbox.next_due()) is not None and self._timer_due > due:
            self._set_timer(due)

    def _send(self, address: str, batch: messages.Batch) -> None:
        link = self._links[address]
        if link.writable and link.send(messages.pack(batch.entries)):
            self.resent += sum(entry.sends > 1 for entry in batch.entries)
        else:
            self._outbox.untake(batch.entries)
        if not link.writable:
            self._writable.pop(address, None)
            if self._writable:
                self._pump_soon()  # others may take what this one did not

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        """End expired pushes and send overdue trajectories again: one timer, as one per push would cost as much as
        sending.
        """
        self._timer, self._timer_due = None, math.inf
        now = self._loop.time()
        due = self._give_up(self._pushes.values(), now, "an acknowledgement")
        due = min(due, self._give_up(self._waiting, now, "a place among those held"))
        self._waiting = deque(push for push in self._waiting if not push.accepted.done())
        if expired := self._outbox.expire(now):
            _log.warning(
                "%s: %d trajectories without acknowledgement, sending them again; the first is %r, at %s",
                self._identity, len(expired), expired[0].label, expired[0].peer,
            )  # fmt: skip
        self._pump()
        if due < self._timer_due:
            self._set_timer(due)

    def _give_up(self, pushes: Iterable[_Push], now: float, awaited: str) -> float:
        """End the pushes past their deadline; return the earliest deadline of the others."""
        due = math.inf
        for push in pushes:
            if push.accepted.done():
                continue
            if push.deadline <= now:
                push.accepted.set_exception(self._timeout(push.rollout_id, awaited))
            else:
                due = min(due, push.deadline)
        return due

    def _on_writable(self, link: PeerLink) -> None:
        self._writable[link.address] = link
        self._pump()

    def _on_lost(self, link: PeerLink) -> None:
        self._writable.pop(link.address, None)
        self._outbox.lost(link.address)
        if self._closed and self._is_alone:
            self._drained.set()
        self._pump()

    def _on_reply(self, link: PeerLink, frames: list[memoryview]) -> None:
        try:
            reply = messages.decode_reply(b"".join(frames))
        except CodecError as error:
            self._log.note(link.address, str(error))
            return
        for number in reply.numbers:
            if (entry := self._outbox.acked(number)) is not None:
                self._settle(entry, reply)
        while self._waiting and not self._outbox.full:
            push = self._waiting.popleft()
            if not push.accepted.done():
                self._hold(push)
        if not self._outbox:
            self._drained.set()

    def _settle(self, entry: OutboxEntry[Prepared], reply: messages.Reply) -> None:
        accepted = self._pushes.pop(entry.seq).accepted
        if not accepted.done():
            if isinstance(reply, messages.Refused):
                accepted.set_exception(TrajectoryRejected(f"trajectory {entry.label!r} was refused: {reply.reason}"))
            else:
                accepted.set_result(None)


Groups = dict[str, tuple[str, ...]]
"""Pusher to its pullers, sorted."""


def group(pushers: Iterable[str], pullers: Iterable[str]) -> Groups:
    """Assign pushers to pullers, for any number of either; without pullers every pusher has none.

    The larger side is dealt out over the smaller in turn. With at least as many pushers as pullers, every pusher has
    one puller, and the pullers' loads differ by at most one. With fewer, every puller has one pusher, and the pushers'
    shares differ by at most one. So no puller is left without data.

        group(["a", "b", "c"], ["P"])         {"a": ("P",), "b": ("P",), "c": ("P",)}
        group(["a", "b", "c"], ["P", "Q"])    {"a": ("P",), "b": ("Q",), "c": ("P",)}
        group(["a"], ["P", "Q"])              {"a": ("P", "Q")}

    The result depends only on the present members, so every pusher computes its own share and all agree. To keep more
    of the previous assignment when a member comes or goes, the pushers would have to agree on that assignment: two that
    saw the others arrive in different orders could leave a puller without any.
    """
    pushers, pullers = sorted(set(pushers)), sorted(set(pullers))
    if not pushers or not pullers:
        return dict.fromkeys(pushers, ())
    dealt: dict[str, list[str]] = {pusher: [] for pusher in pushers}
    for turn in range(max(len(pushers), len(pullers))):
        dealt[pushers[turn % len(pushers)]].append(pullers[turn % len(pullers)])
    return {pusher: tuple(targets) for pusher, targets in dealt.items()}
