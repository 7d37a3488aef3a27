"""Everything that asyncrl uses of transformers beyond its documented interface, in one place.

These names and behaviours may change with any release; `tests/unit/models/test_transformers_internals.py` detects
changes. The code that depends on them is also checked at load (`parity`). So if the test misses a change, asyncrl
refuses the model instead of computing wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicCache, LinearAttentionCacheLayerMixin
from transformers.cache_utils import Cache as Cache
from transformers.cache_utils import CacheLayerMixin as CacheLayerMixin
from transformers.cache_utils import LinearAttentionLayer as LinearAttentionLayer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import LoadStateDictConfig

from asyncrl.models.model_config import placeholder_id, read_model_config

PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layer types of causal attention, to all keys or to the last `sliding_window`."""
CHUNKED_LAYERS = frozenset({"chunked_attention"})
"""Layer types of causal attention within chunks of `attention_chunk_size`."""
RECURRENT_LAYERS = frozenset(
    kind for kind, layer in DYNAMIC_LAYER_TYPE_MAPPING.items() if issubclass(layer, LinearAttentionCacheLayerMixin)
)
"""Layer types that carry a state from token to token, which transformers' cache keeps. `hybrid` layers have attention
as well."""
TOKENWISE_LAYERS = frozenset({"moe", "mlp"})
"""Layer types that compute each token independently."""

EXPERTS_MODULE, EXPERTS_PARAMETER = "ep_dispatch_experts", "grouped_gemm"
"""Styles in `PreTrainedModel.ep_plan`: a module that is called with tokens, their chosen experts and these experts'
weights, and has `num_experts`; and a parameter of it, whose first dimension is the expert."""

_LOGIT_FACTORS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "logits_scaling": lambda logits, value: logits / value,  # Granite
    "logit_scale": lambda logits, value: logits * value,  # Cohere
    "lm_head_multiplier": lambda logits, value: logits * value,  # Falcon-H1
    "final_logit_softcapping": lambda logits, value: torch.tanh(logits / value) * value,  # Gemma
    "logits_soft_cap": lambda logits, value: torch.tanh(logits / value) * value,  # RecurrentGemma
}
"""Functions that models apply to the result of their output embedding, by the config field that holds the factor."""


def text_settings(config: PretrainedConfig) -> dict[str, Any]:
    """Return the settings of the language model in `config`, which may describe a larger model."""
    settings: dict[str, Any] = config.get_text_config().to_dict()
    return settings


def context_limit(config: PretrainedConfig) -> int | None:
    """Return the model's number of positions, under any name in the config; None if the config has no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)  # a property of some configs only
    return None if limit is None else int(limit)


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens that end an answer of this model, from its generation config, else its config."""
    generation = model.generation_config
    eos = generation.eos_token_id if generation is not None else None
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def batch_independent_limit(config: PretrainedConfig) -> int | None:
    """Return the length beyond which one sequence of a batch changes the rotary positions of all others, or None.

    This happens with `longrope` (Phi-3 and Phi-4 with 128k positions): the batch's longest sequence decides its
    factors.
    """
    rope = text_settings(config).get("rope_parameters") or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # by layer type in some models
    limits = [
        int(kind["original_max_position_embeddings"])
        for kind in kinds
        if kind.get("rope_type") == "longrope" and kind.get("original_max_position_embeddings")
    ]
    return min(limits, default=None)


def layer_types(config: PretrainedConfig) -> frozenset[str]:
    """Return the layers' types, by transformers' names; empty if the config does not have them."""
    return frozenset(getattr(config.get_text_config(), "layer_types", None) or ())  # under other names in some configs


def logits_of_head(config: PretrainedConfig, head: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the map from hidden states [N, H] to logits [N, V] by the output embedding `head` of a model of
    `config`.
    """
    settings = config.get_text_config()  # MiniCPM3's factor is a property of its config, not a setting
    values = {name: getattr(settings, name, None) for name in _LOGIT_FACTORS}
    factors = [(_LOGIT_FACTORS[name], value) for name, value in values.items() if value is not None]

    def logits_of(hidden_NH: Tensor) -> Tensor:
        weight = cast(Tensor, head.weight)
        logits_NV: Tensor = head(hidden_NH.to(weight.dtype))  # Mamba's trunk ends in fp32, its head need not
        for change, value in factors:
            logits_NV = change(logits_NV, value)
        return logits_NV

    return logits_of


def float32_linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear` of the values of any types, computed in float32."""
    return nn.functional.linear(states.float(), weight.float(), None if bias is None else bias.float())


def compute_head_in_float32(model: PreTrainedModel) -> None:
    """Make the output embedding of `model` compute logits in float32, from its weights as they are.

    Raises:
        ValueError: the output embedding is not a linear layer.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"model.float32_head=true: the output embedding of {type(model).__name__} is no linear layer; set it to "
            "false"
        )
    head.forward = lambda states: float32_linear(states, head.weight, head.bias)  # type: ignore[method-assign, assignment]


def weight_used_in_float32(model: PreTrainedModel) -> Tensor | None:
    """Return the weight of an output embedding of another type that computes in float32; None if there is none."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear) or "forward" not in vars(head) or head.weight.dtype == torch.float32:
        return None
    return head.weight


def trunk_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a causal language model that computes hidden states."""
    if model.base_model is not model:
        return cast(PreTrainedModel, model.base_model)
    children = (child for child in model.children() if isinstance(child, PreTrainedModel))
    return next(children, model)  # Llama 4's trunk has another name than the model states


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """Return the language model in a vision-language `model`; any other model is returned itself."""
    if not hasattr(model.config, "vision_config"):
        return model
    return cast(PreTrainedModel, model.get_decoder())  # type: ignore[no-untyped-call]


def takes_pictures(model: PreTrainedModel) -> bool:
    """True if `model` takes pictures: it has a vision tower, and a method that makes rows of pictures."""
    return hasattr(model.config, "vision_config") and hasattr(model.base_model, "get_image_features")


def tower_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of `model` that only make rows of pictures: of its vision tower and its projector."""
    parts = (text_part(model), model.get_output_embeddings())  # type: ignore[no-untyped-call]
    others = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in others]


def decoding_parts(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """Return the modules that compute a step of decoding: all of `model` except its vision tower."""
    text = text_part(model)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return (model,) if text is model else (text, head)


def language_model(path: str | Path) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """Return transformers' auto class for the language model in the folder `path`, with its vision tower if it has
    one.
    """
    return language_model_for(read_model_config(path))


def language_model_on_meta(config: PretrainedConfig) -> PreTrainedModel:
    """Return the language model of `config`, with its vision tower if it has one, without memory."""
    with torch.device("meta"):
        model: PreTrainedModel = language_model_for(config.to_dict()).from_config(config)  # type: ignore[no-untyped-call]
    return model


def language_model_for(
    config: Mapping[str, Any],
) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """As `language_model`, from the content of a `config.json`."""
    return AutoModelForCausalLM if placeholder_id(config) is None else AutoModelForImageTextToText


def has_more_than_head(model: PreTrainedModel) -> bool:
    """True if other parameters than the output embedding also turn hidden states into logits, as in ModernBERT's
    decoder.
    """
    parts = (trunk_of(model), model.get_output_embeddings())  # type: ignore[no-untyped-call]
    known = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    return any(id(parameter) not in known for parameter in model.parameters())


def logits_of_model(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return the map from hidden states [N, H] to logits [N, V] by the model's own code."""
    trunk = trunk_of(model)

    def logits_of(hidden_NH: Tensor) -> Tensor:
        given = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_NH[None])
        ids = torch.zeros(1, len(hidden_NH), dtype=torch.long, device=hidden_NH.device)
        vars(trunk)["forward"] = lambda *args, **kwargs: given
        try:
            logits_NV: Tensor = model(input_ids=ids, use_cache=False).logits[0]
        finally:
            del vars(trunk)["forward"]
        return logits_NV

    return logits_of


def packing_arguments(ends: Tensor, longest: int, seq_ids_I: Tensor) -> dict[str, Any]:
    """Return the keyword arguments that give a forward the bounds of the sequences in a packed row; most models pass
    them on.

    Args:
        ends: [sequences + 1], the start of each sequence and the end of the last; int32.
        longest: number of tokens of the longest sequence.
        seq_ids_I: [I], the sequence of each token; int32.

    Returns:
        Four for flash attention and linear attention, and `seq_idx` for convolutions. Torch's own convolutions cannot
        keep sequences apart and refuse `seq_idx`; kernels for GPUs can.
    """
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": seq_ids_I[None],
    }


def as_saved(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert `tensors`, by their names in `model`, to those of a model folder: renamed, cut or joined.

    Args:
        model: a model that was not loaded; otherwise transformers would follow the format of its own folder.
        tensors: tensors for the parameters and persistent buffers, of any sizes that can be cut like them.
    """
    saved: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return saved


class TrialLoad(NamedTuple):
    """Result of a trial load of a folder's tensors into a model, by transformers' own loader.

    Attributes:
        missing, unexpected: names of tensors that only the model has, and that only the folder has, except those that
            the model's class names as harmless.
        misshapen: by parameter, the shape in the folder, and that in the model.
        failed: by parameter, why its tensors in the folder cannot be joined, cut or turned to it.
        torn: pairs of parameters that the config ties, with different values in the folder.
    """

    missing: list[str]
    unexpected: list[str]
    misshapen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    failed: dict[str, str]
    torn: list[tuple[str, str]]


def trial_load(
    kind: Any, config: PretrainedConfig, stored: Mapping[str, Tensor], read: Callable[[str], Tensor]
) -> TrialLoad:
    """Let transformers' loader place tensors in a model without memory, with its renaming, joining and tying.

    Args:
        kind: transformers' auto class of the model.
        stored: tensors on the meta device, by their names in the folder.
        read: returns such a tensor's values; only called for tied parameters of which the folder has both.
    """
    dtype = next((tensor.dtype for tensor in stored.values() if tensor.is_floating_point()), torch.float32)

    def load(tensors: Mapping[str, Any], valued: Iterable[str]) -> tuple[PreTrainedModel, Any]:
        with torch.device("meta"):
            model = kind.from_config(deepcopy(config), dtype=dtype)
        device_map = {"": "meta", **dict.fromkeys(valued, "cpu")}
        conversions: Any = get_model_conversion_mapping(model)
        plan = LoadStateDictConfig(device_map=device_map, weight_mapping=conversions)
        return model, model._load_pretrained_model(model, dict(tensors), None, plan)[0]

    model, found = load(stored, ())
    tied = dict(model.all_tied_weights_keys)
    both = [(one, other) for one, other in tied.items() if not {one, other} & found.missing_keys]
    model.tie_weights(missing_keys=found.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(found)
    torn = []
    if both and not found.mismatched_keys:
        shapes = {model.get_parameter_or_buffer(name).shape for pair in both for name in pair}
        values = {name: read(name) if tensor.shape in shapes else tensor for name, tensor in stored.items()}
        whole, _ = load(values, (name for pair in both for name in pair))
        torn = [pair for pair in both if not torch.equal(*map(whole.get_parameter_or_buffer, pair))]
    misshapen = {name: (tuple(there), tuple(here)) for name, there, here in found.mismatched_keys}
    return TrialLoad(
        sorted(found.missing_keys), sorted(found.unexpected_keys), misshapen, dict(found.conversion_errors), torn
    )


def new_model(kind: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of the class `kind` with new weights and transformers' own attention; the model owns `config`."""
    model: PreTrainedModel = kind._from_config(  # type: ignore[no-untyped-call]
        config, dtype=dtype, attn_implementation="eager"
    )
    model.train(False)
    return model


def register_attention(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Make `function` an attention implementation called `name`; idempotent."""
    AttentionInterface.register(name, function)


def attention_is_replaceable(model: PreTrainedModel) -> bool:
    """True if the model's attention goes through transformers' attention interface; False if the model has its own."""
    return bool(model._can_set_attn_implementation())


def keeps_recurrent_state(model: PreTrainedModel) -> bool:
    """True if the model carries more state from token to token than keys and values."""
    return bool(model._is_stateful) or bool(layer_types(model.config) & RECURRENT_LAYERS)


class LayerMemory(NamedTuple):
    """Memory of a layer: True if it keeps keys and values, and the number of its recurrent states."""

    keys: bool
    states: int


def layer_memories(config: PretrainedConfig) -> list[LayerMemory]:
    """Return the memory of each layer of a model of `config`, as in transformers' own cache for it."""
    if not layer_types(config) & RECURRENT_LAYERS:
        return [LayerMemory(keys=True, states=0)] * int(config.get_text_config().num_hidden_layers)
    return [
        LayerMemory(
            isinstance(layer, CacheLayerMixin),
            layer.number_of_states if isinstance(layer, LinearAttentionCacheLayerMixin) else 0,
        )
        for layer in DynamicCache(config=config).layers
    ]


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Within this block `model` uses the attention implementation `name`. Models with their own attention, and vision
    towers, keep theirs.

    Raises:
        ValueError: the model does not support `name`.
    """
    text = text_part(model)
    if not attention_is_replaceable(text):
        yield
        return
    before = text.config._attn_implementation
    _replace_attention(text, name)
    try:
        yield
    finally:
        _replace_attention(text, before)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention implementation `name`. Models with their own attention, and vision towers, keep theirs.

    Raises:
        ValueError: the model does not support `name`.
    """
    if attention_is_replaceable(text := text_part(model)):
        _replace_attention(text, name)


def _replace_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention implementation `name`, except in configs of parts that the model does not have.

    Moshi's text model has the config of its audio encoder without the encoder. Transformers warns about each such part
    at each change.
    """
    held = {id(module.config) for module in model.modules() if hasattr(module, "config")}
    configs = {key: getattr(model.config, key) for key in model.config.sub_configs}
    model.set_attn_implementation({"": name} | {key: name for key, part in configs.items() if _is_held(part, held)})


def _is_held(config: PretrainedConfig | None, held: set[int]) -> bool:
    """True if `config` or one within it is in `held`, by its `id`."""
    if config is None:
        return False
    return id(config) in held or any(_is_held(getattr(config, key), held) for key in config.sub_configs)
