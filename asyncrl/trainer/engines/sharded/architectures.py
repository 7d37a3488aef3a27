"""Architectures that may be cut into tensor slices and pipeline stages: those for which a test shows correct results.

The code of a trunk decides how it can be cut: whether each step of a layer works on a slice, and whether the trunk
changes its input embeddings in a way that a later stage must not repeat. A wrong cut raises no error. So an
architecture is accepted by name, once a table in `docs/models.md` shows that two slices, or two stages, have the
log-probabilities and gradients of one process. Data-parallel ranks run a model's own code on whole layers: any model.

Torch-free: the launcher checks it before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.trainer.parallel.layout import Layout

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
