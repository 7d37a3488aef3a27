"""The built-in graphs, and how the config's graph is found.

A graph is a function of the experiment's config; a user's own graph is a similar function, named by its import path.
All have the same structure: log-probabilities of the other policies if the config asks for them, advantages, training.
The loss, estimator and correction inside a call are chosen by the config (`algorithm.*`), not by the graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from asyncrl.algorithms.registry import KLPlace, ProximalMode
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.catalog import known
from asyncrl.config.plugin_code.import_paths import PluginError, definition, load_plugin
from asyncrl.config.plugin_code.signatures import MODEL_FUNCTION
from asyncrl.config.suggestions import did_you_mean
from asyncrl.config.trained_policies import config_of_policy, role_of_policy
from asyncrl.master.graph.call_graph import MODEL_ARG, Call, Graph, GraphError
from asyncrl.trainer.settings import SOURCE_NUMBER, TeacherConfig

CRITIC, CRITIC_TRAIN = "critic", "critic_train"
POLICY_READS = ("tokens", "loss_mask", "behave_logprobs", "versions", "advantages")


def proximal(config: ExperimentConfig) -> tuple[Call, ...]:
    """Return the call that recomputes the proximal log-probabilities at the step's start, if `algorithm.prox` asks for
    it.
    """
    if config.algorithm.prox != ProximalMode.recompute:
        return ()
    return (Call("actor_inf", "actor", "actor_inf", reads=("tokens", "loss_mask"), writes=("prox_logprobs",)),)


def reference(config: ExperimentConfig) -> tuple[Call, ...]:
    """Return the calls for log-probabilities under the reference model, if a KL term needs them, and the teachers."""
    anchor = Call("ref_inf", "ref", "ref_inf", reads=("tokens", "loss_mask"), writes=("ref_logprobs",))
    return (*((anchor,) if config.algorithm.kl_coef else ()), *_teachers(config))


def _teachers(config: ExperimentConfig) -> tuple[Call, ...]:
    return tuple(
        Call(
            f"{teacher.role}_inf",
            teacher.role,
            "teacher_inf",
            reads=("tokens", "loss_mask", *_source(teacher)),
            writes=(teacher.logprobs,),
            args={MODEL_ARG: teacher.path},
        )
        for teacher in config.algorithm.teachers
        if teacher.path is not None
    )


def _source(teacher: TeacherConfig) -> tuple[str, ...]:
    return (SOURCE_NUMBER,) if teacher.sources else ()


def kl_in_reward(config: ExperimentConfig) -> tuple[str, ...]:
    """Return the additional keys that the advantage call reads: those of the teachers, and the reference's if the KL
    term is part of the reward or the advantage.
    """
    algorithm = config.algorithm
    anchor = ("ref_logprobs",) if algorithm.kl_coef and algorithm.kl_in != KLPlace.loss else ()
    taught = [key for teacher in algorithm.teachers for key in (teacher.logprobs, *_source(teacher))]
    return (*anchor, *dict.fromkeys(taught))


def written(*calls: Call) -> tuple[str, ...]:
    """Return the keys that `calls` write."""
    return tuple(key for call in calls for key in call.writes)


def grpo(config: ExperimentConfig) -> Graph:
    """Group-normalised advantages, no critic."""
    return _without_critic("grpo", config, *reference(config), *proximal(config))


def reinforce(config: ExperimentConfig) -> Graph:
    """The plain policy gradient, with behaviour log-probabilities only and no proximal policy."""
    return _without_critic("reinforce", config, *reference(config))


def dapo(config: ExperimentConfig) -> Graph:
    """GRPO with dynamic sampling: groups without a signal are filtered before the advantages."""
    filtering = Call("filter", "actor", "filter", reads=("rewards", "loss_mask"), writes=("keep",))
    return _without_critic("dapo", config, *reference(config), *proximal(config), filtering)


def _without_critic(name: str, config: ExperimentConfig, *before: Call) -> Graph:
    """Return the graph of the calls `before`, the advantages from the rewards, and the actor's training with all keys
    written.
    """
    keep = ("keep",) if "keep" in written(*before) else ()
    reads = ("rewards", "loss_mask", *keep, *kl_in_reward(config))
    advantage = Call("advantage", "actor", "advantage", reads=reads, writes=("advantages",))
    train = Call("actor_train", "actor", "actor_train", reads=(*POLICY_READS, *written(*before)))
    return Graph(name, (*before, advantage, train))


def ppo(config: ExperimentConfig) -> Graph:
    """Actor and critic, which run at the same time if they are on different workers."""
    logprobs = (*reference(config), *proximal(config))
    kl_keys = kl_in_reward(config)
    sequence = ("tokens", "loss_mask")
    calls = (
        *logprobs,
        Call("critic_inf", "critic", "critic_inf", reads=sequence, writes=("values",)),
        Call(
            "advantage",
            "actor",
            "advantage",
            reads=("rewards", "truncated", "loss_mask", "values", *kl_keys),
            writes=("advantages", "returns", "value_mask"),
        ),
        Call("critic_train", "critic", "critic_train", reads=(*sequence, "values", "returns", "value_mask")),
        Call("actor_train", "actor", "actor_train", reads=(*POLICY_READS, *written(*logprobs))),
    )
    return Graph("ppo", calls)


BUILTIN: dict[str, Callable[..., Graph]] = {"grpo": grpo, "ppo": ppo, "dapo": dapo, "reinforce": reinforce}


def load_graph(config: ExperimentConfig) -> Graph:
    """Return the graph of a step: that of the run's own policy, and for each further trained policy the graph of its
    settings.

    Raises:
        GraphError: as `_graph_of_policy`.
        ConfigError: a further policy's settings are wrong.
    """
    graph = _graph_of_policy(config)
    calls = [
        call
        for name in config.trained_policies
        for call in _calls_of(name, config_of_policy(config, name), shared=name in config.critic_sharers)
    ]
    return replace(graph, calls=tuple(_in_turns([*graph.calls, *calls]))) if calls else graph


def _in_turns(calls: Sequence[Call]) -> Iterator[Call]:
    """Yield the calls of all policies. Calls that train a shared critic run one after the other, once all policies have
    the values of their samples.
    """
    before = [call.name for call in calls if call.role == CRITIC and call.function != CRITIC_TRAIN]
    for call in calls:
        if call.role != CRITIC or call.function != CRITIC_TRAIN:
            yield call
            continue
        yield replace(call, after=(*call.after, *before))
        before.append(call.name)


def _calls_of(policy: str, config: ExperimentConfig, *, shared: bool) -> Iterator[Call]:
    """Yield the calls of a further trained policy with these settings: `judge/actor_train` with the role `judge`.

    Args:
        shared: its critic is that of the run's own policy.
    """
    for call in _graph_of_policy(config).calls:
        yield replace(
            call,
            name=role_of_policy(policy, call.name),
            role=CRITIC if shared and call.role == CRITIC else role_of_policy(policy, call.role),
            after=tuple(role_of_policy(policy, name) for name in call.after),
            policy=policy,
        )


def _graph_of_policy(config: ExperimentConfig) -> Graph:
    """Return the graph named in `algorithm.graph`, built for `config` and validated.

    A user's graph function is called; the model functions that its calls name are only looked up in their sources.

    Raises:
        GraphError: no such graph, wrong `algorithm.graph_args`, an import path without a function, or an error that
            `Graph.validate` finds.
    """
    name = config.algorithm.graph
    graph = _build(name, _builder(name), config)
    graph.validate(known(MODEL_FUNCTION), config.columns)
    for call in graph.calls:
        if ":" in call.function:
            try:
                definition(call.function)
            except PluginError as error:
                raise GraphError(f"graph {graph.name!r}: call {call.name!r}: {error}") from error
    return graph


def _builder(name: str) -> Callable[..., Any]:
    if name in BUILTIN:
        return BUILTIN[name]
    if not {":", "."} & set(name):
        raise GraphError(
            f"algorithm.graph={name!r}: no such graph{did_you_mean(name, BUILTIN)}; built-in: {', '.join(BUILTIN)}; "
            "your own: package.module:function or path/to/file.py:function"
        )
    try:
        builder = load_plugin(name)
    except PluginError as error:
        raise GraphError(f"algorithm.graph={error}") from error
    if not callable(builder):
        raise GraphError(
            f"algorithm.graph={name!r}: not a function; name one that takes the config and returns a Graph"
        )
    return builder  # type: ignore[no-any-return]  # what a plug-in returns is checked by the caller


def _build(name: str, builder: Callable[..., Any], config: ExperimentConfig) -> Graph:
    args = config.algorithm.graph_args
    try:
        inspect.signature(builder).bind(config, **args)
    except TypeError as error:
        takes = ", ".join(list(inspect.signature(builder).parameters)[1:]) or "no arguments"
        raise GraphError(f"algorithm.graph_args={args}: {name}: {error}; it takes {takes} beside the config") from error
    graph = builder(config, **args)
    if not isinstance(graph, Graph):
        raise GraphError(
            f"algorithm.graph={name!r}: it returned {type(graph).__name__}; return an asyncrl.master.graph Graph"
        )
    return graph
