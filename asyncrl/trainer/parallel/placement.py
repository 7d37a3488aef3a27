"""Assign workers to each role, according to the settings. Torch-free."""

from __future__ import annotations

from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.config.trained_policies import config_of_policy, policy_and_role, role_of_policy
from asyncrl.master.graph.builtin import load_graph
from asyncrl.master.graph.call_graph import Graph
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
