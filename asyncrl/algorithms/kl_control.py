"""The KL coefficient over time, updated once per train step however many the minibatches. Plain numbers, no torch."""

from __future__ import annotations

from dataclasses import dataclass

ERROR_LIMIT = 0.2
"""Ziegler et al. clip the proportional error to +-0.2, so that one odd batch cannot throw the coefficient."""


@dataclass
class KLController:
    """The coefficient in force: a constant, or where there is a target

        coef <- coef (1 + clip(kl / target - 1, +-0.2) n / horizon)

    Ziegler et al. 2019 (arXiv:1909.08593) section 2.2; n and `horizon` are in samples: the larger the horizon, the
    slower. `target` 0 keeps the coefficient constant, and one of 0 stays 0.
    """

    coef: float
    target: float = 0.0
    horizon: float = 1.0

    def __post_init__(self) -> None:
        self._adapts = self.coef > 0.0 and self.target > 0.0

    def update(self, kl: float, num_samples: int) -> None:
        """Takes note of a finished step's mean KL (nats per token or per sequence, as `target`) over `num_samples`."""
        if self._adapts:
            error = min(max(kl / self.target - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
            self.coef *= 1.0 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold; nothing of a constant, which is a setting."""
        return {"coef": self.coef} if self._adapts else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores `state_dict`. A constant stays: a resumed run may have another."""
        if self._adapts:
            self.coef = state.get("coef", self.coef)  # it may have been fixed before
