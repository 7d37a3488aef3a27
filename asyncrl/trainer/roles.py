"""The roles of a training rank, built from the config and the graph: which models are loaded, which of them learn.

`actor` and `critic` learn; `ref` is frozen or follows the actor. Any other role that a graph names is a reward model,
loaded from the `path` in the arguments of one of its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.master.graph.types import Graph
from asyncrl.trainer.engines.flat import Engine, PolicyEngine, ValueEngine
from asyncrl.trainer.models import attention_kind, load_causal_lm, load_critic, load_reward_model
from asyncrl.trainer.optimizer import FlatAdamW
from asyncrl.trainer.parallel import Ranks
from asyncrl.trainer.settings import OptimizerConfig, ReferenceMode
from asyncrl.trainer.train_state import TrainState

ACTOR, CRITIC, REFERENCE = "actor", "critic", "ref"


@dataclass(frozen=True, eq=False)
class TrainingRank:
    """One rank's share of the training side; it holds a whole copy of every role.

    Attributes:
        engines: every role that the graph names, and the actor.
        averaged: roles without an optimizer whose weights change all the same (a reference that follows the actor).
    """

    engines: dict[str, Engine]
    state: TrainState
    ranks: Ranks
    averaged: frozenset[str] = frozenset()

    def policy(self, role: str) -> PolicyEngine:
        """The language model of `role`.

        Raises:
            TypeError: that role is none.
        """
        engine = self.engines[role]
        if not isinstance(engine, PolicyEngine):
            raise TypeError(f"role {role!r} is no language model; only language models are published")
        return engine


def build_rank(config: ExperimentConfig, graph: Graph, ranks: Ranks, device: torch.device) -> TrainingRank:
    """Load every role that `graph` names.

    Raises:
        OSError, ValueError: a model cannot be loaded; names the role.
    """
    builder = _Builder(config, graph, device)
    special: dict[str, Callable[[], Engine]] = {
        ACTOR: builder.actor,
        CRITIC: builder.critic,
        REFERENCE: builder.reference,
    }
    engines: dict[str, Engine] = {}
    for role in dict.fromkeys((ACTOR, *graph.roles())):
        engines[role] = special[role]() if role in special else builder.reward_model(role)
    follows = REFERENCE in engines and config.algorithm.reference.mode == ReferenceMode.ema
    return TrainingRank(
        engines, TrainState(config.algorithm), ranks, frozenset((REFERENCE,)) if follows else frozenset()
    )


class _Builder:
    def __init__(self, config: ExperimentConfig, graph: Graph, device: torch.device) -> None:
        self._config, self._graph, self._device = config, graph, device
        self._budget = config.trainer.tokens_per_micro_batch
        # Greedy answers report their log-probabilities at temperature 1.
        self._temperature = config.rollout.sampling.temperature or 1.0
        self._attention = config.model.attn_implementation

    def actor(self) -> PolicyEngine:
        return self._policy(self._model_path(), self._config.model.dtype, self._config.optimizer)

    def reference(self) -> PolicyEngine:
        reference = self._config.algorithm.reference
        # A moving average changes by less than bf16 resolves.
        dtype = Dtype.float32 if reference.mode == ReferenceMode.ema else self._config.model.dtype
        return self._policy(reference.path or self._model_path(), dtype, None)

    def critic(self) -> ValueEngine:
        settings, model = self._config.algorithm.critic, self._config.model
        critic = load_critic(settings.path or self._model_path(), model.dtype, self._attention, self._device)
        return ValueEngine(
            critic,
            attention=attention_kind(self._attention),
            tokens_per_micro_batch=self._budget,
            optimizer=self._optimizer(critic, settings.optimizer),
        )

    def reward_model(self, role: str) -> ValueEngine:
        paths = [str(call.args["path"]) for call in self._graph.calls if call.role == role and "path" in call.args]
        if not paths:
            raise ValueError(
                f"role {role!r} is a reward model, but no call of it says where it is; "
                'give one of its calls args={"path": "<folder>"}'
            )
        model = load_reward_model(paths[0], self._config.model.dtype, self._attention, self._device)
        return ValueEngine(model, attention=attention_kind(self._attention), tokens_per_micro_batch=self._budget)

    def _policy(self, path: str, dtype: Dtype, optimizer: OptimizerConfig | None) -> PolicyEngine:
        model = load_causal_lm(path, dtype, self._attention, self._device)
        return PolicyEngine(
            model,
            temperature=self._temperature,
            attention=attention_kind(self._attention),
            tokens_per_micro_batch=self._budget,
            optimizer=None if optimizer is None else self._optimizer(model, optimizer),
        )

    def _optimizer(self, module: nn.Module, config: OptimizerConfig) -> FlatAdamW:
        steps = self._config.total_train_steps * self._config.trainer.ppo_minibatches
        return FlatAdamW(module.named_parameters(), config, steps)

    def _model_path(self) -> str:
        path = self._config.model.path
        if path is None:
            raise ValueError("model.path is null; the launcher sets it to the base model's folder")
        return str(Path(path).expanduser())
