"""Turns of the trainer and of generation servers that share its devices (guests). Pure state: no sockets, no clocks.

A guest is in service while the trainer does not need the devices. The MasterWorker announces turns in name resolution
(`TrainerTurn`). The manager carries them out, with one more state of a server and one more order::

    SERVING ── the trainer's turn ──▶ RELEASING ── memory released ──▶ RESTING
       ▲                                                                  │ the trainer's turn is over
       └── checked ── UPDATING: weights' memory, update, cache's memory ◀─┘

A step and a guest are never on a device together. A step begins once `resting` holds for every guest. That holds only
during the trainer's turn, in which no guest leaves RESTING. A guest's new process registers before it reads the turn,
and the manager looks for guests after the turn was announced. As both write first and read afterwards, at least one of
them sees the other. A guest that dies has no memory; it counts once its name is gone.

There is no deadlock. The trainer takes its turn with a batch (`asyncrl.master.peers.guest_turns`), so it waits for
nothing that resting guests generate. It ends its turn before it waits for data, and a guest wakes without waiting for
any other process.

The bound on staleness holds. The gate counts by the least version among serving servers. A resting guest does not
serve. It comes back at the newest announced version, so the least version never falls because of a rest.
"""

from __future__ import annotations

from collections.abc import Collection

from asyncrl.comm.names import TrainerTurn


class GuestTurns:
    """Turns on the devices that guests share with the trainer.

    Args:
        guests: indices of the servers that are guests; without guests the turns have no effect.

    Attributes:
        turn: newest announced turn. Before the first one the trainer has the devices, as its ranks load their models.
        announced: newest version that was announced to the manager, even if servers cannot load it.
    """

    def __init__(self, guests: Collection[int] = ()) -> None:
        self._guests = frozenset(guests)
        self.turn = TrainerTurn(0, training=bool(guests), version=0)
        self.announced = 0

    def __contains__(self, server: int) -> bool:
        return server in self._guests

    def __bool__(self) -> bool:
        return bool(self._guests)

    def begin(self, turn: TrainerTurn) -> None:
        """Begin the announced turn. A turn older than the current one is ignored."""
        if turn.number > self.turn.number:
            self.turn = turn

    def must_rest(self, server: int) -> bool:
        """True if the server may have no memory now."""
        return self.turn.training and server in self._guests

    @property
    def may_wake(self) -> bool:
        """True if guests may wake: the version that they will load is known, so each loads only once."""
        return not self.turn.training and self.announced >= self.turn.version
