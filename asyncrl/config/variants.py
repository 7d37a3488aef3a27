"""The settings of parts of a run that differ from the rest: evaluation sets, and further trained policies.

A set inherits from `eval`, and may have its own agent, environment and reward. The run's own policy has the name "" and
the roles `actor`, `critic`, `ref` and so on. Those of a further policy `judge` are `judge`, for its actor, `judge/ref`
and so on, so its weights are in `weights/judge`. A sample belongs to the policy named by the role of its comparison
group (`asyncrl.api.trajectory.role_of`), set by the policy's client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError, PluginConfig
from asyncrl.config.values import changed
from asyncrl.rollout.settings import EvalConfig, EvalSetConfig
from asyncrl.trainer.settings import ReferenceMode

CODE: Final = ("agent", "env", "reward")
"""Groups of settings in which an evaluation set may differ from training."""
_OF_THE_WORKER: Final = ("processes", "process_max_episodes")
"""Settings of these groups about processes that all episodes of a worker share."""
_Plugin = TypeVar("_Plugin", bound=PluginConfig)


@dataclass(frozen=True)
class EvaluationSet:
    """An evaluation set with all its settings.

    Attributes:
        group: the group of settings that defines it.
        code: by group of `CODE`, the set's settings that differ from training; see `with_code_of`.
    """

    group: str
    name: str
    path: str | None
    args: Mapping[str, Any]
    fields: Mapping[str, str]
    interval: int
    size: int
    n_samples: int
    temperature: float
    top_p: float
    max_new_tokens: int
    code: Mapping[str, PluginConfig]

    def is_due(self, version: int, total_train_steps: int) -> bool:
        """Return True if `version` is to be evaluated: every `interval`-th, the initial and the last one."""
        return self.interval > 0 and (version % self.interval == 0 or version == total_train_steps)


def evaluation_sets(config: ExperimentConfig) -> tuple[EvaluationSet, ...]:
    """Return the evaluation sets of the settings `eval`, in their order, including those that are never due."""
    common, training = config.eval, config.rollout.sampling
    fields = config.dataset.fields if common.fields is None else common.fields

    def first(*values: Any) -> Any:
        return next(value for value in values if value is not None)

    def one(group: str, own: EvalSetConfig, path: str | None, name: str) -> EvaluationSet:
        return EvaluationSet(
            group,
            name,
            path,
            own.args,
            own.fields,
            first(own.interval, common.interval),
            first(own.size, common.size),
            first(own.n_samples, common.n_samples),
            first(own.sampling.temperature, common.sampling.temperature, 0.0),
            first(own.sampling.top_p, common.sampling.top_p, training.top_p),
            first(own.sampling.max_new_tokens, common.sampling.max_new_tokens, training.max_new_tokens),
            _code(config, group, own),
        )

    if not common.sets:
        return (one("eval", EvalSetConfig(args=common.args, fields=fields), common.path, common.name),)
    return tuple(one(f"eval.sets[{number}]", own, own.path, own.name) for number, own in enumerate(common.sets))


def with_code_of(config: ExperimentConfig, each: EvaluationSet) -> ExperimentConfig:
    """Return `config` with the agent, environment and reward of an evaluation set in place of training's."""
    changed: dict[str, Any] = dict(each.code)
    if "reward" in changed:
        changed["rewards"] = []
    return replace(config, **changed)


def codes_of_sets(config: ExperimentConfig) -> dict[str, ExperimentConfig]:
    """Return `with_code_of` for each set with its own code that is ever evaluated, by the set's group of settings."""
    own = [each for each in evaluation_sets(config) if each.interval and each.code]
    return {each.group: with_code_of(config, each) for each in own}


def given_code(config: ExperimentConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the settings of evaluations that differ from training, with their names, such as `eval.sets[0].reward`."""
    for setting, _, given in _given("eval", config.eval):
        yield setting, given
    for number, own in enumerate(config.eval.sets):
        for setting, _, given in _given(f"eval.sets[{number}]", own):
            yield setting, given


def longest_answer(config: ExperimentConfig) -> int:
    """Return the largest number of tokens of an answer, in training or in an evaluation."""
    return max(config.rollout.sampling.max_new_tokens, *(one.max_new_tokens for one in evaluation_sets(config)))


def _given(group: str, owner: EvalConfig | EvalSetConfig) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name in CODE:
        if given := getattr(owner, name):
            yield f"{group}.{name}", name, given


def _code(config: ExperimentConfig, group: str, own: EvalSetConfig) -> dict[str, PluginConfig]:
    """Return the groups in which a set differs from training; the set's own settings win over those of `eval`.

    Raises:
        ConfigError: a setting is unknown, has a wrong type, or cannot differ for a set.
    """
    code: dict[str, PluginConfig] = {}
    of_all = _given("eval", config.eval)
    for setting, name, given in (*of_all, *(_given(group, own) if config.eval.sets else ())):
        if name == "reward" and config.rewards and "reward" not in code and "path" not in given:
            raise ConfigError(f"{setting}={given}: there are several `rewards`, not one to change; give it a path")
        code[name] = _changed(setting, name, code.get(name, getattr(config, name)), given)
    return code


def _changed(setting: str, name: str, before: _Plugin, given: Mapping[str, Any]) -> _Plugin:
    """Return `before` changed by `given`. If the class or function changes, the old one's arguments are dropped."""
    for key in _OF_THE_WORKER:
        if key in given:
            raise ConfigError(
                f"{setting}.{key}={given[key]}: training and all evaluation sets share these processes; set "
                f"{name}.{key}"
            )
    if "path" in given:
        of_the_worker = {key: getattr(before, key) for key in _OF_THE_WORKER if hasattr(before, key)}
        before = type(before)(**of_the_worker)
    return changed(setting, before, given)


SEPARATOR = "/"
CRITIC, REFERENCE = "critic", "ref"


def role_of_policy(policy: str, role: str) -> str:
    """Return the name in the run of a policy's `role`."""
    if not policy:
        return role
    return policy if role == ACTOR else f"{policy}{SEPARATOR}{role}"


def policy_and_role(config: ExperimentConfig, role: str) -> tuple[str, str]:
    """Return the policy that `role` of the run belongs to, and its role there: `judge` and `ref` for `judge/ref`."""
    policy, _, own = role.partition(SEPARATOR)
    if policy not in config.trained_policies:
        return "", role
    return policy, own or ACTOR


def is_changing(config: ExperimentConfig, role: str) -> bool:
    """True if the weights of `role` change in the run, so that checkpoints have them."""
    policy, own = policy_and_role(config, role)
    follows = config_of_policy(config, policy).algorithm.reference.mode == ReferenceMode.ema
    return own in (ACTOR, CRITIC) or (own == REFERENCE and follows)


def config_of_policy(config: ExperimentConfig, name: str) -> ExperimentConfig:
    """Return the settings of a run that trains only the policy `name`: this run's, changed by the policy's own.

    Raises:
        ConfigError: a setting of the policy does not exist, or has another type.
    """
    if not name:
        return config
    policy = next(policy for policy in config.policies if policy.name == name)
    algorithm = changed(f"policies: {name!r}: algorithm", config.algorithm, policy.algorithm)
    return replace(
        config,
        policies=[],
        model=replace(config.model, path=policy.path or config.model.path),
        trainer=replace(
            config.trainer,
            parallel=policy.parallel or config.trainer.parallel,
            train_every=policy.train_every,
            train_offset=policy.train_offset,
        ),
        optimizer=changed(f"policies: {name!r}: optimizer", config.optimizer, policy.optimizer),
        algorithm=replace(algorithm, critic=config.algorithm.critic) if policy.shared_critic else algorithm,
    )
