"""Model functions: their context, their registry, and running one as a call of the graph.

A model function is `fn(ctx: CallContext, batch: StepBatch) -> dict[str, float]`. It runs on every rank that hosts its
role, reads and writes columns of its rank's batch, and returns statistics that are equal on all ranks (`ctx.reduce`). A
user's function needs no registration: the graph names its import path.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from asyncrl.algorithms.arithmetic import Stats, all_reduce_stats, stat_values
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.objective import KLController, Objective
from asyncrl.algorithms.registry import Choice, KLIn, ObjectiveSpec, ValueNormalisation
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.catalog import MODEL_FUNCTION, resolve
from asyncrl.config.setting import ChoiceConfig
from asyncrl.models.ranks import Ranks
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import PolicyEngine, TrainingEngine, ValueEngine
from asyncrl.trainer.settings import AlgorithmConfig

if TYPE_CHECKING:
    from asyncrl.algorithms.critic import ValueNorm, ValueObjective

StatValues: TypeAlias = dict[str, Any]
"""Numbers by name; `ppo/loss_per_minibatch` is a list."""


@dataclass(frozen=True, eq=False)
class CallContext:
    """The context of one call.

    Attributes:
        name, role, reads, writes, args: as in the graph's `Call`.
        engines: every role this rank hosts.
        roles: every role that any rank hosts.
        ranks: the data-parallel ranks, which have other samples of the same batch.
        state: training state from step to step, beside the models.
        working: keeps the roles that the call uses on their device until the call ends.
    """

    name: str
    role: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    args: Mapping[str, Any]
    config: ExperimentConfig
    engines: Mapping[str, TrainingEngine]
    ranks: Ranks
    state: TrainState
    working: ExitStack = field(default_factory=ExitStack)
    roles: Collection[str] = ()

    def policy(self, role: str | None = None, *, deferred: bool = False) -> PolicyEngine:
        """Return the language model of `role` (the call's own by default).

        Args:
            deferred: the engine is used after the call; its user then enters `on_device` itself.

        Raises:
            TypeError: that role is not a language model.
        """
        engine = self._engine(role or self.role, deferred=deferred)
        if not isinstance(engine, PolicyEngine):
            raise TypeError(f"call {self.name!r}: role {role or self.role!r} has no vocabulary; use actor or ref")
        return engine

    def value(self, role: str | None = None) -> ValueEngine:
        """Return the critic or reward model of `role` (the call's own by default).

        Raises:
            TypeError: that role has no scalar head.
        """
        engine = self._engine(role or self.role)
        if not isinstance(engine, ValueEngine):
            raise TypeError(
                f"call {self.name!r}: role {role or self.role!r} has no scalar head; use critic or a reward role"
            )
        return engine

    def has_role(self, role: str) -> bool:
        """True if this rank or another hosts `role`."""
        return role in self.engines or role in self.roles

    def reduce(self, stats: Stats) -> StatValues:
        """Return `stats` over all ranks, as numbers. Every rank must call it with the same keys."""
        return dict(stat_values(all_reduce_stats(stats, self.ranks.all_reduce_sum, self.ranks.all_reduce_max)))

    def _engine(self, role: str, *, deferred: bool = False) -> TrainingEngine:
        try:
            engine = self.engines[role]
        except KeyError:
            hosted = ", ".join(self.engines)
            raise KeyError(f"call {self.name!r} needs role {role!r}; this rank hosts {hosted}") from None
        if not deferred:
            self.working.enter_context(engine.on_device())
        return engine


ModelFunction: TypeAlias = Callable[[CallContext, StepBatch], StatValues]


def model_function(name: str) -> Callable[[ModelFunction], ModelFunction]:
    """Register a built-in model function as `name`; `config/plugin_code/catalog.py` finds this decorator."""
    return lambda function: function


def find_function(name: str) -> ModelFunction:
    """Return the registered function `name`, or the one at the import path `name`; import only the module that defines
    it.

    Raises:
        PluginError: there is no such function.
    """
    function: ModelFunction = resolve(MODEL_FUNCTION, name)
    return function


def run_call(function: ModelFunction, ctx: CallContext, batch: StepBatch) -> StatValues:
    """Run one call, and check that it wrote the columns declared in the graph.

    Raises:
        KeyError: a key of `reads` is missing before the call, or a key of `writes` after it.
    """
    for key in ctx.reads:
        if key not in batch:
            raise KeyError(f"call {ctx.name!r} reads {key!r}, which is not in the batch; no call before it wrote it")
    with ctx.working:
        stats = function(ctx, batch)
    for key in ctx.writes:
        if key not in batch:
            raise KeyError(f"call {ctx.name!r} says that it writes {key!r} but did not; set batch[{key!r}]")
    return stats


class TrainState:
    """Advantage estimator, objectives, the KL coefficient and the normalisation of values, as `algorithm` sets them."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        find = partial(resolve, plugins=algorithm.plugins)
        self.objective = Objective(objective_spec(algorithm), find)
        self.estimate: Callable[[AdvantageInputs], AdvantageOutput] = find(
            "advantage", algorithm.advantage.name, algorithm.advantage.params
        )
        self._algorithm, self._advantage = algorithm, algorithm.advantage.name
        self.kl = KLController(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)
        self.value_norm: ValueNorm | None = None
        if algorithm.critic.value_norm != ValueNormalisation.none:
            from asyncrl.algorithms.critic import ValueNorm  # only with a critic

            self.value_norm = ValueNorm(algorithm.critic.value_norm)
        self.baselines: dict[str, float] = {}
        """Baselines of the advantage estimator by role, if it keeps any; see `AdvantageInputs.baselines`."""

    @cached_property
    def value_objective(self) -> ValueObjective:
        """The critic's objective."""
        from asyncrl.algorithms.critic import ValueObjective  # only with a critic

        critic, find = self._algorithm.critic, partial(resolve, plugins=self._algorithm.plugins)
        return ValueObjective(_choice(critic.value_loss), _choice(self._algorithm.aggregation), find)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores; JSON-serialisable."""
        return {
            "kl": self.kl.state_dict(),
            "value_norm": None if self.value_norm is None else self.value_norm.state_dict(),
            "advantage": self._advantage,
            "baselines": self.baselines,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the baselines of another advantage estimator are left out."""
        self.kl.load_state_dict(state["kl"])
        if state.get("advantage", self._advantage) == self._advantage:  # older checkpoints do not name it
            self.baselines = dict(state.get("baselines", {}))
        if self.value_norm is not None:
            self.value_norm.load_state_dict(state["value_norm"])


def objective_spec(algorithm: AlgorithmConfig) -> ObjectiveSpec:
    """Return the actor's objective as `algorithm` sets it."""
    kl_in_loss = algorithm.kl_coef > 0.0 and algorithm.kl_in == KLIn.loss
    return ObjectiveSpec(
        policy_loss=_choice(algorithm.policy_loss),
        correction=_choice(algorithm.correction),
        selection=_choice(algorithm.selection),
        kl=_choice(algorithm.kl_estimator) if kl_in_loss else None,
        kl_coef=algorithm.kl_coef if kl_in_loss else 0.0,
        entropy_coef=algorithm.entropy_coef,
        log_ratio_coef=algorithm.log_ratio_coef,
        aggregation=_choice(algorithm.aggregation),
        prox=algorithm.prox,
    )


def _choice(config: ChoiceConfig) -> Choice:
    return Choice(config.name, dict(config.params))
