"""A training step as a graph of model function calls.

A call names the role whose workers run it, the function, the keys it reads and the keys it writes. Keys name columns of
the step's batch: some come with the trajectories (`BATCH_KEYS`), the others are written by a call. The edges follow
from the keys: the writer of a key runs before its readers. `after` adds an edge without a key, for example between two
calls that must train one after the other. The tensors behind the keys never leave the workers.

    ref_inf ──ref_logprobs──┐
    actor_inf ─prox_logprobs┴▶ actor_train        (advantage ──advantages──▶ actor_train)

`Graph.validate` finds every mistake that can be found before a process starts and names the calls in its error.

Built-in graphs
---------------
A graph is a function of the experiment's config; a user's own graph is a similar function, named by its import path.
All have the same structure: log-probabilities of the other policies if the config asks for them, advantages, training.
The loss, estimator and correction inside a call are chosen by the config (`algorithm.*`), not by the graph.
"""

from __future__ import annotations

import heapq
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.algorithms.registry import KLIn, ProximalMode
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.catalog import MODEL_FUNCTION, known
from asyncrl.config.plugin_code.import_paths import PluginError, definition, load_plugin
from asyncrl.config.setting import did_you_mean
from asyncrl.config.variants import config_of_policy, role_of_policy
from asyncrl.trainer.settings import SOURCE_NUMBER, TeacherConfig

__all__ = [
    "BATCH_KEYS",
    "POLICY_READS",
    "Call",
    "Graph",
    "GraphError",
    "kl_in_reward",
    "proximal",
    "reference",
    "written",
]

BATCH_KEYS: tuple[str, ...] = (
    "tokens",
    "loss_mask",
    "behave_logprobs",
    "versions",
    "rewards",
    "token_rewards",
    "truncated",
    "lengths",
    "rollouts",
    "group_ids",
    "episode_ids",
    "episodes",
    "minibatches",
)
"""Keys that every step's batch has before its first call; see `asyncrl.trainer.batches.step_batch`."""


TRAINED_ROLES: tuple[str, ...] = ("actor", "critic", "ref")
"""Roles whose models the config describes; any other role is a reward model, whose folder one of its calls names."""
MODEL_ARG = "path"
"""A call's argument for the Hugging Face folder of its role's model, if the role is not in `TRAINED_ROLES`."""


class GraphError(ValueError):
    """A graph that cannot run; the message names the calls."""


@dataclass(frozen=True, slots=True)
class Call:
    """One model function call.

    `function` is a registered name (`actor_train`) or an import path (`package.module:function`, `file.py:function`)
    of `fn(ctx, batch) -> dict[str, float]`. `args` are handed to it as `ctx.args`. `after` names calls that must run
    first. `policy` is the trained policy whose samples form its batch; empty: the run's own.
    """

    name: str
    role: str
    function: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    policy: str = ""


@dataclass(frozen=True, slots=True)
class Edge:
    """`source` runs before `target`; `keys` pass between them (none if the edge is explicit)."""

    source: str
    target: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """The calls of a training step; `BATCH_KEYS` exist before the first one.

    Each trained policy has a batch of its own samples, so keys pass between calls of one policy only.
    """

    name: str
    calls: tuple[Call, ...]

    def names(self) -> tuple[str, ...]:
        """Names of the calls, as written."""
        return tuple(call.name for call in self.calls)

    def roles(self) -> tuple[str, ...]:
        """The roles that the calls name, each once, as written."""
        return tuple(dict.fromkeys(call.role for call in self.calls))

    def edges(self) -> tuple[Edge, ...]:
        """Inferred and explicit edges, one per pair of calls, in the order of the calls. Needs unique writers."""
        writers = {(call.policy, key): call.name for call in self.calls for key in call.writes}
        edges: list[Edge] = []
        for call in self.calls:
            keys: dict[str, list[str]] = {source: [] for source in call.after}
            for key in call.reads:
                if (writer := writers.get((call.policy, key))) is not None:
                    keys.setdefault(writer, []).append(key)
            edges += [Edge(source, call.name, tuple(passed)) for source, passed in keys.items()]
        return tuple(edges)

    def predecessors(self) -> dict[str, frozenset[str]]:
        """Return, for every call, the names of the calls that must be done before it starts."""
        before: dict[str, set[str]] = {name: set() for name in self.names()}
        for edge in self.edges():
            before[edge.target].add(edge.source)
        return {name: frozenset(sources) for name, sources in before.items()}

    def order(self) -> tuple[Call, ...]:
        """Return a topological order, the same in every process: of the calls that may come next, the one written
        first.

        Raises:
            GraphError: the calls form a cycle; the message walks it.
        """
        position = {name: index for index, name in enumerate(self.names())}
        waiting = {name: set(sources) for name, sources in self.predecessors().items()}
        ready = [position[name] for name, sources in waiting.items() if not sources]
        heapq.heapify(ready)
        ordered: list[Call] = []
        while ready:
            call = self.calls[heapq.heappop(ready)]
            ordered.append(call)
            del waiting[call.name]
            for name, sources in waiting.items():
                if call.name in sources:
                    sources.remove(call.name)
                    if not sources:
                        heapq.heappush(ready, position[name])
        if waiting:
            raise GraphError(
                f"graph {self.name!r}: the calls form a cycle: {_cycle(waiting)}; remove one of these edges"
            )
        return tuple(ordered)

    def reward_models(self) -> dict[str, str]:
        """Return the reward models to load: for every role not in `TRAINED_ROLES`, the folder that its call names.

        Raises:
            GraphError: two calls name different folders for one role.
        """
        models: dict[str, str] = {}
        for call in self.calls:
            if call.role in TRAINED_ROLES or MODEL_ARG not in call.args:
                continue
            folder = str(call.args[MODEL_ARG])
            if models.setdefault(call.role, folder) != folder:
                raise GraphError(
                    f"graph {self.name!r}: call {call.name!r} gives role {call.role!r} the model {folder!r}, another "
                    f"call {models[call.role]!r}; a role has one model: use two roles"
                )
        return models

    def validate(self, functions: Collection[str], own: Collection[str] = ()) -> None:
        """Check the graph before it runs.

        Args:
            functions: registered model functions; a name with a colon is an import path and checked by its loader.
            own: the user's columns, which every batch also has (`rollout.columns`).

        Raises:
            GraphError: duplicate or unknown call names, two writers of a key, a key without a writer, a role without a
                host, an unknown function, or a cycle.
        """
        hosted_roles = {*TRAINED_ROLES, *self.reward_models()}
        if not self.calls:
            raise GraphError(f"graph {self.name!r} has no calls; return at least one Call from its function")
        self._check_names()
        self._check_writers()
        self._check_reads(own)
        for call in self.calls:
            if call.role not in hosted_roles:
                raise GraphError(
                    f"graph {self.name!r}: call {call.name!r} needs role {call.role!r}, which no worker hosts"
                    f"{did_you_mean(call.role, hosted_roles)}; hosted roles: {_listed(hosted_roles)}; "
                    f"for a reward model give the call args={{'{MODEL_ARG}': <folder>}}"
                )
            if ":" not in call.function and call.function not in functions:
                raise GraphError(
                    f"graph {self.name!r}: call {call.name!r} names the unknown function {call.function!r}"
                    f"{did_you_mean(call.function, functions)}; known: {_listed(functions)}; "
                    "your own: package.module:function"
                )
        self.order()

    def _check_names(self) -> None:
        repeated = [name for name, count in Counter(self.names()).items() if count > 1]
        if repeated:
            raise GraphError(f"graph {self.name!r} has several calls named {repeated[0]!r}; give each its own name")
        for call in self.calls:
            for source in call.after:
                if source not in self.names():
                    raise GraphError(
                        f"graph {self.name!r}: call {call.name!r} comes after {source!r}, which is not a call"
                        f"{did_you_mean(source, self.names())}; calls: {_listed(self.names())}"
                    )

    def _check_writers(self) -> None:
        writers: dict[str, str] = {}
        for call in self.calls:
            for key in call.writes:
                if key in BATCH_KEYS:
                    raise GraphError(
                        f"graph {self.name!r}: call {call.name!r} writes {key!r}, which comes with the trajectories; "
                        "write under another name and have the calls after it read that"
                    )
                if key in writers:
                    raise GraphError(
                        f"graph {self.name!r}: calls {writers[key]!r} and {call.name!r} both write {key!r}; "
                        "a key has one writer: rename one of the two"
                    )
                writers[key] = call.name

    def _check_reads(self, own: Collection[str]) -> None:
        written = {key for call in self.calls for key in call.writes}
        available = written.union(BATCH_KEYS, own)
        for call in self.calls:
            for key in call.reads:
                if key not in available:
                    raise GraphError(
                        f"graph {self.name!r}: call {call.name!r} reads {key!r}, which no call writes"
                        f"{did_you_mean(key, available)}; available keys: {_listed(available)}"
                    )


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _cycle(waiting: Mapping[str, set[str]]) -> str:
    """Return one cycle among calls that all wait for another of them, written in the direction of the edges."""
    name = next(iter(waiting))
    walked: list[str] = []
    while name not in walked:
        walked.append(name)
        name = min(source for source in waiting[name] if source in waiting)
    loop = [*walked[walked.index(name) :], name]
    return " -> ".join(repr(call) for call in reversed(loop))


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
    anchor = ("ref_logprobs",) if algorithm.kl_coef and algorithm.kl_in != KLIn.loss else ()
    teacher_logprobs = [key for teacher in algorithm.teachers for key in (teacher.logprobs, *_source(teacher))]
    return (*anchor, *dict.fromkeys(teacher_logprobs))


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
