"""A training step as a graph of model function calls.

A call names the role whose workers run it, the function, the keys it reads and the keys it writes. Keys name columns of
the step's batch: some come with the trajectories (`BATCH_KEYS`), the others are written by a call. The edges follow
from the keys: the writer of a key runs before its readers. `after` adds an edge without a key, for example between two
calls that must train one after the other. The tensors behind the keys never leave the workers.

    ref_inf ──ref_logprobs──┐
    actor_inf ─prox_logprobs┴▶ actor_train        (advantage ──advantages──▶ actor_train)

`Graph.validate` finds every mistake that can be found before a process starts and names the calls in its error.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.suggestions import did_you_mean

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
