"""The KL coefficient over time, updated once per train step however many the minibatches. Plain numbers, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

ERROR_LIMIT = 0.2
"""Ziegler et al. clip the proportional error to +-0.2, so that one odd batch cannot throw the coefficient."""


class KLController(Protocol):
    """Holds the coefficient in force."""

    coef: float

    def update(self, kl: float, num_samples: int) -> None:
        """Takes note of a finished step's mean KL (nats per token or per sequence, as `target`) over `num_samples`."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores `state_dict`."""


@dataclass
class FixedKLController:
    """A constant coefficient."""

    coef: float

    def update(self, kl: float, num_samples: int) -> None:
        """Changes nothing."""

    def state_dict(self) -> dict[str, float]:
        """Nothing: the coefficient is a setting."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Changes nothing: a resumed run may have another coefficient."""


@dataclass
class AdaptiveKLController:
    """coef <- coef (1 + clip(kl / target - 1, +-0.2) num_samples / horizon).

    Ziegler et al. 2019 (arXiv:1909.08593) section 2.2. `horizon` is in samples: the larger, the slower. Raises
    ValueError unless all three are positive.
    """

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        for name in ("coef", "target", "horizon"):
            value = vars(self)[name]
            if value <= 0.0:
                raise ValueError(f"{name} is {value}; an adaptive KL coefficient needs it above 0")

    def update(self, kl: float, num_samples: int) -> None:
        error = min(max(kl / self.target - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
        self.coef *= 1.0 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state.get("coef", self.coef)  # it may have been fixed before
