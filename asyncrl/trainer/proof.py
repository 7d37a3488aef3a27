"""How a model's sequences are laid out for training: the first way that is proven right, or a refusal by name.

Packing computes no padding, but only attention that is told where sequences end keeps them apart. A recurrence or a
convolution does so where its kernel takes the packing arguments, some models have an attention of their own, and which
is which no list of names would hold. So each way is tried at load (`asyncrl.architectures.proof`) in this order:

    sdpa                packed with shared prefixes, then packed, then padded rows with torch's attention, then padded
                        rows with transformers' eager one
    flash_attention_2   packed by its own kernel, then padded rows
    eager               padded rows

Padded rows end in padding, which a causal model cannot look at, be it attention, convolution or recurrence: they are
right for every causal model, at the price of computing the padding.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.architectures.proof import (
    Tokens,
    UnsupportedModelError,
    find_difference,
    find_leak,
    forks,
    probe_for,
    told,
)
from asyncrl.architectures.transformers_internals import (
    PLAIN_LAYERS,
    RECURRENT_LAYERS,
    TOKENWISE_LAYERS,
    batch_independent_limit,
    layer_types,
    set_attention,
)
from asyncrl.trainer.micro_batch_layout import AttentionKind
from asyncrl.trainer.packed_attention import PACKED
from asyncrl.trainer.settings import AttentionImplementation

logger = logging.getLogger(__name__)


class Provable(Protocol):
    """An engine, as far as the proof asks it."""

    attention: AttentionKind
    """How it lays out micro-batches; set by `settle_attention`."""

    @property
    def network(self) -> PreTrainedModel:
        """The transformers model in it, whose attention implementation is set along with `attention`."""

    def plain(self, tokens: Tokens) -> Tensor:
        """What transformers' own forward gives of one sequence: log-probabilities, or hidden states of a trunk."""

    def together(self, sequences: Sequence[Tokens]) -> Sequence[Tensor]:
        """The same as the engine computes it in training, of all `sequences` in one micro-batch. Differentiable."""


class Layout(NamedTuple):
    """How sequences are laid out, and transformers' name of the attention that goes with it."""

    kind: AttentionKind
    attention: str

    def __str__(self) -> str:
        return f"{_HOW.get(self.kind, 'packed')} ({self.attention})"


_HOW = {AttentionKind.padded: "on padded rows", AttentionKind.tree: "packed with shared prefixes"}


_LAYOUTS: dict[AttentionImplementation, tuple[Layout, ...]] = {
    AttentionImplementation.sdpa: (
        Layout(AttentionKind.tree, PACKED),
        Layout(AttentionKind.packed, PACKED),
        Layout(AttentionKind.padded, "sdpa"),
        Layout(AttentionKind.padded, "eager"),
    ),
    AttentionImplementation.flash_attention_2: (
        Layout(AttentionKind.flash, "flash_attention_2"),
        Layout(AttentionKind.padded, "flash_attention_2"),
    ),
    AttentionImplementation.eager: (Layout(AttentionKind.padded, "eager"),),
}


def first_layout(setting: AttentionImplementation) -> Layout:
    """What `settle_attention` tries first."""
    return _LAYOUTS[setting][0]


def settle_attention(engine: Provable, setting: AttentionImplementation, *, share_prefixes: bool = True) -> Layout:
    """Set `engine` to the first layout of `model.attn_implementation` that is proven right for its model; returns it.

    Args:
        share_prefixes: whether prefixes that samples share may be computed once.

    Raises:
        UnsupportedModelError: none is.
    """
    network = engine.network
    name, sequences = type(network).__name__, [*(probes := probe_for(network)), *forks(probes)]
    try:
        plain = [engine.plain(tokens) for tokens in sequences]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code raises is the reason of its refusal
        raise UnsupportedModelError(
            f"{name} cannot be trained: transformers' own forward of it in {_dtype(network)} fails: {told(error)}. "
            "Use another model.dtype, or another model"
        ) from error
    faults: list[str] = []
    for layout in _LAYOUTS[setting]:
        if layout.kind == AttentionKind.tree and not share_prefixes:
            continue
        fault = _unseen_layers(network, layout) or _fault_of(engine, layout, sequences, plain)
        if fault is None:
            if faults:
                logger.warning("%s is trained %s, and not %s", name, layout, "; nor ".join(faults))
            return layout
        faults.append(f"{layout}: {fault}")
    others = " or ".join(sorted(set(AttentionImplementation) - {setting}))
    raise UnsupportedModelError(
        f"{name} cannot be trained with model.attn_implementation={str(setting)!r}; tried {'; '.join(faults)}. Use "
        f"model.attn_implementation={others}, or another model"
    )


def layouts(setting: AttentionImplementation) -> tuple[Layout, ...]:
    """All that are tried, in this order."""
    return _LAYOUTS[setting]


def refuse_longer_than_independent(network: PreTrainedModel, longest: int) -> None:
    """Refuse sequences so long that they would change what is computed of the others of their micro-batch.

    Args:
        longest: tokens of the longest sequence of the run.

    Raises:
        UnsupportedModelError: the model has such a length, and it is below `longest`.
    """
    limit = batch_independent_limit(network.config)
    if limit is not None and longest > limit:
        raise UnsupportedModelError(
            f"{type(network).__name__} cannot be trained on sequences of {longest} tokens: its rotary positions "
            f"(longrope) change for all sequences of a batch once one is longer than {limit} tokens. Use at most "
            f"{limit} tokens as dataset.max_prompt_tokens + rollout.sampling.max_new_tokens (or "
            "generation.context_length), or another model"
        )


def _unseen_layers(network: PreTrainedModel, layout: Layout) -> str | None:
    """Layers whose attention begins to differ from a plain one where no short sequence shows it.

    On padded rows transformers draws their masks itself.
    """
    kinds = layer_types(network.config)
    unseen = kinds - PLAIN_LAYERS - RECURRENT_LAYERS - TOKENWISE_LAYERS
    if layout.kind == AttentionKind.padded:
        return None
    if unseen:
        return f"its layers {sorted(unseen)} look at other keys than packed attention gives them"
    if layout.kind == AttentionKind.tree and (recurrent := kinds & RECURRENT_LAYERS):
        return f"its layers {sorted(recurrent)} go from token to token, and cannot branch"
    return None


def _fault_of(engine: Provable, layout: Layout, sequences: Sequence[Tokens], plain: Sequence[Tensor]) -> str | None:
    network = engine.network
    try:
        set_attention(network, layout.attention)
        engine.attention = layout.kind
        with torch.no_grad():
            fault = find_difference(plain, engine.together(sequences), network.dtype)
        return fault or find_leak(network, sequences, engine.together)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # see `settle_attention`
        return f"its forward fails: {told(error)}"


def _dtype(network: PreTrainedModel) -> str:
    return str(network.dtype).removeprefix("torch.")
