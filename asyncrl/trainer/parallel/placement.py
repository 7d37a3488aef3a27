"""Layouts of roles over ranks, and the workers that each role has. Torch-free.

A layout is written as `d2t2p2`, the grammar of `trainer.parallel` and of every role's separate layout:

    d<N>   N data-parallel ranks; each trains other samples, and the weights are sharded over all of them
    t<N>   every layer's matrices are cut into N tensor slices; the experts of a mixture are dealt to them whole
    p<N>   the layers are cut into N pipeline stages
    c<N>   the tokens of every micro-batch are cut into N parts (context parallel; Ulysses, arXiv 2309.14509); the
           weights are sharded over these ranks too, so `d2c2` holds a quarter of them on each rank, as `d4` does
    r<N>   N replicas of the `d` ranks (hybrid sharding): weights are sharded within a replica and equal in all
           replicas, so `r2d4` are 8 data-parallel ranks that hold a quarter of the weights each

Letters come in any order, each at most once; a missing one is 1. AReaL's `m` is accepted for `t`. `Layout.data` counts
all data-parallel ranks, replicas included; trajectories are distributed by this number.

Grids
-----
The ranks of a role form a grid of pipeline stages x data-parallel copies x parts of the tokens x tensor slices,
numbered row by row: the pipeline is the outermost axis, the tensor slices of one layer are neighbours, as
`torch.distributed.init_device_mesh` numbers its ranks. With 2 stages, 2 copies and 2 slices:

                      data 0              data 1
                  tensor 0  tensor 1  tensor 0  tensor 1
    pipeline 0        0         1         2         3
    pipeline 1        4         5         6         7

The actor's grid begins at worker 0, so there a worker's index is its rank. Its data index, by which trajectories are
distributed, differs as soon as there is more than one slice or stage: workers 0 and 2 above are the data heads of
copies 0 and 1.

Another role has a separate grid (`Placement`), on the actor's ranks or on separate workers. An actor at d2t2 on workers
0 to 3, the reference model at t2 on the same ranks, a critic at d2 on separate ranks:

    worker     0             1             2             3             4             5
    actor      dp0.tp0.pp0   dp0.tp1.pp0   dp1.tp0.pp0   dp1.tp1.pp0
    ref        dp0.tp0.pp0   dp0.tp1.pp0
    critic                                                             dp0.tp0.pp0   dp1.tp0.pp0

Trajectories always arrive at the actor's data heads, here workers 0 and 2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.config.variants import config_of_policy, policy_and_role, role_of_policy
from asyncrl.master.graph import Graph, load_graph
from asyncrl.trainer.engines import AUTO, ENGINES
from asyncrl.trainer.settings import RolePlacementConfig, RoleRanks

_PART = re.compile(r"([rdtmpc])([1-9][0-9]{0,3})")
_GRAMMAR = (
    "write d<N> data-parallel ranks, t<N> tensor slices, p<N> pipeline stages, c<N> parts of a micro-batch's tokens "
    "and r<N> replicas of d in any order, each once and 1 to 9999, for example d2 or d2t2p2"
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes over which a role's model is spread.

    Attributes:
        data: data-parallel ranks, replicas included.
        tensor, pipeline: tensor slices of a layer, stages of the model.
        replicas: number of complete copies of the weights; divides `data`.
        context: parts that the tokens of a micro-batch are cut into.

    Raises:
        ValueError: an axis is below 1, or `replicas` does not divide `data`.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.tensor, self.pipeline, self.replicas, self.context) < 1:
            raise ValueError(f"{self!r} has an axis below 1; set trainer.parallel to a layout like d2")
        if self.data % self.replicas:
            raise ValueError(f"{self!r}: {self.data} data-parallel ranks are not a whole number of replicas")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse a layout such as `d2t2p2`.

        Raises:
            ValueError: `text` is not a layout; the message describes the grammar.
        """
        found = _PART.findall(text)
        parts = [(letter.replace("m", "t"), size) for letter, size in found]
        sizes = {letter: int(size) for letter, size in parts}
        if not found or "".join(letter + size for letter, size in found) != text:
            raise ValueError(f"not a layout; {_GRAMMAR}")
        if len(sizes) < len(parts):
            twice = next(letter for letter in sizes if [part[0] for part in parts].count(letter) > 1)
            raise ValueError(f"{twice!r} is there twice; {_GRAMMAR}")
        replicas = sizes.get("r", 1)
        return cls(sizes.get("d", 1) * replicas, sizes.get("t", 1), sizes.get("p", 1), replicas, sizes.get("c", 1))

    @property
    def copy(self) -> int:
        """Ranks of one data-parallel copy: they process the same samples."""
        return self.tensor * self.pipeline * self.context

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.data * self.copy

    @property
    def shards(self) -> int:
        """Ranks over which the weights of one replica, of each tensor slice and stage, are sharded."""
        return self.data // self.replicas * self.context

    def __str__(self) -> str:
        """Return the layout in the grammar, without axes of size 1; `d1` if all are 1."""
        sizes = {
            "r": self.replicas,
            "d": self.data // self.replicas,
            "c": self.context,
            "t": self.tensor,
            "p": self.pipeline,
        }
        return "".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1) or "d1"


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """Return the contiguous layers of pipeline `stage` out of `stages`; sizes of stages differ by one at most."""
    return range(stage * layers // stages, (stage + 1) * layers // stages)


def slice_of(size: int, parts: int, index: int) -> range:
    """Return the `index`-th of `parts` slices of a dimension, as torch cuts it: at most ceil(size / parts) each."""
    each = -(-size // parts)
    return range(min(index * each, size), min((index + 1) * each, size))


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A worker's place on each axis, from 0."""

    pipeline: int
    data: int
    tensor: int
    context: int = 0

    def __str__(self) -> str:
        context = f".cp{self.context}" if self.context else ""
        return f"dp{self.data}{context}.tp{self.tensor}.pp{self.pipeline}"


@dataclass(frozen=True, slots=True)
class WorkerGrid(Layout):
    """A layout on consecutive workers; `first` is the worker at the origin.

    Raises:
        ValueError: as for `Layout`, or `first` is negative.
    """

    first: int = 0

    def __post_init__(self) -> None:
        Layout.__post_init__(self)
        if self.first < 0:
            raise ValueError(f"{self!r} begins before worker 0")

    @classmethod
    def of(cls, layout: Layout, first: int = 0) -> WorkerGrid:
        """Return `layout` on the workers from `first` on."""
        return cls(layout.data, layout.tensor, layout.pipeline, layout.replicas, layout.context, first)

    @property
    def layout(self) -> Layout:
        """The sizes of the axes, without the workers."""
        return Layout(self.data, self.tensor, self.pipeline, self.replicas, self.context)

    @property
    def workers(self) -> int:
        """Number of ModelWorkers of the grid."""
        return self.ranks

    @property
    def members(self) -> range:
        """Indices of the grid's workers."""
        return range(self.first, self.first + self.ranks)

    def worker_at(self, coordinates: Coordinates) -> int:
        """Return the index of the worker at `coordinates`."""
        copy = coordinates.pipeline * self.data + coordinates.data
        return self.first + (copy * self.context + coordinates.context) * self.tensor + coordinates.tensor

    def coordinates(self, worker: int) -> Coordinates:
        """Return the coordinates of `worker` in the grid.

        Raises:
            ValueError: it is not in the grid.
        """
        if worker not in self.members:
            raise ValueError(f"worker {worker} is not one of the {self.workers} of {self!r}")
        rest, tensor = divmod(worker - self.first, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(pipeline, data, tensor, context)

    @property
    def data_heads(self) -> tuple[int, ...]:
        """The first worker of each data-parallel copy, by data index; the actor's take the trajectories."""
        return tuple(self.worker_at(Coordinates(0, data, 0)) for data in range(self.data))

    @property
    def publisher(self) -> int:
        """The worker that completes published weights and checkpoints, and sends weights from its memory."""
        return self.first


@dataclass(frozen=True, slots=True)
class Placement:
    """Every role's grid: the only mapping from roles to workers.

    Attributes:
        grids: grid of each role, the actor included.

    Raises:
        ValueError: there is no actor, or a worker between the first and the last hosts nothing.
    """

    grids: Mapping[str, WorkerGrid]

    def __post_init__(self) -> None:
        if ACTOR not in self.grids:
            raise ValueError(f"a placement of {', '.join(self.grids) or 'no role'} has no {ACTOR}")
        hosting = {worker for grid in self.grids.values() for worker in grid.members}
        if idle := sorted(set(range(self.workers)) - hosting):
            raise ValueError(f"worker {idle[0]} hosts no role")

    @property
    def actor(self) -> WorkerGrid:
        """The actor's grid: its data heads take trajectories, its publisher publishes."""
        return self.grids[ACTOR]

    def grid(self, role: str) -> WorkerGrid:
        """Return the grid of `role`; the actor's if the role has no separate one."""
        return self.grids.get(role, self.actor)

    @property
    def distinct(self) -> tuple[WorkerGrid, ...]:
        """All grids, each once, the actor's first."""
        return tuple(dict.fromkeys((self.actor, *self.grids.values())))

    @property
    def workers(self) -> int:
        """Number of ModelWorkers of the run."""
        return max(grid.members.stop for grid in self.grids.values())

    @property
    def is_cut(self) -> bool:
        """True if some rank has a part of a model, or of the tokens of a sequence."""
        return any(grid.copy > 1 or grid.replicas > 1 for grid in self.grids.values())

    @property
    def roles(self) -> tuple[str, ...]:
        """All roles, the actor among them."""
        return tuple(self.grids)

    @property
    def members(self) -> dict[str, list[int]]:
        """The workers that host each role, in ascending order."""
        return {role: list(grid.members) for role, grid in self.grids.items()}

    def shards_of(self, worker: int) -> dict[str, Coordinates]:
        """Return the roles that `worker` hosts, with its place in the grid of each."""
        return {role: grid.coordinates(worker) for role, grid in self.grids.items() if worker in grid.members}


def worker_grid(config: ExperimentConfig) -> WorkerGrid:
    """Return the layout of the actor's ranks; its workers are the first ones.

    Raises:
        ConfigError: `trainer.parallel` is not a layout.
    """
    return WorkerGrid.of(layout_of("trainer.parallel", config.trainer.parallel))


def placement(config: ExperimentConfig, graph: Graph | None = None) -> Placement:
    """Return every role of the graph (default: the config's) and its workers; roles with separate ranks come last.

    Raises:
        ConfigError: a setting is not a layout, or a layout on the actor's ranks needs more ranks than the actor has.
        GraphError: the graph is not sound.
    """
    actor = worker_grid(config)
    grids, workers = {ACTOR: actor}, actor.workers
    for role in dict.fromkeys((*config.trained_policies, *(graph or load_graph(config)).roles())):
        if role == ACTOR:
            continue
        (name, wanted), host = role_placement(config, role), host_role(config, role)
        beside = grids[host]
        layout = beside.layout if wanted.parallel is None else layout_of(f"{name}.parallel", wanted.parallel)
        if wanted.ranks == RoleRanks.own:
            grids[role] = WorkerGrid.of(layout, workers)
            workers += layout.ranks
        elif layout.ranks <= beside.workers:
            grids[role] = WorkerGrid.of(layout, beside.first)
        else:
            raise ConfigError(
                f"{name}.parallel={wanted.parallel!r}: {layout.ranks} ranks, more than the {host}'s {beside.workers} "
                f"({layout_setting(config, host)}={str(beside.layout)!r}), on which it is to be; use a layout of at "
                f"most {beside.workers} ranks, or {name}.ranks=own"
            )
    return Placement(grids)


def engine_of(config: ExperimentConfig) -> str:
    """Return `trainer.engine`; for `auto`, the first engine that can train the layout."""
    if config.trainer.engine != AUTO:
        return config.trainer.engine
    alone = placement(config).workers == 1
    return next(name for name, engine in ENGINES.items() if alone or engine.in_parts)


def layout_of(name: str, value: str) -> Layout:
    """Return the layout that the setting `name` gives.

    Raises:
        ConfigError: `value` is not a layout.
    """
    try:
        return Layout.parse(value)
    except ValueError as error:
        raise ConfigError(f"{name}={value!r}: {error}") from error


def role_placement(config: ExperimentConfig, role: str) -> tuple[str, RolePlacementConfig]:
    """Return the settings that place `role`, which is not the actor, and the name of their group."""
    policy, own = policy_and_role(config, role)
    of = f"policies.{policy}." if policy else ""
    algorithm = config_of_policy(config, policy).algorithm
    if own == ACTOR:
        given = next(each for each in config.policies if each.name == policy)
        return f"policies.{policy}", RolePlacementConfig(given.parallel, given.ranks)
    if own == "critic":
        return f"{of}algorithm.critic", algorithm.critic
    if own == "ref":
        return f"{of}algorithm.reference", algorithm.reference
    if (teacher := algorithm.teacher_of(own)) is not None:
        return f"{of}algorithm.teachers.{teacher.name}", teacher
    return f"{of}algorithm.reward_models.{own}", algorithm.reward_models.get(own, RolePlacementConfig())


def host_role(config: ExperimentConfig, role: str) -> str:
    """Return the role whose ranks `role` shares if it has no separate ranks: its policy's actor, or the run's actor."""
    policy, own = policy_and_role(config, role)
    return ACTOR if own == ACTOR else role_of_policy(policy, ACTOR)


def layout_setting(config: ExperimentConfig, role: str) -> str:
    """Return the name of the setting with the layout of `role`, or of the role whose ranks it shares."""
    if role == ACTOR:
        return "trainer.parallel"
    name, own = role_placement(config, role)
    if own.parallel is not None or own.ranks == RoleRanks.own:
        return f"{name}.parallel"
    return layout_setting(config, host_role(config, role))


def model_of(config: ExperimentConfig, graph: Graph, role: str) -> str | None:
    """Return the folder of the model of `role`; None if the run makes it first, or if no call names one."""
    policy, name = policy_and_role(config, role)
    settings = config_of_policy(config, policy)
    own = {"actor": None, "critic": settings.algorithm.critic.path, "ref": settings.algorithm.reference.path}
    if name in own:
        return own[name] or settings.model.path
    paths = [str(call.args["path"]) for call in graph.calls if call.role == role and "path" in call.args]
    return paths[0] if paths else None
