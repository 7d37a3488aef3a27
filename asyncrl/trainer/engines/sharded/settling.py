"""Which layout of sequences a model is trained in where no rank has all of it.

The proof at load (`asyncrl.trainer.proof`) needs a whole model. What it looks for, tokens of one sequence that reach
another's, lies in the code of the layers and not in their number or values. So the grid's first rank proves a model of
the same configuration with random weights, a small vocabulary and as few layers as have one of each kind, and tells the
others.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from asyncrl.config.context import context_length
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.trainer.engines.flat import FlatPolicyEngine
from asyncrl.trainer.parallel import Place
from asyncrl.trainer.proof import Layout, layouts, refuse_longer_than_independent, settle_attention

_VOCABULARY = 512
_LAYERS = 2


def settled_layout(
    path: str, config: ExperimentConfig, dtype: torch.dtype, device: torch.device, place: Place
) -> Layout:
    """The first layout of `model.attn_implementation` that is right for the model in `path`. Called by all ranks of
    the grid.

    Raises:
        UnsupportedModelError: none is.
        PeerFailed: the first rank found none.
    """
    setting = config.model.attn_implementation
    choices, chosen = layouts(setting), torch.zeros(1, dtype=torch.int64)

    def settle() -> None:
        if not place.everyone.leads:
            return
        model = _surrogate(path, dtype)
        nn.Module.to(model, device)
        engine = FlatPolicyEngine(model, temperature=1.0, attention=choices[0].kind, tokens_per_micro_batch=1)
        longest = context_length(config, model.config.to_dict())
        refuse_longer_than_independent(model, longest)
        settled = settle_attention(
            engine,
            setting,
            longest=longest,
            row=config.trainer.tokens_per_micro_batch,
            share_prefixes=config.trainer.share_prefixes,
        )
        chosen.fill_(choices.index(settled))

    place.everyone.together(settle, f"proving a layout for {path}")
    return choices[int(place.everyone.broadcast(chosen))]


def _surrogate(path: str, dtype: torch.dtype) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(path)
    text = config.get_text_config()
    kinds: list[str] = list(getattr(text, "layer_types", None) or [])
    _shorten(text, max(_LAYERS, *(kinds.index(kind) + 1 for kind in kinds)) if kinds else _LAYERS)
    text.vocab_size = min(text.vocab_size, _VOCABULARY)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(text, name, None)
        if isinstance(token, int) and token >= text.vocab_size:
            setattr(text, name, None)
    with torch.random.fork_rng(devices=[]):  # which random weights are drawn must not move the run's own
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    model.train(False)
    return model


def _shorten(text: PretrainedConfig, layers: int) -> None:
    """Keep the first `layers` layers, also in what is listed layer by layer."""
    before = text.num_hidden_layers
    if layers >= before:
        return
    for name, value in deepcopy(text.to_dict()).items():
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
