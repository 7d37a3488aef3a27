"""Checks of the policy's model against its folder, and of the settings of its computation."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device, Dtype
from asyncrl.inference.settings import backends_that
from asyncrl.master.graph.builtin import load_graph
from asyncrl.master.graph.call_graph import GraphError
from asyncrl.models.folder_checks import hugging_face_folder
from asyncrl.models.model_config import read_model_config
from asyncrl.models.pictures.picture_rules import placeholder_in
from asyncrl.models.routers import routing_shape
from asyncrl.runtime.planning.plan_workers import with_types
from asyncrl.runtime.process.hardware import count_gpus
from asyncrl.trainer.settings import AttentionImplementation, KeptOn, VisionMode


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
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
