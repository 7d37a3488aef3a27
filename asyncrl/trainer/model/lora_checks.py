"""Check `model.lora` before anything starts, against peft and the names of the model's weights. Torch-free."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.models.folder_checks import read_header
from asyncrl.models.model_config import placeholder_in
from asyncrl.trainer.settings import ALL_LINEAR, LoraConfig, LoraPublish

_LAYER_WEIGHT = re.compile(r"(?:^|\.)\w+\.\d+\.(?:.*\.)?(\w+)\.weight$")


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each problem of an experiment's adapters; see `lora_problems`."""
    yield from lora_problems(config.model.lora, config.model.path)
    if config.model.lora.rank and config.model.lora.publish == LoraPublish.adapter:
        for needed in _needs_whole_weights(config):
            yield f"model.lora.publish='adapter': {needed}; use merged, or auto"
    if config.model.publish_dtype != Dtype.auto and publishes_adapters(config):
        yield (
            f"model.publish_dtype={str(config.model.publish_dtype)!r}: versions are adapters, which stay as they are "
            "trained; use auto, or model.lora.publish=merged"
        )


def publishes_adapters(config: ExperimentConfig) -> bool:
    """Return True if a version of the policy holds adapters alone."""
    lora = config.model.lora
    if not lora.rank or lora.publish == LoraPublish.merged:
        return False
    return lora.publish == LoraPublish.adapter or not any(_needs_whole_weights(config))


def _needs_whole_weights(config: ExperimentConfig) -> Iterator[str]:
    """Yield each reason why servers cannot load adapters."""
    if not config.generation.engine.loads_adapters:
        yield f"generation.backend={config.generation.backend!r} loads whole weights"
    if config.manager.weight_transport != "disk":
        yield f"manager.weight_transport={config.manager.weight_transport!r} sends whole weights"
    if config.model.path is not None and placeholder_in(config.model.path) is not None:
        yield f"model.path={config.model.path!r} takes pictures: in its folder layers have other names than adapters do"
    if not config.system.shared_filesystem:
        yield (
            "system.shared_filesystem=false: adapters name the folder of their base model, which is another on each "
            "host"
        )


def lora_problems(lora: LoraConfig, path: str | None) -> Iterator[str]:
    """Yield an error message for each problem of adapters of the model in `path`."""
    if not lora.rank:
        return
    if importlib.util.find_spec("peft") is None:
        yield (
            f"model.lora.rank={lora.rank}: peft is not installed in this environment; install the `lora` extra "
            "(asyncrl[lora]), or use model.lora.rank=0"
        )
    if lora.alpha == 0:
        yield "model.lora.alpha=0: adapters scaled by nothing train nothing; use a number above 0, for example 2 x rank"
    if not lora.targets:
        yield f"model.lora.targets=[]: no layer gets an adapter; name some, or [{ALL_LINEAR}]"
    kinds = [] if path is None else layer_kinds(Path(path).expanduser())
    for target in lora.targets:
        if kinds and target not in (ALL_LINEAR, *kinds):
            yield (
                f"model.lora.targets={lora.targets}: no layer of model.path={path!r} is called "
                f"{target!r}; use some of {', '.join(kinds)}, or {ALL_LINEAR}"
            )


def layer_kinds(folder: Path) -> list[str]:
    """Return the names of matrices in the numbered layers of the model in `folder`; empty if its safetensors have none.

    transformers keeps experts in one tensor, but files may still have one tensor per expert; training reports those.
    """
    kinds: set[str] = set()
    for file in folder.glob("*.safetensors"):
        try:
            header = read_header(file)
        except (OSError, ValueError):
            return []  # `hugging_face_folder` reports the error
        matrices = [name for name, tensor in header.items() if len(tensor.get("shape", ())) == 2]
        kinds |= {found[1] for name in matrices if (found := _LAYER_WEIGHT.search(name))}
    return sorted(kinds)
