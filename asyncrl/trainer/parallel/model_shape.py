"""Limits on the layouts of a model, read from its `config.json`. Torch-free: the launcher uses it.

- A tensor slice has whole attention heads, and all slices have equally many query heads. Key and value heads are
  distributed too. If there are fewer of them than slices, several slices hold the same head; each slice must then need
  only one.
- Rows of the vocabulary and of a dense feed-forward need not divide evenly (ceil(n / t) each, as torch does), but no
  slice of the vocabulary may be empty.
- Experts are dealt out whole, equally many to each slice.
- A pipeline stage has at least one layer. With tied embeddings the first and the last stage each hold the matrix.
- If the tokens are cut into parts, each part's rank computes whole query heads of attention; key and value heads are
  repeated if there are too few. Only attention may connect tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.models.model_config import read_model_config
from asyncrl.trainer.parallel.layout import Layout

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_LAYERS_IN_PARTS = {"full_attention", "sliding_attention", "moe", "mlp"}
"""Layer types, by transformers' names, that work on a part of the tokens."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder; None if `config.json` does not give the size.

    Attributes:
        query_heads, key_value_heads: heads of an attention layer; None if there is no attention.
        experts: experts per layer; 0 if the model is not a mixture of experts.
        linked: reason why layers cannot be on different stages; empty if they can.
        layer_types: kinds of layers that `config.json` names.
    """

    model_type: str
    layers: int | None
    query_heads: int | None
    key_value_heads: int | None
    vocabulary: int | None
    experts: int = 0
    linked: str = ""
    layer_types: frozenset[str] = frozenset()

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> ModelShape:
        """Read the content of a `config.json`; only the text part if there are several parts."""
        text = described.get("text_config") or described
        model_type = str(described.get("model_type") or text.get("model_type", ""))
        heads = _number(text, *_HEADS)
        shared = _number(text, "num_kv_shared_layers")
        return cls(
            model_type=model_type,
            layers=_number(text, *_LAYERS),
            query_heads=heads,
            key_value_heads=_number(text, "num_key_value_heads") or heads,
            vocabulary=_number(text, "vocab_size"),
            experts=_number(text, *_EXPERTS) or 0,
            linked=f"{shared} layers take their keys and values from layers before them" if shared else "",
            layer_types=frozenset(map(str, text.get("layer_types") or ())),
        )


def shape_of(path: str | None) -> ModelShape | None:
    """Return the shape of the model in the folder `path`; None if it has no readable `config.json`."""
    if path is None:
        return None
    try:
        return ModelShape.of(read_model_config(path))
    except (OSError, ValueError):
        return None


def misfits(layout: Layout, shape: ModelShape) -> Iterator[str]:
    """Yield an error message for each part of a model that does not fit `layout`, with a layout that fits."""
    if layout.tensor > 1:
        yield from _tensor_misfits(layout.tensor, shape)
    if layout.pipeline > 1:
        if shape.linked:
            yield f"{shape.model_type} cannot be cut into stages: {shape.linked}; use p1"
        elif shape.layers is not None and shape.layers < layout.pipeline:
            yield f"{shape.layers} layers are fewer than the {layout.pipeline} stages; use p{shape.layers} or less"
    if layout.context > 1:
        yield from _context_misfits(layout, shape)


def _context_misfits(layout: Layout, shape: ModelShape) -> Iterator[str]:
    cannot = f"the tokens of {shape.model_type} cannot be cut into {layout.context} parts:"
    if others := sorted(shape.layer_types - _LAYERS_IN_PARTS):
        yield f"{cannot} its layers {', '.join(others)} go along the sequence by other means than attention; use c1"
    elif shape.query_heads is None:
        yield f"{cannot} its config.json names no attention heads; use c1"
    elif shape.query_heads % layout.tensor == 0 and shape.query_heads % (layout.tensor * layout.context):
        slices = f" in {layout.tensor} tensor slices" if layout.tensor > 1 else ""
        heads = shape.query_heads // layout.tensor
        fits = [f"c{size}" for size in range(1, heads + 1) if heads % size == 0]
        use = "use c1" if len(fits) == 1 else f"use {', '.join(fits[:-1])} or {fits[-1]}"
        yield f"{cannot} {layout.context} does not divide its {shape.query_heads} query heads{slices}; {use}"


def tensor_sizes(shape: ModelShape) -> list[int]:
    """Return the numbers of tensor slices that the model can be cut into, ascending, 1 included."""
    most = shape.query_heads or 1
    return [size for size in range(1, most + 1) if not list(_reasons(size, shape))]


def _tensor_misfits(tensor: int, shape: ModelShape) -> Iterator[str]:
    reasons = list(_reasons(tensor, shape))
    if not reasons:
        return
    fits = [f"t{size}" for size in tensor_sizes(shape)]
    use = f"use {', '.join(fits[:-1])} or {fits[-1]}" if len(fits) > 1 else "use t1"
    yield f"{shape.model_type} cannot be cut into {tensor} tensor slices: {', '.join(reasons)}; {use}"


def _reasons(tensor: int, shape: ModelShape) -> Iterator[str]:
    if tensor == 1:
        return
    if shape.query_heads is None or shape.key_value_heads is None:
        yield "its config.json names no attention heads"
        return
    if shape.query_heads % tensor:
        yield f"{tensor} does not divide its {shape.query_heads} query heads"
    if shape.key_value_heads % tensor and tensor % shape.key_value_heads:
        yield f"{tensor} neither divides nor is a multiple of its {shape.key_value_heads} key-value heads"
    if shape.experts % tensor:
        yield f"{tensor} does not divide its {shape.experts} experts"
    if shape.vocabulary is not None and -(-shape.vocabulary // tensor) * (tensor - 1) >= shape.vocabulary:
        yield f"of a vocabulary of {shape.vocabulary} the last slice would have nothing"


def _number(described: Mapping[str, Any], *names: str) -> int | None:
    return next((value for name in names if isinstance(value := described.get(name), int)), None)
