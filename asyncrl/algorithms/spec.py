"""Parts of an objective as plain data: the config builds it, the launcher checks it, the trainer runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, TypeAlias

Resolve: TypeAlias = Callable[[str, str, Mapping[str, Any]], Callable[..., Any]]
"""Returns the function of a kind and a name, with parameters bound; `resolve` of `config/plugin_code/catalog.py`."""


WHOLE_DISTRIBUTIONS = frozenset({"full", "forward", "jsd"})
"""KL estimators that need both models' log-softmax over the vocabulary."""


class ProximalMode(StrEnum):
    """Source of the proximal log-probabilities."""

    recompute = auto()
    """The trainer's forward pass at the step's start."""
    approximate = auto()
    """`objective.approximate_prox_logprobs`, no forward pass."""
    behave = auto()
    """The behaviour policy replaces the proximal one, so every correction's weight is 1."""


class KLPlace(StrEnum):
    """Place at which the KL term to the reference enters."""

    loss = auto()
    reward = auto()
    advantage = auto()
    """Subtracted from each token's advantage, after the estimator: distillation from the reference as a teacher."""


class ValueNormalisation(StrEnum):
    """Normalisation of the critic's targets; see `critic_objective.ValueNorm`."""

    none = auto()
    running = auto()
    """Mean and deviation of all returns so far."""
    ema = auto()
    """Moving averages."""


@dataclass(frozen=True)
class Choice:
    """An algorithm by its registered name or import path, with the values of its parameters."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ObjectiveSpec:
    """The actor's objective: policy loss x correction + KL in the loss + squared log-ratio - entropy bonus."""

    policy_loss: Choice = Choice("decoupled_ppo")
    correction: Choice = Choice("token_truncate")
    selection: Choice = Choice("none")
    kl: Choice | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    log_ratio_coef: float = 0.0
    aggregation: Choice = Choice("token_mean")
    prox: ProximalMode = ProximalMode.recompute
