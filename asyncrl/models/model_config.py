"""The `config.json` of a model folder: the file itself, the sizes that it names, and whether the routers of a mixture
of experts can report and replay their choices. Torch-free, so that launcher and workers read it.

Architectures have different names for the same size; each name that is read is in this file: one table for layouts,
memory, FLOPs and routing.

A router's choices are recorded for every token of a sequence, every layer of the model and each of the token's experts:
an array [T, layers, per_token] of expert numbers (`asyncrl.api.Sample.routing`). Dense layers have an unused place too,
so that a layer is found by its number in the model, on ranks with any part of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CONFIG_FILE, TOKENIZER_CONFIG_FILE = "config.json", "tokenizer_config.json"
_ROPE_NAMES = {
    "gpt_neox": ("rotary_emb_base", "rotary_pct"),
    "gpt_neox_japanese": ("rotary_emb_base", "rotary_pct"),
}
"""Names of rotary base and share in transformers 4, where they are not `rope_theta` and `partial_rotary_factor`."""
_LOCAL_NAMES = {
    "modernbert": ("global_rope_theta", "local_rope_theta"),
    "modernbert-decoder": ("global_rope_theta", "local_rope_theta"),
}
"""Names of the rotary bases of full and sliding layers in transformers 4, where they are not `rope_theta` and
`rope_local_base_freq`."""
_LENGTH_BESIDE = ("phi3", "phi4_multimodal")
"""Model types whose original number of positions is beside the scaling in transformers 4, not in it."""
_RENAMED_EXPERTS = ("qwen3_moe", "qwen3_vl_moe_text")
"""Model types whose `num_local_experts` is `num_experts` in transformers 4."""
_TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast", "PythonBackend": "PreTrainedTokenizer"}
"""Names that transformers 4 has for classes of transformers 5, which knows both."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_top_k")
ROUTERS: Mapping[str, str] = {
    "mixtral": "MixtralTopKRouter",
    "qwen2_moe": "Qwen2MoeTopKRouter",
    "qwen3_moe": "Qwen3MoeTopKRouter",
    "olmoe": "OlmoeTopKRouter",
    "gpt_oss": "GptOssTopKRouter",
}
"""The class of the routers for each `model_type`. Each chooses by one `topk`, and a test shows that it can replay."""
PICTURE_TOKENS = ("image_token_id", "image_token_index")
"""Fields that may hold the id of the token that stands for a picture's rows."""
_LARGEST_BYTE = 255


def read_model_config(folder: str | Path) -> dict[str, Any]:
    """Return the content of `config.json` in the model folder `folder`; `~` is the home directory.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a JSON object.
    """
    found = json.loads((Path(folder).expanduser() / CONFIG_FILE).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def placeholder_id(config: Mapping[str, Any]) -> int | None:
    """Return the id of the token that is replaced by a picture's rows, from the content of `config.json`, or None."""
    if "vision_config" not in config:
        return None
    return next((int(config[name]) for name in PICTURE_TOKENS if config.get(name) is not None), None)


def placeholder_in(folder: str | Path) -> int | None:
    """As `placeholder_id`, for the model in `folder`; None also if its `config.json` cannot be read."""
    try:
        return placeholder_id(read_model_config(folder))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def for_all_versions(name: str, content: bytes) -> bytes:
    """Return the `content` of a model folder's file `name` so that transformers 4 and 5 read the same from it.

    transformers 4 silently takes default values for what transformers 5 writes elsewhere: rotary positions in
    `rope_parameters`, the type in `dtype`, the number of experts. Both forms are written. It fails on a tokenizer class
    or a list of tokens under names that only transformers 5 has; their older names are written, which both read. Other
    files, and what is not JSON, stay as they are.
    """
    if name not in (CONFIG_FILE, TOKENIZER_CONFIG_FILE):
        return content
    try:
        described = json.loads(content)
    except ValueError:
        return content
    if not isinstance(described, dict):
        return content
    changed = _both_forms(described) if name == CONFIG_FILE else _older_names(described)
    return content if changed == described else f"{json.dumps(changed, indent=2, ensure_ascii=False)}\n".encode()


def _both_forms(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config, and the configs in it, with rotary positions and type in the form of transformers 4 as well."""
    both = {name: _both_forms(value) if isinstance(value, dict) else value for name, value in config.items()}
    if isinstance(both.get("dtype"), str):
        both["torch_dtype"] = both["dtype"]
    if both.get("model_type") in _RENAMED_EXPERTS and "num_local_experts" in both:
        both["num_experts"] = both["num_local_experts"]
    if isinstance(rope := both.get("rope_parameters"), dict):
        kind = str(both.get("model_type"))
        theta, share = _ROPE_NAMES.get(kind, ("rope_theta", "partial_rotary_factor"))
        if isinstance(full := rope.get("full_attention"), dict):
            theta, local = _LOCAL_NAMES.get(kind, (theta, "rope_local_base_freq"))
            sliding = rope.get("sliding_attention")
            if isinstance(sliding, dict) and sliding.get("rope_theta") not in (None, full.get("rope_theta")):
                both[local] = sliding["rope_theta"]
            rope = full
        if "rope_theta" in rope:
            both[theta] = rope["rope_theta"]
        if "partial_rotary_factor" in rope:
            both[share] = rope["partial_rotary_factor"]
        scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
        plain = scaling.keys() <= {"rope_type", "type"} and scaling.get("rope_type", "default") == "default"
        if scaling.get("rope_type") == "longrope":  # Phi's classes take these keys and no other
            scaling["type"] = scaling.pop("rope_type")
            if kind in _LENGTH_BESIDE and "original_max_position_embeddings" in scaling:
                both["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
        both["rope_scaling"] = None if plain else scaling
    return both


def _older_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's config under the names of transformers 4."""
    older = dict(config)
    kind = older.get("tokenizer_class")
    if isinstance(kind, str) and kind in _TOKENIZER_CLASSES:
        older["tokenizer_class"] = _TOKENIZER_CLASSES[kind]
    if isinstance(older.get("extra_special_tokens"), list):
        tokens = older.pop("extra_special_tokens")
        if tokens:
            older["additional_special_tokens"] = tokens
    return older


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a decoder; 0 where the configuration does not give one.

    Attributes:
        query_heads, key_value_heads: heads of an attention layer; 0 if there is no attention.
        feed_forward: width of a layer's feed-forward, or of one expert.
        experts: experts per layer; 0 if the model is not a mixture of experts.
        shared_feed_forward: width of the feed-forward that every token goes through beside its experts.
        linked: reason why layers cannot be on different stages; empty if they can.
        layer_types: kinds of layers that the configuration names.
        query_key_norm: queries and keys are normalised; no configuration says it, the parameters do.
    """

    model_type: str
    layers: int = 0
    hidden: int = 0
    vocabulary: int = 0
    query_heads: int = 0
    key_value_heads: int = 0
    head_size: int = 0
    feed_forward: int = 0
    experts: int = 0
    experts_per_token: int = 0
    shared_feed_forward: int = 0
    linked: str = ""
    layer_types: frozenset[str] = frozenset()
    query_key_norm: bool = False

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> ModelFacts:
        """Read the content of a `config.json`; only the text part if there are several parts."""
        text = described.get("text_config") or described

        def size(*names: str) -> int:
            values = (text.get(name) for name in names)
            return next((value for value in values if isinstance(value, int) and value > 0), 0)

        heads, hidden, experts = size(*_HEADS), size(*_HIDDEN), size(*_EXPERTS)
        feed_forward = size("intermediate_size") or 4 * hidden
        if experts:
            feed_forward = size("moe_intermediate_size") or feed_forward
        shared = size("num_kv_shared_layers")
        return cls(
            model_type=str(described.get("model_type") or text.get("model_type", "")),
            layers=size(*_LAYERS),
            hidden=hidden,
            vocabulary=size("vocab_size"),
            query_heads=heads,
            key_value_heads=size("num_key_value_heads") or heads,
            head_size=size("head_dim") or (hidden // heads if heads else 0),
            feed_forward=feed_forward,
            experts=experts,
            experts_per_token=size(*_EXPERTS_PER_TOKEN) if experts else 0,
            shared_feed_forward=(size("shared_expert_intermediate_size") or size("n_shared_experts") * feed_forward)
            if experts
            else 0,
            linked=f"{shared} layers take their keys and values from layers before them" if shared else "",
            layer_types=frozenset(map(str, text.get("layer_types") or ())),
        )


def facts_of(path: str | None) -> ModelFacts | None:
    """Return the facts of the model in the folder `path`; None if it has no readable `config.json`."""
    if path is None:
        return None
    try:
        return ModelFacts.of(read_model_config(path))
    except (OSError, ValueError):
        return None


UNRECORDED = -1
"""An entry without a recorded choice of a router, which then chooses itself."""


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
    shape = routing_shape(read_model_config(path))
    if isinstance(shape, str):
        raise ValueError(f"moe.replay_routing=true: {shape}; set it to false")
    return shape
