"""The kinds of algorithms, the decorators that mark them, and the choices that a config makes of them. No torch.

The decorators keep no table: `config/plugin_code/catalog.py` finds them in the source, and imports the one module that
is needed. They only reject, at import, a function whose parameters could not be configured. A choice is plain data: the
config makes it, the launcher checks it, the trainer runs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, TypeAlias, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

KINDS = (
    "policy_loss",
    "correction",
    "selection",
    "advantage",
    "kl",
    "value_loss",
    "aggregation",
    "filter",
    "shaping",
    "reward_loss",
    "pair_loss",
    "label_loss",
)
"""Kinds of algorithms. Each is a function of one argument; parameters after a bare `*` are configurable."""


def _marker(kind: str) -> Callable[[str], Callable[[F], F]]:
    def named(name: str) -> Callable[[F], F]:
        def mark(function: F) -> F:
            parameters = inspect.signature(function).parameters.values()
            ordinary = [p for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
            if len(ordinary) != 1:
                raise TypeError(
                    f"{kind} {name!r}: {function.__name__} takes {len(ordinary)} positional arguments, expected 1; "
                    "write its parameters after a bare * so that they can be configured"
                )
            return function

        return mark

    return named


policy_loss = _marker("policy_loss")
"""`@policy_loss("name")` on `(PolicyLossInputs, *, params) -> PolicyLossOutput`."""
correction = _marker("correction")
"""`@correction("name")` on `(CorrectionInputs, *, params) -> CorrectionOutput`."""
selection = _marker("selection")
"""`@selection("name")` on `(SelectionInputs, *, params) -> SelectionOutput`."""
advantage = _marker("advantage")
"""`@advantage("name")` on `(AdvantageInputs, *, params) -> AdvantageOutput`."""
kl_estimator = _marker("kl")
"""`@kl_estimator("name")` on `(KLInputs, *, params) -> kl_T`."""
value_loss = _marker("value_loss")
"""`@value_loss("name")` on `(ValueLossInputs, *, params) -> ValueLossOutput`."""
aggregation = _marker("aggregation")
"""`@aggregation("name")` on `(LossTokens, *, params) -> Aggregation`."""
filter_ = _marker("filter")
"""`@filter_("name")` on `(GroupView, *, params) -> FilterDecision`."""
shaping = _marker("shaping")
"""`@shaping("name")` on `(GroupView, *, params) -> rewards_S`."""
reward_loss = _marker("reward_loss")
"""`@reward_loss("name")` on `(ScoredPairs, *, params) -> losses_P`."""
pair_loss = _marker("pair_loss")
"""`@pair_loss("name")` on `(AnswerPairs, *, params) -> losses_P`."""
label_loss = _marker("label_loss")
"""`@label_loss("name")` on `(LabelledAnswers, *, params) -> losses_S`."""


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


class KLIn(StrEnum):
    """Place at which the KL term to the reference enters."""

    loss = auto()
    reward = auto()
    advantage = auto()
    """Subtracted from each token's advantage, after the estimator: distillation from the reference as a teacher."""


class ValueNormalisation(StrEnum):
    """Normalisation of the critic's targets; see `critic.ValueNorm`."""

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
