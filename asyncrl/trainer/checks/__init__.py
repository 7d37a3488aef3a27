"""Checks of the ModelWorkers' settings."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from asyncrl.algorithms.registry import KINDS
from asyncrl.algorithms.spec import WHOLE_DISTRIBUTIONS, KLPlace, ProximalMode
from asyncrl.comm.names import ACTOR, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code import catalog
from asyncrl.config.setting import ChoiceConfig, ConfigError, Device, Dtype
from asyncrl.inference.settings import GenerationBackend, quantised
from asyncrl.master.graph.builtin import load_graph
from asyncrl.master.graph.types import GraphError
from asyncrl.models.pictures.picture_rules import placeholder_in
from asyncrl.models.routers import routing_shape
from asyncrl.plugins.datasets.tokenizers import vocabulary_difference
from asyncrl.runtime.planning.plan_workers import plan_workers, with_types
from asyncrl.runtime.process.hardware import count_gpus, uncounted_gpus
from asyncrl.runtime.process.stacks import py_spy
from asyncrl.trainer.checks import policies, teachers
from asyncrl.trainer.model import lora_checks
from asyncrl.trainer.model.folder_checks import hugging_face_folder
from asyncrl.trainer.parallel import checks as layout_checks
from asyncrl.trainer.parallel.placement import placement, role_placement
from asyncrl.trainer.parallel.worker_grid import Placement
from asyncrl.trainer.settings import AttentionImplementation, KeptOn, OptimizerConfig, RoleRanks, VisionMode

NEEDS_VALUES = frozenset({"gae", "gae_turn"})
"""Advantages that are estimated from a critic's values; a test compares this list with what each estimator refuses."""


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    if config.model.path is not None:
        yield from hugging_face_folder("model.path", config.model.path)
    yield from _routing(config)
    yield from _pictures(config)
    yield from _attention(config)
    yield from _profile(config)
    yield from _activations(config)
    yield from _publish_dtype(config)
    yield from _of_policy(config)
    yield from policies.check(config, _of_policy)


def _of_policy(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting of a policy's training."""
    for name, path in (
        ("algorithm.critic.path", config.algorithm.critic.path),
        ("algorithm.reference.path", config.algorithm.reference.path),
    ):
        if path is not None:
            yield from hugging_face_folder(name, path)
    yield from _layouts(config)
    yield from _proximal(config)
    yield from _kl(config)
    yield from other_tokenizers(config)
    yield from teachers.check(config)
    yield from _warmup("optimizer", config.optimizer)
    yield from _warmup("algorithm.critic.optimizer", config.algorithm.critic.optimizer)
    unknown = list(_algorithms(config))
    yield from unknown
    if not unknown:
        yield from _critic(config)
        yield from _parts_of_the_reward(config)


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
        return  # reported by others
    for rank in profile.ranks:
        if not 0 <= rank < ranks:
            yield f"profile.ranks={profile.ranks}: there is no model_worker/{rank}; use 0 to {ranks - 1}"
    if profile.stacks and py_spy() is None:
        yield "profile.stacks=true: py-spy is not installed; install the `profile` extra, or use profile.stacks=false"


def _publish_dtype(config: ExperimentConfig) -> Iterator[str]:
    chosen = config.model.publish_dtype
    if chosen == Dtype.float32 and with_types(config).model.dtype == Dtype.bfloat16:
        yield (
            "model.publish_dtype='float32': training in bfloat16 would publish the same values in twice the bytes; use "
            "auto"
        )


def _activations(config: ExperimentConfig) -> Iterator[str]:
    if config.trainer.activations_on == KeptOn.host and not config.trainer.gradient_checkpointing:
        yield (
            "trainer.activations_on='host': it moves the inputs of layers that are recomputed in the backward pass, "
            "and trainer.gradient_checkpointing=false recomputes none; set that to true, or use device"
        )


def _kl(config: ExperimentConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.kl_target and not algorithm.kl_coef:
        yield (
            f"algorithm.kl_target={algorithm.kl_target:g}: algorithm.kl_coef=0 is multiplied to reach it, and stays 0; "
            "give the coefficient to begin with, for example algorithm.kl_coef=0.01, or leave the target out"
        )


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
    algorithm, sampling, generation = config.algorithm, config.rollout.sampling, config.generation
    correction = algorithm.correction.name
    if correction == "none":
        return
    published = config.model.publish_dtype in (Dtype.auto, config.model.dtype)
    same = generation.backend == GenerationBackend.embedded and generation.dtype == config.model.dtype
    same = same and published and not quantised(generation)
    if algorithm.prox == ProximalMode.behave and correction != "opsm" and not same:
        yield (
            f"algorithm.prox='behave': generation.backend={str(generation.backend)!r} in {generation.dtype} rounds "
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
            "stale and differing weights only (docs/off_policy.md, Truncated sampling)"
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


def _routing(config: ExperimentConfig) -> Iterator[str]:
    """Refuse routing replay for a model without routers, or with servers that do not report expert choices."""
    setting, path = "moe.replay_routing=True", config.model.path
    if not config.moe.replay_routing:
        return
    if config.generation.backend == GenerationBackend.sglang:
        yield (
            f"{setting}: generation.backend='sglang' does not tell which experts it chose in a way that is shown to be "
            "right here; use generation.backend=embedded, or set moe.replay_routing=false"
        )
    if config.samples.replay:
        yield f"{setting}: kept samples do not tell which experts there were; set it to false to replay them"
    if path is None:
        yield f"{setting}: model.path=null is the demo's dense model, which has no experts; set it to false"
        return
    try:
        described = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # which `hugging_face_folder` says
    shape = routing_shape(described) if isinstance(described, dict) else ""
    if isinstance(shape, str):
        yield f"{setting}: model.path={path!r}: {shape}; set it to false"


def _proximal(config: ExperimentConfig) -> Iterator[str]:
    """The behaviour policy for the proximal one, where they need not be the same."""
    algorithm, eta = config.algorithm, config.max_head_offpolicyness
    refers = algorithm.policy_loss.name == "decoupled_ppo" or algorithm.correction.name not in ("none", "opsm")
    if algorithm.prox != ProximalMode.behave or not refers:
        return
    instead = (
        "use algorithm.prox=recompute, or a loss around the behaviour policy: algorithm.policy_loss.name=ppo_clip with "
        "algorithm.correction.name=none (or opsm)"
    )
    if eta > 0:
        yield (
            f"algorithm.prox='behave': with max_head_offpolicyness={eta} samples may be older than the policy at the "
            f"step's start, for which theirs would stand then; set max_head_offpolicyness=0, or {instead}"
        )
    if config.samples.replay:
        yield (
            f"algorithm.prox='behave': the samples of {config.samples.replay!r} need not be of the policy that is "
            f"trained here; {instead}"
        )


def _layouts(config: ExperimentConfig) -> Iterator[str]:
    try:
        graph = load_graph(config)
        placed = placement(config, graph)
    except GraphError:
        return  # which the launcher says itself
    except ConfigError as error:
        yield str(error)
        return
    yield from layout_checks.problems(config, graph, placed)
    yield from lora_checks.problems(config)
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


def _attention(config: ExperimentConfig) -> Iterator[str]:
    device, gpus, attention = config.trainer.device, count_gpus(), config.model.attn_implementation
    if attention not in (AttentionImplementation.flash_attention_2, AttentionImplementation.flex_attention):
        return
    if attention == AttentionImplementation.flex_attention and not config.trainer.share_prefixes:
        yield (
            f"model.attn_implementation={str(attention)!r}: it computes shared prefixes once and "
            "trainer.share_prefixes=false; set that to true, or use sdpa"
        )
    if attention == AttentionImplementation.flash_attention_2 and importlib.util.find_spec("flash_attn") is None:
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
    trained = {policy.name for policy in config.policies}  # `policies` refuses them
    for role in sorted(roles - {ACTOR, "ref", "critic"} - trained):
        yield f"algorithm.graph={config.algorithm.graph!r}: {other} a graph without the role {role}, which reads text"
    others = {"ref": ("algorithm.reference.path", config.algorithm.reference.path)}
    others["critic"] = ("algorithm.critic.path", config.algorithm.critic.path)
    for role in sorted(roles & others.keys()):
        name, path = others[role]
        if path is not None and placeholder_in(path) != placeholder:
            yield f"{name}={path!r}: {other} a model that takes pictures at the same token of the prompt"


def _critic(config: ExperimentConfig) -> Iterator[str]:
    """Refuse an advantage that needs a critic's values in a graph without a critic."""
    choice = config.algorithm.advantage
    if choice.name not in NEEDS_VALUES:
        return
    try:
        calls = [call for call in load_graph(config).calls if call.function == "advantage" and not call.policy]
    except GraphError:
        return  # which the launcher says itself
    if calls and not any("values" in call.reads for call in calls):
        yield (
            f"algorithm.advantage={choice.name!r}: it needs a critic's values, and graph "
            f"{config.algorithm.graph!r} has no critic; use algorithm.graph=ppo, or an advantage without a critic, "
            "for example grpo or rloo"
        )


def _parts_of_the_reward(config: ExperimentConfig) -> Iterator[str]:
    """GDPO without the parts that it compares, and a KL estimator in a place that it is not for."""
    algorithm, columns = config.algorithm, config.rollout.columns
    if algorithm.kl_coef and algorithm.kl.name == "k3_unbiased" and algorithm.kl_in != KLPlace.loss:
        yield (
            f"algorithm.kl.name='k3_unbiased': it weighs a term of the loss, and algorithm.kl_in={algorithm.kl_in} is "
            "elsewhere; use kl_in=loss, or kl.name=k1"
        )
    if algorithm.kl_coef and algorithm.kl.name in WHOLE_DISTRIBUTIONS and algorithm.kl_in == KLPlace.reward:
        yield (
            f"algorithm.kl.name={algorithm.kl.name!r}: whole distributions are compared in the loss only, and "
            "algorithm.kl_in=reward is elsewhere; use kl_in=loss, or kl.name=k1"
        )
    if algorithm.selection.name == "m2po" and algorithm.prox != ProximalMode.recompute:
        yield (
            f"algorithm.selection='m2po': its ratios are those of the policy at the step's start, which algorithm.prox="
            f"{str(algorithm.prox)!r} does not compute; use algorithm.prox=recompute"
        )
    taught = algorithm.kl_coef or any(teacher.coef for teacher in algorithm.teachers)
    if algorithm.advantage.name == "zero" and not taught and not algorithm.entropy_coef:
        yield (
            "algorithm.advantage='zero': nothing would be learnt from; name a teacher, for example "
            "algorithm.teachers=[{name: big, path: FOLDER}]"
        )
    if algorithm.kl_coef and algorithm.kl_in == KLPlace.advantage:
        if algorithm.kl_estimator.name != "k1":
            yield (
                f"algorithm.kl.name={algorithm.kl.name!r}: algorithm.kl_in=advantage needs the log-ratio itself, whose "
                "mean gradient is that of the reverse KL; use k1 or auto"
            )
        if algorithm.kl_target:
            yield (
                f"algorithm.kl_target={algorithm.kl_target:g}: the coefficient of algorithm.kl_in=advantage is fixed; "
                "set kl_target=0"
            )
    if algorithm.advantage.name != "gdpo":
        return
    named = algorithm.advantage.params.get("parts") or []
    missing = [name for name in named if f"reward/{name}" not in columns]
    if missing or not any(name.startswith("reward/") for name in columns):
        wanted = [f"reward/{name}" for name in missing] or ["reward/correct", "reward/format"]
        yield (
            f"algorithm.advantage='gdpo': it normalises the parts of the reward, which rollout.columns={list(columns)} "
            f"lacks; declare them, for example rollout.columns={wanted}"
        )
    if algorithm.kl_coef and algorithm.kl_in == KLPlace.reward:
        yield (
            "algorithm.advantage='gdpo': a KL term in the reward is none of the parts that it compares; use "
            "algorithm.kl_in=loss"
        )


def other_tokenizers(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each model that scores the policy's answers and to which its token ids mean something
    else. Nothing is known of a base model that is yet to be made.
    """
    algorithm, policy = config.algorithm, config.model.path
    scoring = {f"algorithm.teachers[{number}].path": each.path for number, each in enumerate(algorithm.teachers)}
    if algorithm.kl_coef:
        scoring["algorithm.reference.path"] = algorithm.reference.path
    for setting, path in scoring.items():
        if policy is not None and path is not None and (difference := vocabulary_difference(policy, path)):
            yield f"{setting}={path!r}: {difference}"


def _algorithms(config: ExperimentConfig) -> Iterator[str]:
    algorithm = config.algorithm
    choices: list[tuple[str, str, ChoiceConfig]] = [
        ("algorithm.policy_loss", "policy_loss", algorithm.policy_loss),
        ("algorithm.correction", "correction", algorithm.correction),
        ("algorithm.selection", "selection", algorithm.selection),
        ("algorithm.advantage", "advantage", algorithm.advantage),
        ("algorithm.aggregation", "aggregation", algorithm.aggregation),
        ("algorithm.kl", "kl", algorithm.kl_estimator),
        ("algorithm.critic.value_loss", "value_loss", algorithm.critic.value_loss),
        *((f"rollout.filters[{i}]", "filter", choice) for i, choice in enumerate(config.rollout.filters)),
        *((f"rollout.shaping[{i}]", "shaping", choice) for i, choice in enumerate(config.rollout.shaping)),
    ]
    try:
        for kind in KINDS:
            catalog.known(kind, algorithm.plugins)
    except ValueError as error:
        yield f"algorithm.plugins={algorithm.plugins}: {error}"
        return
    for name, kind, choice in choices:
        try:
            catalog.check(kind, choice.name, choice.params, algorithm.plugins)
        except ValueError as error:
            yield f"{name}={choice.name!r}: {error}"
