"""Checks of ModelWorkers' settings in every run: models, layouts, devices, optimizers; `feature_checks` has others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

from asyncrl.algorithms.registry import ProximalMode
from asyncrl.comm.names import ACTOR, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError, Device, Dtype
from asyncrl.master.graph import GraphError, load_graph
from asyncrl.models.folder_checks import hugging_face_folder
from asyncrl.runtime.plan import plan_workers, with_types
from asyncrl.runtime.process.hardware import count_gpus, uncounted_gpus
from asyncrl.trainer.parallel.placement import Placement, placement, role_placement
from asyncrl.trainer.settings import OptimizerConfig, RoleRanks

CUTS = "asyncrl.trainer.parallel.checks"
"""Checks of layouts in which some rank has a part of a model, or of the tokens of a sequence."""


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    if config.model.path is not None:
        yield from hugging_face_folder("model.path", config.model.path)
    yield from of_policy(config)


def of_policy(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting of a policy's training."""
    for name, path in (
        ("algorithm.critic.path", config.algorithm.critic.path),
        ("algorithm.reference.path", config.algorithm.reference.path),
    ):
        if path is not None:
            yield from hugging_face_folder(name, path)
    yield from _layouts(config)
    for name, optimizer in (
        ("optimizer", config.optimizer),
        ("algorithm.critic.optimizer", config.algorithm.critic.optimizer),
    ):
        yield from _warmup(name, optimizer)


def _warmup(name: str, optimizer: OptimizerConfig) -> Iterator[str]:
    if optimizer.warmup_steps and optimizer.warmup_ratio:
        yield (
            f"{name}.warmup_ratio={optimizer.warmup_ratio}: {name}.warmup_steps={optimizer.warmup_steps} says it in "
            "steps; give one of them"
        )


def warnings(config: ExperimentConfig) -> Iterator[str]:
    """Yield a message for each setting that is slow, or weakens a correction: `setting=value: what follows`."""
    yield from _devices(config)
    yield from _long_warmup(config)
    config = with_types(config)
    sampling, generation = config.rollout.sampling, config.generation
    correction = config.algorithm.correction.name
    if correction == "none":
        return
    published = config.model.publish_dtype in (Dtype.auto, config.model.dtype)
    engine = generation.engine
    same = engine.same_arithmetic and generation.dtype == config.model.dtype and published and not engine.quantised
    if config.algorithm.prox == ProximalMode.behave and correction != "opsm" and not same:
        yield (
            f"algorithm.prox='behave': generation.backend={generation.backend!r} in {generation.dtype} rounds "
            f"otherwise than training in {config.model.dtype}, and algorithm.correction={correction!r}, which would "
            "weigh that, has every weight 1 then; use algorithm.prox=recompute where the two differ by much"
        )
    cut = [
        f"{name}={value:g}"
        for name, value, whole in (
            ("top_p", sampling.top_p, sampling.top_p >= 1.0),
            ("top_k", sampling.top_k, sampling.top_k <= 0),
            ("min_p", sampling.min_p, sampling.min_p <= 0.0),
        )
        if not whole
    ]
    if cut:
        yield (
            f"algorithm.correction={correction!r}: rollout.sampling.{', '.join(cut)} cuts tokens off that no "
            "importance weight brings back; ratios are those of the whole distributions, 1 on policy, and correct for "
            "stale and differing weights only (docs/algorithms.md, Truncated sampling)"
        )


def _long_warmup(config: ExperimentConfig) -> Iterator[str]:
    warmup, trainer = config.optimizer.warmup_steps, config.trainer
    total = config.total_train_steps * trainer.ppo_minibatches * trainer.ppo_epochs
    if warmup > total:
        yield (
            f"optimizer.warmup_steps={warmup}: the run has {total} optimizer steps (total_train_steps x "
            f"trainer.ppo_minibatches x trainer.ppo_epochs) and never reaches optimizer.lr={config.optimizer.lr:g}"
        )


def _devices(config: ExperimentConfig) -> Iterator[str]:
    """Warn of ranks that compute on another device, or slower, than the user may expect."""
    if files := uncounted_gpus():
        for name, device in (("trainer", config.trainer.device), ("generation", config.generation.device)):
            if device == Device.auto:
                yield (
                    f"{name}.device='auto': {files} is there, but neither /proc/driver/nvidia/gpus nor `nvidia-smi -L` "
                    "shows a GPU, so the CPU is used; have the driver's tools installed here, or set cpu"
                )
    on_gpus = any(plan.resources.gpus for plan in plan_workers(config) if plan.kind == MODEL_WORKER)
    if on_gpus and config.model.dtype == Dtype.float32:
        yield (
            "model.dtype='float32': GPUs compute it at about a tenth of bfloat16's rate; use auto, which has float32 "
            "masters, gradients and moments too"
        )


def _layouts(config: ExperimentConfig) -> Iterator[str]:
    try:
        graph = load_graph(config)
        placed = placement(config, graph)
    except GraphError:
        return  # the launcher reports the error
    except ConfigError as error:
        yield str(error)
        return
    for role in sorted(config.algorithm.reward_models.keys() - placed.grids.keys()):
        yield (
            f"algorithm.reward_models.{role}: graph {graph.name!r} has no such role; its roles are "
            f"{', '.join(placed.roles)}"
        )
    if placed.is_cut:
        yield from import_module(CUTS).problems(config, graph, placed)
    yield from _too_few_gpus(config, placed)


def _too_few_gpus(config: ExperimentConfig, placed: Placement) -> Iterator[str]:
    device, gpus, ranks = config.trainer.device, count_gpus(), placed.workers
    if device == Device.cuda and not gpus:
        yield "trainer.device='cuda': this machine shows no NVIDIA GPU; use cpu or auto, or start on one that has GPUs"
    if device == Device.cpu or not 0 < gpus < ranks:
        return
    roles = (role for role in placed.roles if role != ACTOR)
    own = {role: placed.grids[role] for role in roles if role_placement(config, role)[1].ranks == RoleRanks.own}
    actor, left = placed.actor, gpus - sum(grid.workers for grid in own.values())
    cut = str(replace(actor.layout, data=1, replicas=1)).removeprefix("d1")
    copies = left // actor.copy
    fits = f"use d{copies}{cut} or fewer" if copies else f"use a layout of at most {max(left, 1)} ranks"
    also = "".join(f" ({grid.workers} of them for {role})" for role, grid in own.items())
    yield (
        f"trainer.parallel={config.trainer.parallel!r}: {ranks} training ranks{also} want a GPU each and there are "
        f"{gpus}; {fits}, or trainer.device=cpu"
    )
