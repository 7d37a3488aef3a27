"""Checks of ModelWorkers' settings: the policy's model and its computation, layouts, optimizers, trained policies."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

from asyncrl.algorithms.registry import WHOLE_DISTRIBUTIONS, ProximalMode, ValueNormalisation
from asyncrl.comm.names import ACTOR, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError, Device, Dtype
from asyncrl.inference.settings import backends_that
from asyncrl.master.graph import GraphError, load_graph
from asyncrl.models.folder_checks import hugging_face_folder
from asyncrl.models.model_config import placeholder_in, read_model_config, routing_shape
from asyncrl.runtime.plan import plan_workers, with_types
from asyncrl.runtime.process.hardware import count_gpus, uncounted_gpus
from asyncrl.trainer import algorithm_checks
from asyncrl.trainer.engines import ENGINES
from asyncrl.trainer.model import lora_checks
from asyncrl.trainer.parallel.placement import Placement, engine_of, placement, role_placement
from asyncrl.trainer.settings import (
    AttentionImplementation,
    KeptOn,
    OptimizerConfig,
    OptimizerName,
    ReferenceMode,
    RoleRanks,
    VisionMode,
)

CUTS = "asyncrl.trainer.parallel.checks"
"""Checks of layouts in which some rank has a part of a model, or of the tokens of a sequence."""


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    yield from _model(config)
    yield from _profile(config)
    yield from of_policy(config)
    yield from _turns(config)


def of_policy(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting of a policy's training."""
    for name, path in (
        ("algorithm.critic.path", config.algorithm.critic.path),
        ("algorithm.reference.path", config.algorithm.reference.path),
    ):
        if path is not None:
            yield from hugging_face_folder(name, path)
    yield from _layouts(config)
    yield from algorithm_checks.check(config)
    for name, optimizer in (
        ("optimizer", config.optimizer),
        ("algorithm.critic.optimizer", config.algorithm.critic.optimizer),
    ):
        yield from _warmup(name, optimizer)
        yield from _muon(name, optimizer, config)


def _profile(config: ExperimentConfig) -> Iterator[str]:
    profile = config.profile
    if not profile.steps:
        return
    last = config.total_train_steps
    for step in profile.steps:
        if not 1 <= step <= last:
            yield f"profile.steps={profile.steps}: {step} is not a step of the run; use 1 to {last}"
    try:
        ranks = placement(config, load_graph(config)).workers
    except ValueError:  # no layout, or no graph
        return  # other checks report the error
    for rank in profile.ranks:
        if not 0 <= rank < ranks:
            yield f"profile.ranks={profile.ranks}: there is no model_worker/{rank}; use 0 to {ranks - 1}"
    if profile.stacks:
        from asyncrl.runtime.process.stacks import py_spy

        if py_spy() is None:
            yield (
                "profile.stacks=true: py-spy is not installed; install the `profile` extra, or use profile.stacks=false"
            )


def _warmup(name: str, optimizer: OptimizerConfig) -> Iterator[str]:
    if optimizer.warmup_steps and optimizer.warmup_ratio:
        yield (
            f"{name}.warmup_ratio={optimizer.warmup_ratio}: {name}.warmup_steps={optimizer.warmup_steps} says it in "
            "steps; give one of them"
        )


def _muon(name: str, optimizer: OptimizerConfig, config: ExperimentConfig) -> Iterator[str]:
    if optimizer.name != OptimizerName.muon:
        if optimizer.muon_lr is not None:
            yield f"{name}.muon_lr={optimizer.muon_lr:g}: {name}.name='adamw' has no Muon; set {name}.lr, or name=muon"
        return
    setting = f"{name}.name='muon'"
    if optimizer.lr == 0.0 and optimizer.muon_lr:
        yield f"{name}.lr=0: Muon's rate follows its schedule, so muon_lr={optimizer.muon_lr:g} would be 0 too"
    if ENGINES[engine_of(config)].in_parts:
        yield f"{setting}: it moves whole matrices, which no rank of trainer.engine=sharded has; use flat, or adamw"
    if optimizer.moments_on == KeptOn.host:
        yield f"{setting}: {name}.moments_on='host' is for AdamW's moments; use moments_on=device, or adamw"
    if config.model.lora.rank:
        yield f"{setting}: model.lora.rank={config.model.lora.rank}: adapters are trained by AdamW; use adamw"


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
            f"trainer.ppo_minibatches x trainer.ppo_epochs) and never "
            f"reaches optimizer.lr={config.optimizer.lr:g}"
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
    yield from _not_supported(config, placed)
    yield from lora_checks.problems(config)
    yield from _too_few_gpus(config, placed)


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


def _model(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each fault of the policy's model, and of the settings of its computation."""
    if config.model.path is not None:
        yield from hugging_face_folder("model.path", config.model.path)
    yield from _routing(config)
    yield from _pictures(config)
    yield from _attention(config)
    yield from _activations(config)
    yield from _publish_dtype(config)


def _routing(config: ExperimentConfig) -> Iterator[str]:
    """Refuse routing replay for a model without routers, or with servers that do not report expert choices."""
    setting, path = "moe.replay_routing=True", config.model.path
    if not config.moe.replay_routing:
        return
    if not config.generation.engine.tells_experts:
        yield (
            f"{setting}: generation.backend={config.generation.backend!r} does not tell which experts it chose in "
            "a way that is shown to be right here; use generation.backend="
            f"{backends_that(lambda kind: kind.tells_experts)}, or set moe.replay_routing=false"
        )
    if config.samples.replay:
        yield f"{setting}: kept samples do not tell which experts there were; set it to false to replay them"
    if path is None:
        yield f"{setting}: model.path=null is the demo's dense model, which has no experts; set it to false"
        return
    try:
        shape = routing_shape(read_model_config(path))
    except (OSError, ValueError):
        return  # `hugging_face_folder` reports the error
    if isinstance(shape, str):
        yield f"{setting}: model.path={path!r}: {shape}; set it to false"


def _attention(config: ExperimentConfig) -> Iterator[str]:
    device, gpus, attention = config.trainer.device, count_gpus(), config.model.attn_implementation
    if attention != AttentionImplementation.flash_attention_2:
        return
    if importlib.util.find_spec("flash_attn") is None:
        yield (
            f"model.attn_implementation={str(attention)!r}: the package flash-attn is not installed; install it, or "
            "use sdpa"
        )
    if device == Device.cpu or (device == Device.auto and not gpus):
        yield (
            f"model.attn_implementation={str(attention)!r}: it computes on a GPU only and trainer.device="
            f"{str(device)!r} is a CPU here; use sdpa"
        )


def _pictures(config: ExperimentConfig) -> Iterator[str]:
    """Refuse settings that do not work with pictures yet."""
    model = config.model
    placeholder = None if model.path is None else placeholder_in(model.path)
    if placeholder is None or model.vision == VisionMode.none:
        return
    other = f"model.path={model.path!r} takes pictures; use model.vision=none, with which it is used for text alone, or"
    if config.moe.replay_routing:
        yield f"moe.replay_routing=true: {other} false: choices of experts are not replayed with pictures"
    try:
        roles = {call.role for call in load_graph(config).calls}
    except GraphError:
        return
    trained = {policy.name for policy in config.policies}  # the check of `policies` refuses these
    for role in sorted(roles - {ACTOR, "ref", "critic"} - trained):
        yield f"algorithm.graph={config.algorithm.graph!r}: {other} a graph without the role {role}, which reads text"
    others = {"ref": ("algorithm.reference.path", config.algorithm.reference.path)}
    others["critic"] = ("algorithm.critic.path", config.algorithm.critic.path)
    for role in sorted(roles & others.keys()):
        name, path = others[role]
        if path is not None and placeholder_in(path) != placeholder:
            yield f"{name}={path!r}: {other} a model that takes pictures at the same token of the prompt"


def _activations(config: ExperimentConfig) -> Iterator[str]:
    if config.trainer.activations_on == KeptOn.host and not config.trainer.gradient_checkpointing:
        yield (
            "trainer.activations_on='host': it moves the inputs of layers that are recomputed in the backward pass, "
            "and trainer.gradient_checkpointing=false recomputes none; set that to true, or use device"
        )


def _publish_dtype(config: ExperimentConfig) -> Iterator[str]:
    chosen = config.model.publish_dtype
    if chosen == Dtype.float32 and with_types(config).model.dtype == Dtype.bfloat16:
        yield (
            "model.publish_dtype='float32': training in bfloat16 would publish the same values in twice the bytes; use "
            "auto"
        )


def _turns(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message if no step trains the run's own policy, or some train none."""
    trainer = config.trainer
    if trainer.train_offset >= trainer.train_every:
        yield (
            f"trainer.train_offset={trainer.train_offset}: it is never the remainder of a version divided by "
            f"trainer.train_every={trainer.train_every}; use 0 to {trainer.train_every - 1}"
        )
    if not config.trained_policies and trainer.train_every > 1:
        yield (
            f"trainer.train_every={trainer.train_every}: other steps would train nothing; use 1, or train another "
            "one of `policies` too"
        )
