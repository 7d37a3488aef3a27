"""Mixtures of experts whose routers can report their choices and replay given ones. Torch-free: the launcher checks it.

The choices are recorded for every token of a sequence, every layer of the model and each of the token's experts: an
array [T, layers, per_token] of expert numbers (`asyncrl.api.Sample.routing`). Dense layers have an
unused place too, so that a layer is found by its number in the model, on ranks with any part of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.models.model_facts import ModelFacts

ROUTERS: Mapping[str, str] = {
    "mixtral": "MixtralTopKRouter",
    "qwen2_moe": "Qwen2MoeTopKRouter",
    "qwen3_moe": "Qwen3MoeTopKRouter",
    "olmoe": "OlmoeTopKRouter",
    "gpt_oss": "GptOssTopKRouter",
}
"""The class of the routers for each `model_type`. Each chooses by one `topk`, and a test shows that it can replay."""
_LARGEST_BYTE = 255


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """Shape of the choices of a model's routers: `per_token` of `experts`, in each of `layers` layers."""

    layers: int
    per_token: int
    experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type for every expert's number and one more, which marks choices that were not recorded."""
        return np.dtype(np.uint8 if self.experts <= _LARGEST_BYTE else np.uint16)


def routing_shape(described: Mapping[str, Any]) -> RoutingShape | str:
    """Return the shape of the choices of a model with this `config.json`, or the reason why they cannot be replayed."""
    facts, text = ModelFacts.of(described), described.get("text_config") or described
    model_type = str(text.get("model_type") or facts.model_type)
    if not facts.experts:
        return f"{model_type or 'it'} is a dense model: it has no experts, so there is nothing to replay"
    if model_type not in ROUTERS:
        return f"the routers of {model_type} are not known to choose by one topk, as those of {', '.join(ROUTERS)} do"
    if not facts.layers or not facts.experts_per_token:
        return "its config.json does not name num_hidden_layers and num_experts_per_tok"
    return RoutingShape(facts.layers, facts.experts_per_token, facts.experts)


def routing_shape_of(path: str) -> RoutingShape:
    """Return the shape of the choices of the model in the folder `path`.

    Raises:
        ValueError: the choices cannot be replayed; the message says why.
        OSError: there is no such model.
    """
    shape = routing_shape(json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8")))
    if isinstance(shape, str):
        raise ValueError(f"moe.replay_routing=true: {shape}; set it to false")
    return shape
