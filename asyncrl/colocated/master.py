"""The MasterWorker's part: it takes the devices for steps, and gives them back."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from asyncio import Event
from dataclasses import dataclass
from functools import partial

from asyncrl.comm.names import TrainerTurn
from asyncrl.comm.waits import HOLD_S
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.messages import WaitAsleepRequest
from asyncrl.master.data.stall import StallWatch
from asyncrl.master.data.while_waiting import DeviceTurns
from asyncrl.master.evaluations import Row
from asyncrl.master.peers import NameBoard
from asyncrl.master.policy_versions import VersionAnnouncer
from asyncrl.observe import observer
from asyncrl.observe.observer import Activity
from asyncrl.runtime.process.waiting import or_stop

_log = logging.getLogger(__name__)

WEIGHT = 0.5
"""Weight of the newest measurement in a running mean."""


@dataclass(slots=True)
class WakeRule:
    """The rule by which colocated servers generate while the trainer waits, beside others. Pure; times in seconds.

    Derivation. The batch lacks M rollouts. S servers elsewhere make r rollouts a second each, so with them alone the
    trainer waits w = M / (r S). G colocated servers serve from `wake` on, until there are M rollouts at time t:

        r S t + r G (t - wake) = M      so      t = (M / r + G wake) / (S + G)

    and then the colocated ones take `release` to leave the devices before the step can begin. Their gain is

        w - t - release = G (w - wake) / (S + G) - release

    They wake if the gain is above 0. If no other server serves, they always do: w is infinite. A value that is not
    measured yet counts as 0, so they wake in the first wait, which measures it.

    Attributes:
        others: S, servers elsewhere that serve, as last reported.
        rate: r, rollouts per second of one server, a running mean over waits; None until measured.
        wake_s: seconds until colocated servers serve.
        release_s: seconds until they have left the devices.
    """

    others: int = 0
    rate: float | None = None
    wake_s: float = 0.0
    release_s: float = 0.0
    _rollouts: int = 0
    _server_s: float = 0.0

    def made(self, rollouts: int, seconds: float, colocated: int) -> None:
        """Count `rollouts` of this wait: in `seconds`, in which `colocated` servers served beside the others."""
        self._rollouts += rollouts
        self._server_s += seconds * (self.others + colocated)

    def wait_ended(self) -> None:
        """Use the measurements of this wait from now on: the batch is complete."""
        if self._rollouts and self._server_s > 0.0:
            rate = self._rollouts / self._server_s
            self.rate = rate if self.rate is None else WEIGHT * rate + (1 - WEIGHT) * self.rate
        self._rollouts, self._server_s = 0, 0.0

    def gain(self, missing: int, colocated: int) -> float:
        """Return the seconds by which the batch is complete earlier if `colocated` servers help the others."""
        if not self.others or not self.rate:
            return math.inf
        waits = missing / (self.rate * self.others)
        return colocated * (waits - self.wake_s) / (self.others + colocated) - self.release_s

    def should_wake(self, missing: int, colocated: int) -> bool:
        """Return True if `colocated` servers are to generate while the batch lacks `missing` rollouts."""
        return self.gain(missing, colocated) > 0.0


class SharedDevices(DeviceTurns):
    """Takes the devices for steps and gives them back.

    Args:
        manager: knows when all colocated servers sleep.
        announcer: knows which version colocated servers have to serve, and whether a version is evaluated.
        colocated: number of servers on the trainer's devices.
        others: number of servers elsewhere.
    """

    def __init__(
        self,
        board: NameBoard,
        manager: ManagerClient,
        stall: StallWatch,
        announcer: VersionAnnouncer,
        stop: Event,
        colocated: int,
        others: int,
    ) -> None:
        self._board, self._manager, self._stall = board, manager, stall
        self._announcer, self._stop = announcer, stop
        self._colocated, self._others, self._wake_rule = colocated, others, WakeRule(others)
        self._began = 0.0
        self._turn = TrainerTurn(0, training=True, version=0)  # while the ranks load their models

    @property
    def training(self) -> bool:
        """See `DeviceTurns`."""
        return self._turn.training

    def begin(self) -> None:
        """See `DeviceTurns`."""
        before = self._board.trainer_turn()
        self._turn = TrainerTurn(0 if before is None else before.number, training=True, version=0)
        self.give()

    async def wake(self, missing: int) -> bool:
        """See `DeviceTurns`.

        Raises:
            StopRequested: before the manager has answered.
        """
        if self.training and self._others:
            reply = await or_stop(self._manager.call(WaitAsleepRequest(self._turn.number)), self._stop, math.inf)
            self._wake_rule.others, self._wake_rule.wake_s = reply.others, reply.wake_s
            if not self._wake_rule.should_wake(missing, self._colocated):
                return False
        self.give()
        return True

    def waited(self, rollouts: int, seconds: float) -> None:
        """See `DeviceTurns`."""
        self._wake_rule.made(rollouts, seconds, 0 if self.training else self._colocated)

    def give(self) -> None:
        """See `DeviceTurns`."""
        if not self.training:
            return
        if self._began:
            observer.span("turn", self._began, time.time())
        self._announce(training=False)

    async def take(self, version: int) -> Row:
        """See `DeviceTurns`.

        Raises:
            StopRequested, Stalled: see `StallWatch.wait`.
        """
        now = asyncio.get_running_loop().time
        began = now()
        self._wake_rule.wait_ended()
        if not self._others and self._announcer.evaluating:
            self.give()
            await or_stop(self._announcer.evaluation_ended(), self._stop, math.inf)
        if self.training:
            return {"time/switch_s": 0.0}
        self._announce(training=True)
        with observer.doing("waits for servers to leave the devices", "switch", Activity.blocked, step=version + 1):
            hold_s, what = min(HOLD_S, self._stall.limit_s / 2), "servers to give their memory back"
            asked = partial(self._manager.call, WaitAsleepRequest(self._turn.number, hold_s))
            while waits_for := (await self._stall.wait(asked(), version, what)).waits_for:
                _log.info("step %d waits for %s", version + 1, ", ".join(waits_for))
        self._began = time.time()
        self._wake_rule.release_s = now() - began
        return {"time/switch_s": self._wake_rule.release_s}

    async def take_to_end(self, limit_s: float) -> None:
        """See `DeviceTurns`."""
        if self.training:
            return
        self._announce(training=True)
        try:
            async with asyncio.timeout(limit_s):
                stayed = (await self._manager.call(WaitAsleepRequest(self._turn.number, limit_s))).waits_for
        except TimeoutError:
            stayed = ["colocated servers"]
        if stayed:
            _log.warning("saving beside %s, which did not leave the devices within %g s", ", ".join(stayed), limit_s)

    def _announce(self, *, training: bool) -> None:
        self._turn = TrainerTurn(self._turn.number + 1, training, self._announcer.announced)
        self._board.announce_turn(self._turn)
