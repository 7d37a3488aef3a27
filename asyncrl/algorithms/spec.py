"""What an objective is made of, as plain data: the config builds it, the launcher checks it, the trainer runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any

from asyncrl.algorithms.catalog import check


class ProximalMode(StrEnum):
    """Where the proximal log-probabilities come from."""

    recompute = auto()
    """The trainer's forward pass at the step's start."""
    approximate = auto()
    """`proximal.approximate_prox_logprobs`, no forward pass."""
    behave = auto()
    """The behaviour policy stands for the proximal one, which makes every correction's weight 1."""


class KLPlace(StrEnum):
    """Where the KL term to the reference enters."""

    loss = auto()
    reward = auto()


class ValueNormalisation(StrEnum):
    """Normalisation of the critic's targets; see `value_norm`."""

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
    """The actor's objective: policy loss x correction + KL in the loss - entropy bonus, aggregated."""

    policy_loss: Choice = Choice("decoupled_ppo")
    correction: Choice = Choice("token_truncate")
    kl: Choice | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    aggregation: Choice = Choice("token_mean")
    prox: ProximalMode = ProximalMode.recompute
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class ValueObjectiveSpec:
    """The critic's objective."""

    value_loss: Choice = Choice("clipped")
    aggregation: Choice = Choice("token_mean")
    plugins: tuple[str, ...] = ()


def check_objective(spec: ObjectiveSpec) -> None:
    """Checks every choice of `spec` without importing torch.

    Raises:
        ValueError: a bad name, parameter, coefficient or combination; `UnknownAlgorithmError` for a name.
    """
    check("policy_loss", spec.policy_loss.name, spec.policy_loss.params, spec.plugins)
    check("correction", spec.correction.name, spec.correction.params, spec.plugins)
    check("aggregation", spec.aggregation.name, spec.aggregation.params, spec.plugins)
    if spec.kl is not None:
        check("kl", spec.kl.name, spec.kl.params, spec.plugins)
    elif spec.kl_coef != 0.0:
        raise ValueError(f"kl_coef is {spec.kl_coef} but kl is not set; choose an estimator (k3) or set kl_coef to 0")
    if spec.kl_coef < 0.0:
        raise ValueError(f"kl_coef is {spec.kl_coef}; below 0 it rewards leaving the reference, set it to 0 or more")


def check_value_objective(spec: ValueObjectiveSpec) -> None:
    """As `check_objective`, for the critic."""
    check("value_loss", spec.value_loss.name, spec.value_loss.params, spec.plugins)
    check("aggregation", spec.aggregation.name, spec.aggregation.params, spec.plugins)
