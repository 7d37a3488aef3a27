"""Checks of ModelWorkers' settings: the policy's model and its computation, layouts, optimizers, trained policies."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

from asyncrl.algorithms.registry import ProximalMode
from asyncrl.comm.names import ACTOR, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError, Device, Dtype
from asyncrl.config.variants import config_of_policy
from asyncrl.inference.settings import backends_that
from asyncrl.master.graph import TRAINED_ROLES, GraphError, load_graph
from asyncrl.models.folder_checks import hugging_face_folder
from asyncrl.models.model_config import placeholder_in, read_model_config, routing_shape
from asyncrl.runtime.plan import plan_workers, with_types
from asyncrl.runtime.process.hardware import count_gpus, uncounted_gpus
from asyncrl.runtime.process.stacks import py_spy
from asyncrl.trainer import algorithm_checks
from asyncrl.trainer.engines import ENGINES
from asyncrl.trainer.model import lora_checks
from asyncrl.trainer.parallel import checks as layout_checks
from asyncrl.trainer.parallel.placement import Placement, engine_of, placement, role_placement
from asyncrl.trainer.settings import (
    AlgorithmConfig,
    AttentionImplementation,
    KeptOn,
    OptimizerConfig,
    OptimizerName,
    RoleRanks,
    VisionMode,
)


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    yield from _model(config)
    yield from _profile(config)
    yield from _of_policy(config)
    yield from _policies(config)


def _of_policy(config: ExperimentConfig) -> Iterator[str]:
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
    if profile.stacks and py_spy() is None:
        yield "profile.stacks=true: py-spy is not installed; install the `profile` extra, or use profile.stacks=false"


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
            f"{setting}: generation.backend={str(config.generation.backend)!r} does not tell which experts it chose in "
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


def _policies(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting that `policies` trained beside the run's own cannot have."""
    trainer = config.trainer
    if trainer.train_offset >= trainer.train_every:
        yield (
            f"trainer.train_offset={trainer.train_offset}: it is never the remainder of a version divided by "
            f"trainer.train_every={trainer.train_every}; use 0 to {trainer.train_every - 1}"
        )
    if not config.trained_policies:
        if trainer.train_every > 1:
            yield (
                f"trainer.train_every={trainer.train_every}: other steps would train nothing; use 1, or train another "
                "one of `policies` too"
            )
        return
    yield from _refused_with_policies(config)
    yield from _algorithm_with_policies("", config.algorithm)
    taken, of_run = _roles_of_run(config), set(_of_policy(config))
    for name in config.trained_policies:
        if name in taken:
            yield f"policies: {name!r}: it is a role of the run's own policy; give the trained policy another name"
        yield from _vocabulary(config, name)
        try:
            own = config_of_policy(config, name)
            own = replace(own, trainer=replace(own.trainer, engine=engine_of(config)))  # one engine for all
        except GraphError:
            continue  # the launcher reports the error
        except ConfigError as error:
            yield from {str(error)} - of_run
            continue
        yield from (f"policies: {name!r}: {message}" for message in _of_policy(own) if message not in of_run)
        yield from _algorithm_with_policies(f"policies: {name!r}: ", own.algorithm)
    for name in config.critic_sharers:
        yield from _shared_critic(config, name)


def _shared_critic(config: ExperimentConfig, name: str) -> Iterator[str]:
    """Yield an error message for each reason why the policy `name` cannot share the run's own critic."""
    setting = f"policies: {name!r}: shared_critic=true"
    given = next(policy.algorithm for policy in config.policies if policy.name == name)
    if "critic" in given:
        yield f"{setting}: its critic has the settings of algorithm.critic; leave critic out of the policy's algorithm"
    try:
        calls = [call for call in load_graph(config).calls if call.role == "critic"]
    except (GraphError, ConfigError):
        return  # other checks report the error
    for policy, whose in (("", "algorithm.graph"), (name, "the policy's algorithm.graph")):
        functions = {call.function for call in calls if call.policy == policy}
        if not functions:
            yield f"{setting}: {whose} has no critic; use algorithm.graph=ppo with algorithm.advantage=gae"
        elif unknown := sorted(functions - {"critic_inf", "critic_train"}):
            yield (
                f"{setting}: {whose} calls the critic with {unknown[0]!r}, and only of critic_inf and critic_train is "
                "known which one changes it; use these, or a critic of its own"
            )


def _roles_of_run(config: ExperimentConfig) -> set[str]:
    """The names of roles that the run's own policy may have."""
    try:
        return {*TRAINED_ROLES, *load_graph(replace(config, policies=[])).roles()}
    except (GraphError, ConfigError):
        return {*TRAINED_ROLES}  # other checks report the error


def _refused_with_policies(config: ExperimentConfig) -> Iterator[str]:
    """Yield each setting of the run that does not go with several trained policies."""
    model, several = config.model, "with several trained `policies`"
    if model.lora.rank:
        yield f"model.lora.rank={model.lora.rank}: {several} all weights are trained; use 0"
    if config.trainer.score_ahead:
        yield f"trainer.score_ahead=true: {several} their samples are scored in the step; use false"
    if config.moe.replay_routing:
        yield f"moe.replay_routing=true: {several} choices of experts are not replayed; use false"
    if model.path is not None and model.vision != VisionMode.none and placeholder_in(model.path) is not None:
        yield f"model.path={model.path!r} takes pictures: {several} models read text; use model.vision=none"
    for setting, value in (("samples.replay", config.samples.replay), ("samples.only", config.samples.only)):
        if value:
            yield f"{setting}={value!r}: {several} samples are not recorded to be trained later; leave it out"


def _algorithm_with_policies(whose: str, algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield an error message for each setting of one policy's training that several trained policies cannot have."""
    if algorithm.advantage.name == "remax":
        yield (
            f"{whose}algorithm.advantage='remax': with several trained `policies` a greedy answer has no reward of its "
            "own for each; use another estimator"
        )


def _vocabulary(config: ExperimentConfig, name: str) -> Iterator[str]:
    """Yield a message if the policy's model has another number of tokens than the run's own."""
    path = next(policy.path for policy in config.policies if policy.name == name)
    sizes = [_vocab_size(each) for each in (config.model.path, path) if each is not None]
    if len(sizes) == 2 and None not in sizes and sizes[0] != sizes[1]:
        yield (
            f"policies: {name!r}: path={path!r}: its vocabulary has {sizes[1]} tokens, and that of model.path="
            f"{config.model.path!r} {sizes[0]}; use a model with as many"
        )


def _vocab_size(path: str) -> int | None:
    try:
        size = read_model_config(path).get("vocab_size")
    except (OSError, ValueError):
        return None
    return size if isinstance(size, int) else None
