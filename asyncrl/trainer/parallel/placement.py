"""Workers of each role, as the settings lay them out. Torch-free."""

from __future__ import annotations

from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.config.trained_policies import config_of_policy, policy_and_role
from asyncrl.master.graph.builtin import load_graph
from asyncrl.master.graph.types import Graph
from asyncrl.trainer.engines import AUTO, ENGINES
from asyncrl.trainer.parallel.layout import Layout
from asyncrl.trainer.parallel.worker_grid import Placement as Placement
from asyncrl.trainer.parallel.worker_grid import WorkerGrid
from asyncrl.trainer.settings import RolePlacementConfig, RoleRanks


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
        name, wanted = role_placement(config, role)
        layout = actor.layout if wanted.parallel is None else layout_of(f"{name}.parallel", wanted.parallel)
        if wanted.ranks == RoleRanks.own:
            grids[role] = WorkerGrid.of(layout, workers)
            workers += layout.ranks
        elif layout.ranks <= actor.workers:
            grids[role] = WorkerGrid.of(layout)
        else:
            raise ConfigError(
                f"{name}.parallel={wanted.parallel!r}: {layout.ranks} ranks, more than the actor's {actor.workers} "
                f"(trainer.parallel={config.trainer.parallel!r}), on which it is to be; use a layout of at most "
                f"{actor.workers} ranks, or {name}.ranks=own"
            )
    return Placement(grids)


def engine_of(config: ExperimentConfig) -> str:
    """Return `trainer.engine`, or what it stands for if it is `auto`: the first engine that can train the layout."""
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
    """Return the settings that place `role`, which is not the actor, and the name of their group.

    The roles of further trained policies are where the actor is.
    """
    if policy_and_role(config, role)[0]:
        return "trainer", RolePlacementConfig()
    algorithm = config.algorithm
    if role == "critic":
        return "algorithm.critic", algorithm.critic
    if role == "ref":
        return "algorithm.reference", algorithm.reference
    if (teacher := algorithm.teacher_of(role)) is not None:
        return f"algorithm.teachers.{teacher.name}", teacher
    return f"algorithm.reward_models.{role}", algorithm.reward_models.get(role, RolePlacementConfig())


def model_of(config: ExperimentConfig, graph: Graph, role: str) -> str | None:
    """Return the folder of the model of `role`; None if the run makes it first, or if no call names one."""
    policy, name = policy_and_role(config, role)
    settings = config_of_policy(config, policy)
    own = {"actor": None, "critic": settings.algorithm.critic.path, "ref": settings.algorithm.reference.path}
    if name in own:
        return own[name] or settings.model.path
    paths = [str(call.args["path"]) for call in graph.calls if call.role == role and "path" in call.args]
    return paths[0] if paths else None
