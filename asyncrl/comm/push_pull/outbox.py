"""The sender's unacknowledged entries: a pure state machine, without sockets or clocks.

Life of an entry:

    add ─▶ waiting ─take─▶ in flight ─acked─▶ forgotten
              ▲                │
              └─ expire / lost / untake / set_peers without its peer

An entry is kept until it is acknowledged. If it is in flight for longer than `resend_after_s`, it waits again for the
same peer: a slow peer must not cause a copy at a second one. If its connection is lost or its peer leaves, it may go to
any peer. At most `high_water` entries are kept, which bounds the sender's memory. New entries go to the peer with the
fewest in flight. Delivery is at least once. Receivers drop duplicates by rollout id. If two peers received the same
rollout, the MasterWorker keeps the first.

Example: peers A and B, `resend_after_s` 5. At t=0 entries 1, 2, 3 go to A, B, A. B acknowledges 2. At t=3 A's
connection is lost: 1 and 3 wait, and go to B. Had A stayed silent instead, they would go to A again at t=5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class OutboxFull(Exception):
    """`add` was called while `high_water` entries were unacknowledged."""


@dataclass(slots=True, eq=False)
class OutboxEntry(Generic[T]):
    """One item: its number, label and content. `peer` is the peer that it was sent to or must go to; None: any."""

    seq: int
    label: str
    content: T
    peer: str | None = None
    sends: int = 0
    due: float = float("inf")
    done: bool = False


class Outbox(Generic[T]):
    """The unacknowledged entries and their states. Times are seconds of any monotonic clock."""

    def __init__(self, peers: Iterable[str], *, high_water: int, resend_after_s: float) -> None:
        self._high_water = high_water
        self._resend_after_s = resend_after_s
        self._in_flight_at: dict[str, int] = dict.fromkeys(peers, 0)
        self._entries: dict[int, OutboxEntry[T]] = {}
        self._waiting: deque[OutboxEntry[T]] = deque()
        self._in_flight: dict[int, OutboxEntry[T]] = {}  # in the order of sending, which is the order of due times
        self._next_seq = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        """True while `add` would raise."""
        return len(self._entries) >= self._high_water

    @property
    def labels(self) -> list[str]:
        """Labels of the unacknowledged entries, oldest first."""
        return [entry.label for entry in self._entries.values()]

    @property
    def contents(self) -> list[T]:
        """Contents of the unacknowledged entries, oldest first."""
        return [entry.content for entry in self._entries.values()]

    @property
    def peers(self) -> list[str]:
        """The peers in use."""
        return list(self._in_flight_at)

    def add(self, label: str, content: T) -> OutboxEntry[T]:
        """Keep a new entry; it waits to be sent.

        Raises:
            OutboxFull: there is no room.
        """
        if self.full:
            raise OutboxFull(f"{len(self._entries)} messages are unacknowledged, high_water={self._high_water}")
        entry = OutboxEntry(self._next_seq, label, content)
        self._next_seq += 1
        self._entries[entry.seq] = entry
        self._waiting.append(entry)
        return entry

    def take(self, writable: Collection[str], now: float) -> tuple[OutboxEntry[T], str] | None:
        """Move the first waiting entry that a writable peer may take in flight; return both."""
        while self._waiting and self._waiting[0].done:
            self._waiting.popleft()
        if not writable:
            return None
        for position, entry in enumerate(self._waiting):
            if not entry.done and (entry.peer is None or entry.peer in writable):
                del self._waiting[position]
                peer = entry.peer or self._least_loaded(writable)
                entry.peer, entry.due = peer, now + self._resend_after_s
                entry.sends += 1
                self._in_flight[entry.seq] = entry
                self._in_flight_at[peer] += 1
                return entry, peer
        return None

    def untake(self, entries: list[OutboxEntry[T]]) -> None:
        """Put `entries` back at the front of the waiting ones: the connection did not accept them."""
        for entry in entries:
            entry.sends -= 1
        self._wait_again(entries, keep_peer=False)

    def acked(self, seq: int) -> OutboxEntry[T] | None:
        """Forget entry `seq`, and return it; None if it was acknowledged before."""
        entry = self._entries.pop(seq, None)
        if entry is None:
            return None
        entry.done = True
        self._land(entry)
        return entry

    def expire(self, now: float) -> list[OutboxEntry[T]]:
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

    def _least_loaded(self, peers: Collection[str]) -> str:
        if len(peers) == 1:
            return next(iter(peers))
        return min(peers, key=self._in_flight_at.__getitem__)

    def _wait_again(self, entries: list[OutboxEntry[T]], *, keep_peer: bool) -> None:
        for entry in reversed(entries):
            self._land(entry)
            if not keep_peer:
                entry.peer = None
            self._waiting.appendleft(entry)

    def _land(self, entry: OutboxEntry[T]) -> None:
        if self._in_flight.pop(entry.seq, None) is not None and entry.peer in self._in_flight_at:
            self._in_flight_at[entry.peer] -= 1
