"""The sizes of a model that its configuration names: one table for layouts, memory, FLOPs and routing. Torch-free, so
that the launcher reads it.

Architectures have different names for the same size; each name that is read is in this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.models.model_config import read_model_config

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_top_k")


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
