"""Checks of what a run need not set. For each policy: the functions that `algorithm`, filters and shaping name and how
they go together, teachers, Muon. Of the run: experts, pictures, profiles, attention, activations, turns of training.

`config/optional_checks.py` has the settings that ask for them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator

from asyncrl.algorithms.registry import KINDS, WHOLE_DISTRIBUTIONS, KLIn, ProximalMode, ValueNormalisation
from asyncrl.api.columns import TOKEN, check_name
from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code import catalog
from asyncrl.config.setting import ChoiceConfig, ConfigError, Device, Dtype
from asyncrl.data.tokenizers import vocabulary_difference
from asyncrl.inference.settings import backends_that
from asyncrl.master.graph import GraphError, load_graph
from asyncrl.models.folder_checks import hugging_face_folder
from asyncrl.models.model_config import placeholder_in, read_model_config, routing_shape
from asyncrl.runtime.plan import with_types
from asyncrl.runtime.process.hardware import count_gpus
from asyncrl.trainer.engines import ENGINES
from asyncrl.trainer.parallel.placement import engine_of, placement
from asyncrl.trainer.settings import (
    SOURCE_NUMBER,
    AlgorithmConfig,
    AttentionImplementation,
    KeptOn,
    OptimizerConfig,
    OptimizerName,
    ReferenceMode,
    RoleRanks,
    TeacherConfig,
    VisionMode,
)

NEEDS_VALUES = frozenset({"gae", "gae_turn"})
"""Advantages that are estimated from a critic's values; a test compares this list with the estimators' errors."""


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    yield from of_algorithm(config)
    yield from _routing(config)
    yield from _profile(config)
    yield from _pictures(config)
    yield from _attention(config)
    yield from _activations(config)
    yield from _publish_dtype(config)
    yield from _turns(config)


def of_algorithm(config: ExperimentConfig) -> Iterator[str]:
    """Yield the same for the algorithm and the optimizers of a policy."""
    yield from _proximal(config)
    yield from _kl_target(config.algorithm)
    yield from _teachers(config)
    yield from _of_layout(config)
    yield from _muon("optimizer", config.optimizer, config)
    yield from _muon("algorithm.critic.optimizer", config.algorithm.critic.optimizer, config)
    yield from other_tokenizers(config)
    unknown = list(_unknown(config))
    yield from unknown
    if not unknown:
        yield from _critic(config)
        yield from _combinations(config.algorithm)
        yield from _gdpo(config)


def _unknown(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each name or parameter that no registered function has."""
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


def _proximal(config: ExperimentConfig) -> Iterator[str]:
    """Refuse the behaviour policy in place of the proximal one if the two may differ."""
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


def _kl_target(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.kl_target and not algorithm.kl_coef:
        yield (
            f"algorithm.kl_target={algorithm.kl_target:g}: algorithm.kl_coef=0 is multiplied to reach it, and stays 0; "
            "give the coefficient to begin with, for example algorithm.kl_coef=0.01, or leave the target out"
        )


def _critic(config: ExperimentConfig) -> Iterator[str]:
    """Refuse an advantage that needs a critic's values in a graph without a critic."""
    choice = config.algorithm.advantage
    if choice.name not in NEEDS_VALUES:
        return
    try:
        calls = [call for call in load_graph(config).calls if call.function == "advantage" and not call.policy]
    except GraphError:
        return  # the launcher reports the error
    if calls and not any("values" in call.reads for call in calls):
        yield (
            f"algorithm.advantage={choice.name!r}: it needs a critic's values, and graph "
            f"{config.algorithm.graph!r} has no critic; use algorithm.graph=ppo, or an advantage without a critic, "
            "for example grpo or rloo"
        )


def _combinations(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Refuse a KL estimator in the wrong place, and choices that have no effect because of another choice."""
    if algorithm.kl_coef and algorithm.kl.name == "k3_unbiased" and algorithm.kl_in != KLIn.loss:
        yield (
            f"algorithm.kl.name='k3_unbiased': it weighs a term of the loss, and algorithm.kl_in={algorithm.kl_in} is "
            "elsewhere; use kl_in=loss, or kl.name=k1"
        )
    if algorithm.kl_coef and algorithm.kl.name in WHOLE_DISTRIBUTIONS and algorithm.kl_in == KLIn.reward:
        yield (
            f"algorithm.kl.name={algorithm.kl.name!r}: whole distributions are compared in the loss only, and "
            "algorithm.kl_in=reward is elsewhere; use kl_in=loss, or kl.name=k1"
        )
    if algorithm.selection.name == "m2po" and algorithm.prox != ProximalMode.recompute:
        yield (
            f"algorithm.selection='m2po': its ratios are those of the policy at the step's start, which algorithm.prox="
            f"{str(algorithm.prox)!r} does not compute; use algorithm.prox=recompute"
        )
    has_other_signal = algorithm.kl_coef or any(teacher.coef for teacher in algorithm.teachers)
    if algorithm.advantage.name == "zero" and not has_other_signal and not algorithm.entropy_coef:
        yield (
            "algorithm.advantage='zero': nothing would be learnt from; name a teacher, for example "
            "algorithm.teachers=[{name: big, path: FOLDER}]"
        )
    if algorithm.kl_coef and algorithm.kl_in == KLIn.advantage:
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


def _of_layout(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting that works only in another layout."""
    try:
        placed = placement(config, load_graph(config))
    except (GraphError, ConfigError):
        return  # other checks report the error
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


def _gdpo(config: ExperimentConfig) -> Iterator[str]:
    """Refuse GDPO without the parts of the reward that it compares."""
    algorithm, columns = config.algorithm, config.rollout.columns
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
    if algorithm.kl_coef and algorithm.kl_in == KLIn.reward:
        yield (
            "algorithm.advantage='gdpo': a KL term in the reward is none of the parts that it compares; use "
            "algorithm.kl_in=loss"
        )


def other_tokenizers(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each model that scores the policy's answers with a different vocabulary.

    A base model that does not exist yet is not checked.
    """
    algorithm, policy = config.algorithm, config.model.path
    scoring = {f"algorithm.teachers[{number}].path": each.path for number, each in enumerate(algorithm.teachers)}
    if algorithm.kl_coef:
        scoring["algorithm.reference.path"] = algorithm.reference.path
    for setting, path in scoring.items():
        if policy is not None and path is not None and (difference := vocabulary_difference(policy, path)):
            yield f"{setting}={path!r}: {difference}"


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


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def _teachers(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each teacher that has no model, or whose settings contradict each other or the run."""
    teachers = config.algorithm.teachers
    names = [teacher.name for teacher in teachers]
    mixed = [source.name or source.path for source in config.dataset.sources]
    for number, teacher in enumerate(teachers):
        setting = f"algorithm.teachers[{number}]"
        if not _NAME.fullmatch(teacher.name) or names.count(teacher.name) > 1:
            yield (
                f"{setting}.name={teacher.name!r}: give each teacher a name of its own, of letters, digits, '_' and "
                "'-', which begins with a letter; for example maths"
            )
        yield from _teacher_source(config, setting, teacher)
        if strays := sorted({*teacher.sources} - {*mixed}) if mixed else ():
            yield (
                f"{setting}.sources={teacher.sources}: {strays[0]!r} is not a name of dataset.sources, which are "
                f"{', '.join(mixed)}"
            )
    if config.algorithm.teacher_sources and SOURCE_NUMBER in config.rollout.columns:
        yield f"rollout.columns: {SOURCE_NUMBER!r} tells which teacher a sample has; give the field another name"
    if teachers:
        yield from _unread_teachers(config)


def _teacher_source(config: ExperimentConfig, setting: str, teacher: TeacherConfig) -> Iterator[str]:
    """Yield an error message if the source of a teacher's log-probabilities is missing or not valid."""
    given = {name: value for name in ("path", "policy", "column") if (value := getattr(teacher, name)) is not None}
    if len(given) != 1:
        yield (
            f"{setting}: the teacher {teacher.name!r} has {' and '.join(given) or 'no model'}; give one of path, a "
            "Hugging Face folder, policy and column"
        )
        return
    if teacher.path is None:
        yield from _scored_elsewhere(config, setting, teacher)
        return
    if config.trained_policies and teacher.sources:
        yield (
            f"{setting}.sources={teacher.sources}: with several trained `policies` a teacher is for all samples of its "
            "policy; leave the sources out"
        )
    yield from hugging_face_folder(f"{setting}.path", teacher.path)


def _scored_elsewhere(config: ExperimentConfig, setting: str, teacher: TeacherConfig) -> Iterator[str]:
    """Yield an error message for each wrong setting of a teacher that does not score on the training ranks."""
    name, sampling = "policy" if teacher.policy is not None else "column", config.rollout.sampling
    given = f"{setting}.{name}={getattr(teacher, name)!r}"
    if config.trained_policies:
        yield f"{given}: with several trained `policies` teachers score on the training ranks; use path"
    if teacher.parallel is not None or teacher.ranks != RoleRanks.shared:
        yield f"{given}: it is on no training rank; leave parallel and ranks out"
    if sampling.temperature != 1.0 or sampling.allowed_token_ids:
        yield (
            f"{given}: servers score at temperature 1 and over all tokens, and the policy is trained at "
            f"rollout.sampling.temperature={sampling.temperature:g}, allowed_token_ids={sampling.allowed_token_ids!r}; "
            "use path, or temperature 1 and all tokens"
        )
    if teacher.column is not None:
        if check_name(teacher.column) or not teacher.column.startswith(f"{TOKEN}/"):
            yield f"{given}: no column of tokens; write token/<name>, for example token/teacher"
        return
    fixed = [each.name for each in config.policies if (each.path or each.url) is not None and not each.trained]
    if teacher.policy not in fixed:
        yield (
            f"{given}: not one of `policies` that stays as it is ({', '.join(fixed) or 'there is none'}); add it, for "
            f"example policies=[{{name: {teacher.policy}, path: FOLDER}}], or with a url"
        )


def _unread_teachers(config: ExperimentConfig) -> Iterator[str]:
    """Yield a message if the graph, which may be the user's, leaves a teacher out."""
    try:
        calls = load_graph(config).calls
    except (GraphError, ValueError):
        return  # other checks report the error
    read = {key for call in calls if call.function == "advantage" and not call.policy for key in call.reads}
    for teacher in config.algorithm.teachers:
        if teacher.logprobs not in read:
            yield (
                f"algorithm.graph={config.algorithm.graph!r}: its advantage call does not read {teacher.logprobs!r}, "
                f"of algorithm.teachers {teacher.name!r}; give it the calls of asyncrl.master.graph.reference and the "
                "reads of kl_in_reward"
            )
