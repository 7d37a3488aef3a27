"""Check layouts that cut a model, or the tokens of a sequence, before anything starts: by architecture, the model's
`config.json` and engine. Torch-free. A run whose ranks all have whole models imports nothing of it.

Architectures
-------------
The code of a trunk decides how it can be cut: whether each step of a layer works on a slice, and whether the trunk
changes its input embeddings in a way that a later stage must not repeat. A wrong cut raises no error. So an
architecture is accepted by name, once a table in `docs/models.md` shows that two slices, or two stages, have the
log-probabilities and gradients of one process. Data-parallel ranks run a model's own code on whole layers: any model.

Sizes
-----
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

from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.graph import Graph
from asyncrl.models.model_config import ModelFacts, facts_of, placeholder_in
from asyncrl.trainer.engines import AUTO, ENGINES
from asyncrl.trainer.parallel.placement import (
    Layout,
    Placement,
    layout_setting,
    model_of,
)
from asyncrl.trainer.settings import AttentionImplementation, VisionMode

_BOTH = frozenset(
    {
        "cohere",
        "deepseek_v3",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt_oss",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "nemotron",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
    }
)
_BOTH_WITH_PICTURES = frozenset(
    {
        "glm4v",
        "idefics3",
        "internvl",
        "llava",
        "llava_onevision",
        "mistral3",
        "qwen2_5_vl",
        "qwen2_vl",
        "smolvlm",
    }
)
TENSOR_PARALLEL = _BOTH | {"phi"}
"""`model_type`s of transformers that are cut into tensor slices."""
PIPELINE_PARALLEL = _BOTH | {"deepseek_v2", "granitemoehybrid", "qwen3_5_text", "qwen3_next", "stablelm"}
"""`model_type`s of transformers that are cut into pipeline stages."""
TENSOR_PARALLEL_WITH_PICTURES = _BOTH_WITH_PICTURES
"""Vision-language models whose text part is cut into tensor slices."""
PIPELINE_PARALLEL_WITH_PICTURES = _BOTH_WITH_PICTURES | {"qwen3_vl"}
"""Vision-language models whose text part is cut into pipeline stages."""


def refusals(model_type: str, layout: Layout) -> Iterator[str]:
    """Yield an error message for each reason why a model of `model_type` cannot be trained in `layout`."""
    cuts = (
        ("t", layout.tensor, "tensor slices", TENSOR_PARALLEL | TENSOR_PARALLEL_WITH_PICTURES),
        ("p", layout.pipeline, "stages", PIPELINE_PARALLEL | PIPELINE_PARALLEL_WITH_PICTURES),
    )
    for letter, parts, name, shown in cuts:
        if parts == 1 or model_type in shown:
            continue
        works = ["d", *(other for other, _, _, others in cuts if model_type in others)]
        yield (
            f"{model_type or 'what names no model_type'} is not shown to be right in {name}, as "
            f"{', '.join(sorted(shown))} are; use {letter}1: {' and '.join(works)} may be above 1"
        )


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


def problems(config: ExperimentConfig, graph: Graph, placed: Placement) -> Iterator[str]:
    """Yield an error message for each problem of the layouts of `placed`, some of which cut a model or its tokens."""
    yield from _models_that_do_not_fit(config, graph, placed, None)
    yield from _not_cut(config, placed)
    yield from _not_in_parts(config, graph, placed)


def base_model_problems(config: ExperimentConfig, graph: Graph, placed: Placement, base: ModelFacts) -> Iterator[str]:
    """Yield error messages about layouts of the base model, which the run makes first if `model.path` is null."""
    yield from _models_that_do_not_fit(config, graph, placed, base)


def _models_that_do_not_fit(
    config: ExperimentConfig, graph: Graph, placed: Placement, base: ModelFacts | None
) -> Iterator[str]:
    """Yield an error message for each layout that a role's model cannot be cut into.

    `base` is the model of roles without a folder.
    """
    reported = set()
    for role, grid in placed.grids.items():
        name, path = layout_setting(config, role), model_of(config, graph, role)
        shape = base if path is None else facts_of(path)
        if shape is None:
            continue
        for problem in (*refusals(shape.model_type, grid.layout), *misfits(grid.layout, shape)):
            if (name, problem) not in reported:  # a role with the actor's layout and model has the actor's problems
                reported.add((name, problem))
                yield f"{name}={str(grid)!r}: {'' if role == ACTOR else f'role {role}: '}{problem}"


def _not_cut(config: ExperimentConfig, placed: Placement) -> Iterator[str]:
    chosen = config.trainer.engine
    if chosen == AUTO or ENGINES[chosen].in_parts:
        return
    by_setting = {layout_setting(config, role): grid for role, grid in placed.grids.items()}
    for name, grid in by_setting.items():
        if grid.copy > 1 or grid.replicas > 1:
            yield (
                f"trainer.engine={chosen!r}: every rank has the whole model, and {name}={str(grid)!r} cuts it; "
                f"use d{grid.workers}, or trainer.engine=sharded"
            )


def _not_in_parts(config: ExperimentConfig, graph: Graph, placed: Placement) -> Iterator[str]:
    """Yield an error message for each feature that does not work if the tokens of a micro-batch are cut into parts."""
    reported: set[tuple[str, str | None]] = set()
    attention = config.model.attn_implementation
    padded = attention in (AttentionImplementation.flash_attention_2, AttentionImplementation.eager)
    for role, grid in placed.grids.items():
        name, path = layout_setting(config, role), model_of(config, graph, role)
        if grid.context == 1 or (name, path) in reported:
            continue
        if padded and not any(name == other for other, _ in reported):
            yield (
                f"{name}={str(grid)!r}: sdpa works where ranks have parts of the tokens (c), and not "
                f"model.attn_implementation={str(attention)!r}; use sdpa, or c1"
            )
        reported.add((name, path))
        if path is not None and config.model.vision != VisionMode.none and placeholder_in(path) is not None:
            whose = "" if role == ACTOR else f"role {role}: "
            yield (
                f"{name}={str(grid)!r}: {whose}the model in {path!r} takes pictures, whose tokens are not cut into "
                "parts (c); use c1, or model.vision=none for text alone"
            )
