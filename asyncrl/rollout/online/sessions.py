"""State of online sessions: the clients that wait for one, the sessions that are open, and how the others ended.

    a client    asks ──▶ waiting ──a rollout is admitted──▶ has its sessions
                            └──────leaves──▶ gone; a rollout that was admitted for it is dropped: client_left

    a session   open ──reward──────────────▶ rewarded      its samples are trained with the reward
                  ├────reject──────────────▶ rejected      it gives no samples
                  ├────no call for lease_s─▶ silent        its episode is lost
                  ├────a step waits────────▶ over_age      its rollout kept a step waiting for hold_s: lost
                  └────the rollout ends────▶ closed        rollout.rollout_timeout_s is over, or the run ends

A rollout is admitted only while a client waits, so the gate (`asyncrl.manager.rollouts.staleness_gate`) sees nothing
new: a session's rollout runs from its admission to its end like any other, all its tokens are of the version of its
admission or newer, and a session that ends without a reward only takes a rollout out of the count.

A session ends once. What ended stays known for a while: a late call hears how it ended, a repeated reward gets the same
answer, and another one is refused. A call renews the lease when it ends, and none runs out before.

Pure state: the caller passes the time, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Final

from asyncrl.comm.ended_rollouts import DropReason, RecentIds

REMEMBERED: Final = 16_384
"""Ended sessions that are remembered, of some hundred bytes each. Of others a client hears that there is none."""


class End(StrEnum):
    """How a session ended; the diagram of this module shows when."""

    rewarded = auto()
    rejected = auto()
    silent = auto()
    over_age = auto()
    client_left = auto()
    """Its client was gone before it had the address."""
    closed = auto()


LOST: Final[Mapping[End, DropReason]] = {
    End.silent: DropReason.session_silent,
    End.over_age: DropReason.session_over_age,
    End.client_left: DropReason.client_left,
}
"""Ends that lose an episode, with the reason of a rollout of which too few episodes are left."""


@dataclass(slots=True)
class OnlineSession:
    """One episode that a program outside the run plays.

    Attributes:
        key: the session's own key.
        renewed_at: time at which the last call ended.
        calls: number of calls that run now.
        end: how it ended; None while it is open.
        reward, metrics: what its client reported.
    """

    session_id: str
    rollout_id: str
    key: str = field(repr=False)
    renewed_at: float
    calls: int = 0
    end: End | None = None
    reward: float = math.nan
    metrics: Mapping[str, float] = field(default_factory=dict)


class Sessions:
    """The clients and sessions of one RolloutWorker.

    Args:
        lease_s: silence after which a session ends.
        hold_s: time for which a rollout may keep a step waiting (`on_stale=wait`); then its open sessions end.
        wait_s: time for which a client waits for a session.
        remembered: number of ended sessions that are remembered.

    Raises:
        ValueError: one of them is not a positive number.
    """

    def __init__(
        self, lease_s: float = 300.0, hold_s: float = 60.0, wait_s: float = 60.0, *, remembered: int = REMEMBERED
    ) -> None:
        for name, value in (("lease_s", lease_s), ("hold_s", hold_s), ("wait_s", wait_s)):
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r}: give a number of seconds above 0")
        self.lease_s, self.hold_s, self.wait_s = lease_s, hold_s, wait_s
        self._waiting: dict[int, float] = {}
        self._clients: dict[str, int | None] = {}
        self._open: dict[str, OnlineSession] = {}
        self._ended: RecentIds[OnlineSession] = RecentIds(remembered)
        self._held: dict[str, float] = {}

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Number of clients for which no rollout is admitted yet."""
        return len(self._waiting)

    def patience_s(self, now: float) -> float:
        """Return the seconds for which the first client still waits; there must be one."""
        return max(0.0, min(self._waiting.values()) - now)

    def ask(self, client: int, now: float) -> None:
        """Record that a client waits for a session."""
        self._waiting[client] = now + self.wait_s

    def leave(self, client: int) -> list[OnlineSession]:
        """Record that a client is gone, or has waited long enough; return its sessions, which end."""
        self._waiting.pop(client, None)
        left = {rollout_id for rollout_id, own in self._clients.items() if own == client}
        self._clients |= dict.fromkeys(left)
        return self._end_all(End.client_left, left)

    def admit(self, rollout_id: str) -> None:
        """Give an admitted rollout to the client that has waited longest, if one still waits."""
        client = next(iter(self._waiting), None)
        self._clients[rollout_id] = client
        if client is not None:
            del self._waiting[client]

    def client_of(self, rollout_id: str) -> int | None:
        """Return the client of a rollout; None if it is gone."""
        return self._clients.get(rollout_id)

    def open(self, session_id: str, rollout_id: str, key: str, now: float) -> OnlineSession:
        """Open a session for an episode of a rollout."""
        session = self._open[session_id] = OnlineSession(session_id, rollout_id, key, now)
        return session

    def get(self, session_id: str) -> OnlineSession | None:
        """Return a session that is open or remembered."""
        return self._open.get(session_id) or self._ended.get(session_id)

    def begin_call(self, session: OnlineSession) -> None:
        """Record that a call of an open session begins: its lease does not run out meanwhile."""
        session.calls += 1

    def end_call(self, session: OnlineSession, now: float) -> None:
        """Record that a call has ended, which renews the lease."""
        session.calls, session.renewed_at = session.calls - 1, now

    def reward(self, session: OnlineSession, reward: float, metrics: Mapping[str, float]) -> bool:
        """End an open session with its reward. Return True if this is the reward with which it ended, now or before."""
        if session.end is None:
            session.reward, session.metrics = reward, metrics
            self.end(session, End.rewarded)
        return session.end is End.rewarded and session.reward == reward and session.metrics == metrics

    def end(self, session: OnlineSession, end: End) -> None:
        """End a session, unless it has ended."""
        if session.end is None:
            session.end = end
            self._ended.put(session.session_id, self._open.pop(session.session_id))

    def end_silent(self, now: float) -> list[OnlineSession]:
        """End the sessions whose lease has run out, and return them."""
        late = [each for each in self._open.values() if not each.calls and now - each.renewed_at > self.lease_s]
        for session in late:
            self.end(session, End.silent)
        return late

    def end_over_age(self, holding: Collection[str], now: float) -> list[OnlineSession]:
        """End the sessions of rollouts that have kept a step waiting for `hold_s`, and return them.

        Args:
            holding: the rollouts that keep a step waiting now.
        """
        self._held = {rollout_id: self._held.get(rollout_id, now) for rollout_id in holding}
        return self._end_all(End.over_age, {each for each, since in self._held.items() if now - since >= self.hold_s})

    def close(self, rollout_id: str) -> list[OnlineSession]:
        """Forget a rollout that is over; return its open sessions, which end."""
        self._clients.pop(rollout_id, None)
        return self._end_all(End.closed, {rollout_id})

    def _end_all(self, end: End, rollouts: Collection[str]) -> list[OnlineSession]:
        ended = [each for each in self._open.values() if each.rollout_id in rollouts] if rollouts else []
        for session in ended:
            self.end(session, end)
        return ended
