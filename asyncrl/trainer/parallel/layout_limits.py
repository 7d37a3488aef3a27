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

from collections.abc import Iterator

from asyncrl.models.model_facts import ModelFacts
from asyncrl.trainer.parallel.layout import Layout

_LAYERS_IN_PARTS = {"full_attention", "sliding_attention", "moe", "mlp"}
"""Layer types, by transformers' names, that work on a part of the tokens."""


def misfits(layout: Layout, shape: ModelFacts) -> Iterator[str]:
    """Yield an error message for each part of a model that does not fit `layout`, with a layout that fits."""
    if layout.tensor > 1:
        yield from _tensor_misfits(layout.tensor, shape)
    if layout.pipeline > 1:
        if shape.linked:
            yield f"{shape.model_type} cannot be cut into stages: {shape.linked}; use p1"
        elif 0 < shape.layers < layout.pipeline:
            yield f"{shape.layers} layers are fewer than the {layout.pipeline} stages; use p{shape.layers} or less"
    if layout.context > 1:
        yield from _context_misfits(layout, shape)


def _context_misfits(layout: Layout, shape: ModelFacts) -> Iterator[str]:
    cannot = f"the tokens of {shape.model_type} cannot be cut into {layout.context} parts:"
    if others := sorted(shape.layer_types - _LAYERS_IN_PARTS):
        yield f"{cannot} its layers {', '.join(others)} go along the sequence by other means than attention; use c1"
    elif not shape.query_heads:
        yield f"{cannot} its config.json names no attention heads; use c1"
    elif shape.query_heads % layout.tensor == 0 and shape.query_heads % (layout.tensor * layout.context):
        slices = f" in {layout.tensor} tensor slices" if layout.tensor > 1 else ""
        heads = shape.query_heads // layout.tensor
        fits = [f"c{size}" for size in range(1, heads + 1) if heads % size == 0]
        use = "use c1" if len(fits) == 1 else f"use {', '.join(fits[:-1])} or {fits[-1]}"
        yield f"{cannot} {layout.context} does not divide its {shape.query_heads} query heads{slices}; {use}"


def tensor_sizes(shape: ModelFacts) -> list[int]:
    """Return the numbers of tensor slices that the model can be cut into, ascending, 1 included."""
    most = shape.query_heads or 1
    return [size for size in range(1, most + 1) if not list(_reasons(size, shape))]


def _tensor_misfits(tensor: int, shape: ModelFacts) -> Iterator[str]:
    reasons = list(_reasons(tensor, shape))
    if not reasons:
        return
    fits = [f"t{size}" for size in tensor_sizes(shape)]
    use = f"use {', '.join(fits[:-1])} or {fits[-1]}" if len(fits) > 1 else "use t1"
    yield f"{shape.model_type} cannot be cut into {tensor} tensor slices: {', '.join(reasons)}; {use}"


def _reasons(tensor: int, shape: ModelFacts) -> Iterator[str]:
    if tensor == 1:
        return
    if not shape.query_heads:
        yield "its config.json names no attention heads"
        return
    if shape.query_heads % tensor:
        yield f"{tensor} does not divide its {shape.query_heads} query heads"
    if shape.key_value_heads % tensor and tensor % shape.key_value_heads:
        yield f"{tensor} neither divides nor is a multiple of its {shape.key_value_heads} key-value heads"
    if shape.experts % tensor:
        yield f"{tensor} does not divide its {shape.experts} experts"
    if shape.vocabulary and -(-shape.vocabulary // tensor) * (tensor - 1) >= shape.vocabulary:
        yield f"of a vocabulary of {shape.vocabulary} the last slice would have nothing"
