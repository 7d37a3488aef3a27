"""What training keeps from step to step beside models and optimizers, and the objectives built once from the config."""

from __future__ import annotations

from functools import partial
from typing import Any

from asyncrl.algorithms.critic import ValueNorm, ValueObjective
from asyncrl.algorithms.kl import KLController
from asyncrl.algorithms.objective import Objective
from asyncrl.algorithms.spec import Choice, KLPlace, ObjectiveSpec, ValueNormalisation
from asyncrl.config.catalog import resolve
from asyncrl.config.setting import ChoiceConfig
from asyncrl.trainer.settings import AlgorithmConfig


class TrainState:
    """Objectives, the KL coefficient and the normalisation of values, as `algorithm` sets them."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        find = partial(resolve, plugins=algorithm.plugins)
        self.objective = Objective(objective_spec(algorithm), find)
        value_loss, aggregation = _choice(algorithm.critic.value_loss), _choice(algorithm.aggregation)
        self.value_objective = ValueObjective(value_loss, aggregation, find)
        self.kl = KLController(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)
        norm = algorithm.critic.value_norm
        self.value_norm = None if norm == ValueNormalisation.none else ValueNorm(norm)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs; JSON-able."""
        return {
            "kl": self.kl.state_dict(),
            "value_norm": None if self.value_norm is None else self.value_norm.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; a value normalisation switched on since then starts anew."""
        self.kl.load_state_dict(state["kl"])
        if self.value_norm is not None and state["value_norm"] is not None:
            self.value_norm.load_state_dict(state["value_norm"])


def objective_spec(algorithm: AlgorithmConfig) -> ObjectiveSpec:
    """The actor's objective as `algorithm` sets it."""
    kl_in_loss = algorithm.kl_coef > 0.0 and algorithm.kl_in == KLPlace.loss
    return ObjectiveSpec(
        policy_loss=_choice(algorithm.policy_loss),
        correction=_choice(algorithm.correction),
        kl=_choice(algorithm.kl) if kl_in_loss else None,
        kl_coef=algorithm.kl_coef if kl_in_loss else 0.0,
        entropy_coef=algorithm.entropy_coef,
        aggregation=_choice(algorithm.aggregation),
        prox=algorithm.prox,
    )


def _choice(config: ChoiceConfig) -> Choice:
    return Choice(config.name, dict(config.params))
