"""The trainer's turns on devices that it shares with generation servers (guests).

The rule. The trainer gives the devices back before it waits for anything that servers do: rollouts for a batch, the end
of rollouts that would expire, an evaluation. It takes them when it has a batch. So

- a turn never begins without a batch: `take` is called once the batch that is trained next is complete;
- there is no deadlock: while the trainer waits for data it does not have the devices. While it has them, it waits only
  for ranks, files and the manager, which need no guest. If the buffer lacks B rollouts, a server rests only until the
  current step has ended;
- no switch is useless: with B more rollouts in the buffer at the end of a step the next step follows in the same turn.
  The gate admits at most η + 1 batches ahead, so guests never wait for more steps than that.

If there are other servers too, guests are lent: the trainer gives the devices back only if that completes the batch
earlier (`asyncrl.master.peers.lending`). It asks again while it waits, so guests serve as soon as no other server does.

An evaluation needs servers. If all servers are guests, a turn begins only when the evaluation is over, and is given
back if an evaluation begins. `asyncrl.manager.fleet.guests.turns` has the manager's side.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from asyncio import Event
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Protocol

from asyncrl.comm.names import TrainerTurn
from asyncrl.comm.waits.limits import HOLD_S
from asyncrl.manager.messages import WaitRestingReply
from asyncrl.master.data.stall import StallWatch
from asyncrl.master.peers.lending import Lending
from asyncrl.master.peers.policy_versions import VersionAnnouncer
from asyncrl.observe import observer
from asyncrl.observe.observer import Activity
from asyncrl.runtime.process.waiting import or_stop

_log = logging.getLogger(__name__)


class TurnBoard(Protocol):
    """The place where turns are announced."""

    def trainer_turn(self) -> TrainerTurn | None:
        """Return the turn announced last; None before the first."""

    def announce_turn(self, turn: TrainerTurn) -> None:
        """Announce that this turn begins."""


class AsksGuests(Protocol):
    """The part of the manager that handles guests."""

    async def wait_resting(self, turn: int, timeout_s: float) -> WaitRestingReply:
        """See `asyncrl.manager.client.ManagerClient`."""


class DeviceTurns:
    """Takes the devices for steps and gives them back; does nothing if there are no guests.

    Args:
        board: announces turns.
        manager: knows when all guests rest.
        stall: limit of the wait for them.
        announcer: knows which version guests have to serve, and whether a version is evaluated.
        stop: ends waits.
        guests: number of guests.
        others: number of servers elsewhere.
        clock: monotonic time in seconds.

    Attributes:
        guests: number of guests.
    """

    def __init__(
        self,
        board: TurnBoard,
        manager: AsksGuests,
        stall: StallWatch,
        announcer: VersionAnnouncer,
        stop: Event,
        guests: int,
        others: int = 0,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._board, self._manager, self._stall = board, manager, stall
        self._announcer, self._stop, self.guests = announcer, stop, guests
        self._others, self._lending = others, Lending(others)
        self._began, self._clock = 0.0, clock
        self._turn = TrainerTurn(0, training=bool(guests), version=0)  # while the ranks load their models

    @property
    def training(self) -> bool:
        """True if the trainer has the devices, or waits for guests to leave them."""
        return self._turn.training

    def begin(self) -> None:
        """Give the devices to the guests, until there is a batch: the ranks have loaded their models."""
        if self.guests:
            before = self._board.trainer_turn()
            self._turn = TrainerTurn(0 if before is None else before.number, training=True, version=0)
            self.give()

    async def lend(self, missing: int) -> bool:
        """Give the devices to guests while the batch lacks `missing` rollouts, if that completes the batch earlier.

        Returns:
            True if the guests have the devices.

        Raises:
            StopRequested: before the manager has answered.
        """
        if self.training and self._others:
            told = await or_stop(self._manager.wait_resting(self._turn.number, 0.0), self._stop, math.inf)
            self._lending.others, self._lending.wake_s = told.others, told.wake_s
            if not self._lending.lends(missing, self.guests):
                return False
        self.give()
        return True

    def waited(self, rollouts: int, seconds: float) -> None:
        """Count `rollouts` that arrived within `seconds` of the wait for a batch."""
        self._lending.made(rollouts, seconds, 0 if self.training else self.guests)

    def give(self) -> None:
        """Give the devices to the guests, if they do not have them."""
        if not self.training:
            return
        if self._began:
            observer.span("turn", self._began, time.time())
        self._announce(training=False)

    async def take(self, version: int) -> float:
        """Take the devices for the step at `version`; return the seconds until all guests had left them.

        Raises:
            StopRequested, Stalled: see `StallWatch.wait`.
        """
        began = self._clock()
        self._lending.wait_ended()
        if self.guests and not self._others and self._announcer.evaluating:
            self.give()
            await or_stop(self._announcer.evaluation_ended(), self._stop, math.inf)
        if not self.guests or self.training:
            return 0.0
        self._announce(training=True)
        with observer.doing("waits for guests to leave the devices", "switch", Activity.blocked, step=version + 1):
            hold_s, what = min(HOLD_S, self._stall.limit_s / 2), "guests to give their memory back"
            asked = partial(self._manager.wait_resting, self._turn.number, hold_s)
            while waits_for := (await self._stall.wait(asked(), version, what)).waits_for:
                _log.info("step %d waits for %s", version + 1, ", ".join(waits_for))
        self._began = time.time()
        self._lending.release_s = self._clock() - began
        return self._lending.release_s

    async def take_to_end(self, limit_s: float) -> None:
        """Take the devices to save a run that was asked to stop; after `limit_s`, warn and return without them."""
        if not self.guests or self.training:
            return
        self._announce(training=True)
        try:
            async with asyncio.timeout(limit_s):
                stayed = (await self._manager.wait_resting(self._turn.number, limit_s)).waits_for
        except TimeoutError:
            stayed = ["guests"]
        if stayed:
            _log.warning("saving beside %s, which did not leave the devices within %g s", ", ".join(stayed), limit_s)

    def _announce(self, *, training: bool) -> None:
        self._turn = TrainerTurn(self._turn.number + 1, training, self._announcer.announced)
        self._board.announce_turn(self._turn)
