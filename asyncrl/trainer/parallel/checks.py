"""Check layouts before anything starts, against the models' `config.json`, the engine and the supported features."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.algorithms.registry import WHOLE_DISTRIBUTIONS, ValueNormalisation
from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.graph.call_graph import Graph
from asyncrl.models.model_facts import ModelFacts, facts_of
from asyncrl.models.pictures.picture_rules import placeholder_in
from asyncrl.trainer.engines import AUTO, ENGINES
from asyncrl.trainer.engines.sharded.architectures import refusals
from asyncrl.trainer.parallel.layout_limits import misfits
from asyncrl.trainer.parallel.placement import engine_of, layout_setting, model_of, placement
from asyncrl.trainer.parallel.worker_grid import Placement, WorkerGrid
from asyncrl.trainer.settings import AttentionImplementation, ReferenceMode, VisionMode


def problems(config: ExperimentConfig, graph: Graph, placed: Placement) -> Iterator[str]:
    """Yield an error message for each problem of the layouts of `placed`."""
    for role in sorted(config.algorithm.reward_models.keys() - placed.grids.keys()):
        yield (
            f"algorithm.reward_models.{role}: graph {graph.name!r} has no such role; its roles are "
            f"{', '.join(placed.roles)}"
        )
    yield from _models_that_do_not_fit(config, graph, placed, None)
    yield from _not_cut(config, placed)
    yield from _not_in_parts(config, graph, placed)
    yield from _not_supported(config, placed)


def base_model_problems(config: ExperimentConfig, graph: Graph, base: ModelFacts) -> Iterator[str]:
    """Yield error messages about layouts of the base model, which the run makes first if `model.path` is null."""
    yield from _models_that_do_not_fit(config, graph, placement(config, graph), base)


def _models_that_do_not_fit(
    config: ExperimentConfig, graph: Graph, placed: Placement, base: ModelFacts | None
) -> Iterator[str]:
    """Yield an error message for each layout that a role's model cannot be cut into.

    `base` is the model of roles without a folder.
    """
    said = set()
    for role, grid in placed.grids.items():
        name, path = layout_setting(config, role), model_of(config, graph, role)
        shape = base if path is None else facts_of(path)
        if shape is None:
            continue
        for problem in (*refusals(shape.model_type, grid.layout), *misfits(grid.layout, shape)):
            if (name, problem) not in said:  # a role with the actor's layout and model has the actor's problems
                said.add((name, problem))
                yield f"{name}={str(grid)!r}: {'' if role == ACTOR else f'role {role}: '}{problem}"


def _not_cut(config: ExperimentConfig, placed: Placement) -> Iterator[str]:
    chosen = config.trainer.engine
    if chosen == AUTO or ENGINES[chosen].in_parts:
        return
    for name, grid in _settings(config, placed).items():
        if grid.copy > 1 or grid.replicas > 1:
            yield (
                f"trainer.engine={chosen!r}: every rank has the whole model, and {name}={str(grid)!r} cuts it; "
                f"use d{grid.workers}, or trainer.engine=sharded"
            )


def _not_in_parts(config: ExperimentConfig, graph: Graph, placed: Placement) -> Iterator[str]:
    """Yield an error message for each feature that does not work if the tokens of a micro-batch are cut into parts."""
    said: set[tuple[str, str | None]] = set()
    attention = config.model.attn_implementation
    padded = attention in (AttentionImplementation.flash_attention_2, AttentionImplementation.eager)
    for role, grid in placed.grids.items():
        name, path = layout_setting(config, role), model_of(config, graph, role)
        if grid.context == 1 or (name, path) in said:
            continue
        if padded and not any(name == other for other, _ in said):
            yield (
                f"{name}={str(grid)!r}: sdpa works where ranks have parts of the tokens (c), and not "
                f"model.attn_implementation={str(attention)!r}; use sdpa, or c1"
            )
        said.add((name, path))
        if path is not None and config.model.vision != VisionMode.none and placeholder_in(path) is not None:
            whose = "" if role == ACTOR else f"role {role}: "
            yield (
                f"{name}={str(grid)!r}: {whose}the model in {path!r} takes pictures, whose tokens are not cut into "
                "parts (c); use c1, or model.vision=none for text alone"
            )


def _not_supported(config: ExperimentConfig, placed: Placement) -> Iterator[str]:
    """Yield an error message for each setting that works only in another layout."""
    algorithm, actor = config.algorithm, placed.actor
    together = placed.grid("ref") == actor
    if (
        algorithm.kl_estimator.name in WHOLE_DISTRIBUTIONS
        and algorithm.kl_coef
        and (ENGINES[engine_of(config)].in_parts or not together)
    ):
        yield (
            f"algorithm.kl={algorithm.kl_estimator.name!r}: whole distributions are compared where each rank has the "
            "whole model; use trainer.engine=flat with the reference on the actor's ranks, or another estimator, for "
            "example k3"
        )
    if config.trainer.compile and ENGINES[engine_of(config)].in_parts:
        yield (
            "trainer.compile=true: compiled parts of sharded layers are not supported; use trainer.engine=flat, or "
            "trainer.compile=false"
        )
    if algorithm.reference.mode == ReferenceMode.ema:
        if not together:
            yield (
                "algorithm.reference.mode='ema': the reference follows the actor part by part, so it needs the actor's "
                "layout; leave algorithm.reference.parallel null and its ranks shared"
            )
        if config.model.lora.rank:
            yield "algorithm.reference.mode='ema': the base of adapters does not move; use frozen, or model.lora.rank=0"
    if algorithm.critic.value_norm != ValueNormalisation.none and actor.first not in placed.grid("critic").members:
        yield (
            f"algorithm.critic.value_norm={str(algorithm.critic.value_norm)!r}: it is kept on the actor's first rank; "
            "use algorithm.critic.ranks=shared, or value_norm=none"
        )


def _settings(config: ExperimentConfig, placed: Placement) -> dict[str, WorkerGrid]:
    """Return the grids by the setting of their layout; roles with the same setting have one grid."""
    return {layout_setting(config, role): grid for role, grid in placed.grids.items()}
