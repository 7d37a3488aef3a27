"""Lending: the rule by which servers on the trainer's devices generate while the trainer waits, beside other servers.

Pure; times in seconds.

Derivation. The batch lacks M rollouts. S servers elsewhere make r rollouts a second each, so without the guests the
trainer waits w = M / (r S). G guests serve from `wake` on, until there are M rollouts at time t:

    r S t + r G (t - wake) = M      so      t = (M / r + G wake) / (S + G)

and then the guests take `release` to leave the devices before the step can begin. The gain of lending is

    w - t - release = G (w - wake) / (S + G) - release

Guests are lent if the gain is above 0. If no other server serves, guests are always lent: w is infinite. A value that
is not measured yet counts as 0, so guests are lent in the first wait, which measures it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WEIGHT = 0.5
"""Weight of the newest measurement in a running mean."""


@dataclass(slots=True)
class Lending:
    """Measured speeds of rollouts and switches, and the rule that follows from them.

    Attributes:
        others: S, servers elsewhere that serve, as last reported.
        rate: r, rollouts per second of one server, a running mean over waits; None until measured.
        wake_s: seconds until guests serve.
        release_s: seconds until they have left the devices.
    """

    others: int = 0
    rate: float | None = None
    wake_s: float = 0.0
    release_s: float = 0.0
    _rollouts: int = 0
    _server_s: float = 0.0

    def made(self, rollouts: int, seconds: float, guests: int) -> None:
        """Count `rollouts` that came within `seconds` of this wait, in which `guests` served beside the others."""
        self._rollouts += rollouts
        self._server_s += seconds * (self.others + guests)

    def wait_ended(self) -> None:
        """Use the measurements of this wait from now on: the batch is complete."""
        if self._rollouts and self._server_s > 0.0:
            rate = self._rollouts / self._server_s
            self.rate = rate if self.rate is None else WEIGHT * rate + (1 - WEIGHT) * self.rate
        self._rollouts, self._server_s = 0, 0.0

    def gain(self, missing: int, guests: int) -> float:
        """Return the seconds by which the batch is complete earlier if `guests` help the others."""
        if not self.others or not self.rate:
            return math.inf
        waits = missing / (self.rate * self.others)
        return guests * (waits - self.wake_s) / (self.others + guests) - self.release_s

    def lends(self, missing: int, guests: int) -> bool:
        """Return True if `guests` are to generate while the batch lacks `missing` rollouts."""
        return self.gain(missing, guests) > 0.0
