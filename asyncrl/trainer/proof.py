"""How a model's sequences are laid out for training: the first way that is proven right, or a refusal by name.

Packing computes no padding, but only attention that is told where sequences end keeps them apart. A recurrence or a
convolution does so where its kernel takes the packing arguments, some models have an attention of their own, and which
is which no list of names would hold. So each way is tried at load (`asyncrl.architectures.proof`) in this order:

    sdpa                packed, then padded rows with torch's attention, then padded rows with transformers' eager one
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
    find_fault,
    probe_for,
    tolerance,
)
from asyncrl.architectures.transformers_internals import (
    PLAIN_LAYERS,
    RECURRENT_LAYERS,
    TOKENWISE_LAYERS,
    layer_types,
    set_attention,
    text_settings,
)
from asyncrl.trainer.micro_batch_layout import AttentionKind
from asyncrl.trainer.packed_attention import PACKED
from asyncrl.trainer.settings import AttentionImplementation

logger = logging.getLogger(__name__)


class Provable(Protocol):
    """An engine, as far as the proof asks it. Its `attention` is set by `settle_attention`."""

    attention: AttentionKind

    @property
    def network(self) -> PreTrainedModel:
        """The transformers model in it, whose attention implementation is set along with `attention`."""

    def plain(self, tokens: Tokens) -> Tensor:
        """What transformers' own forward gives of one sequence: log-probabilities, or hidden states of a trunk."""

    def together(self, sequences: Sequence[Tokens]) -> list[Tensor]:
        """The same as the engine computes it in training, of all `sequences` in one micro-batch."""


class _Layout(NamedTuple):
    kind: AttentionKind
    attention: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.attention})"


_LAYOUTS: dict[AttentionImplementation, tuple[_Layout, ...]] = {
    AttentionImplementation.sdpa: (
        _Layout(AttentionKind.packed, PACKED),
        _Layout(AttentionKind.padded, "sdpa"),
        _Layout(AttentionKind.padded, "eager"),
    ),
    AttentionImplementation.flash_attention_2: (
        _Layout(AttentionKind.flash, "flash_attention_2"),
        _Layout(AttentionKind.padded, "flash_attention_2"),
    ),
    AttentionImplementation.eager: (_Layout(AttentionKind.padded, "eager"),),
}


def first_layout(setting: AttentionImplementation) -> tuple[AttentionKind, str]:
    """What `settle_attention` tries first: the layout, and transformers' name of the attention."""
    return _LAYOUTS[setting][0]


@torch.no_grad()
def settle_attention(engine: Provable, setting: AttentionImplementation) -> None:
    """Set `engine` to the first layout of `model.attn_implementation` that is proven right for its model.

    Raises:
        UnsupportedModelError: none is.
    """
    network = engine.network
    sequences, vocabulary = probe_for(network), int(text_settings(network.config)["vocab_size"])
    faults: list[str] = []
    for layout in _LAYOUTS[setting]:
        fault = _unseen_layers(network, layout) or _fault_of(engine, layout, sequences, vocabulary)
        if fault is None:
            if faults:
                logger.warning("%s is trained on %s: not %s", type(network).__name__, layout, "; not ".join(faults))
            return
        faults.append(f"{layout}: {fault}")
    others = ", ".join(sorted(set(AttentionImplementation) - {setting}))
    raise UnsupportedModelError(
        f"{type(network).__name__} cannot be trained with model.attn_implementation={str(setting)!r}; tried "
        f"{'; '.join(faults)}. Use model.attn_implementation={others}, or another model"
    )


def _unseen_layers(network: PreTrainedModel, layout: _Layout) -> str | None:
    """Layers whose attention begins to differ from a plain one where no short sequence shows it.

    On padded rows transformers draws their masks itself.
    """
    unseen = layer_types(network.config) - PLAIN_LAYERS - RECURRENT_LAYERS - TOKENWISE_LAYERS
    if layout.kind == AttentionKind.padded or not unseen:
        return None
    return f"its layers {sorted(unseen)} look at other keys than packed attention gives them"


def _fault_of(
    engine: Provable, layout: _Layout, sequences: Sequence[Tokens], vocabulary: int
) -> str | None:
    try:
        set_attention(engine.network, layout.attention)
        engine.attention = layout.kind
        return find_fault(
            sequences,
            vocabulary,
            plain=engine.plain,
            engine=engine.together,
            allowed=tolerance(engine.network.dtype),
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code raises is the reason of its refusal
        return f"its forward fails: {type(error).__name__}: {str(error):.300}"
