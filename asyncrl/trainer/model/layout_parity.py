"""Choose the layout of sequences for training: the first one that is proven correct. A model without one is refused.

Packing computes no padding, but only an attention that knows where sequences end keeps them apart. A recurrence or a
convolution keeps them apart if its kernel takes the packing arguments, and some models have their own attention; no
list of names could distinguish these. So each layout is tried at load (`asyncrl.models.parity`), in this order:

    sdpa                packed with shared prefixes, then packed, both first with torch's variable-length kernel if
                        there is one, then padded rows with torch's attention, then with transformers' eager one
    flash_attention_2   packed by its own kernel, then padded rows
    eager               padded rows

Padded rows have their padding at the end, which no causal model sees, by attention, convolution or recurrence. So they
are right for every causal model, at the price of computing the padding.

The run's sequences or rows may be longer than a length in the model's config. Then a layout must also be right on a
copy of the model with short lengths (`asyncrl.models.parity`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.models.parity import (
    Difference,
    ShortModel,
    Subject,
    Tokens,
    UnsupportedModelError,
    find_leak,
    forks,
    probe_for,
)
from asyncrl.models.torch_device import attention_kernel
from asyncrl.models.transformers_internals import (
    PLAIN_LAYERS,
    RECURRENT_LAYERS,
    TOKENWISE_LAYERS,
    batch_independent_limit,
    layer_types,
    set_attention,
)
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.model.attention import PACKED, VARLEN, kernel_exists
from asyncrl.trainer.settings import AttentionImplementation

if TYPE_CHECKING:
    from asyncrl.models.pictures import Pictures

logger = logging.getLogger(__name__)


class ParityTestable(Protocol):
    """Interface of an engine for the parity check."""

    attention: AttentionKind
    """Layout of the engine's micro-batches; set by `select_attention`."""

    @property
    def network(self) -> PreTrainedModel:
        """The engine's transformers model, whose attention implementation is set along with `attention`."""

    def weights(self) -> Mapping[str, Tensor]:
        """Return the parameters of `network` by their names in a new model."""

    def with_network(self, network: PreTrainedModel) -> ParityTestable:
        """Return an engine that computes `network` as this one computes its own."""

    @property
    def pictures(self) -> Pictures | None:
        """Pictures of `network`; None if it is used for text alone."""

    def plain(self, tokens: Tokens) -> Tensor:
        """Run transformers' own forward on one sequence; returns log-probabilities, or hidden states of a trunk."""

    def plain_again(self, sequences: Sequence[Tokens]) -> Sequence[Tensor]:
        """Run transformers' own forward on all `sequences` with another kernel (`other_kernel`)."""

    def together(self, sequences: Sequence[Tokens]) -> Sequence[Tensor]:
        """Return the same from the engine as in training, with all `sequences` in one micro-batch. Differentiable."""


class SequenceLayout(NamedTuple):
    """Layout of sequences, and transformers' name of the attention function that goes with it."""

    kind: AttentionKind
    attention: str

    def __str__(self) -> str:
        return f"{_HOW.get(self.kind, 'packed')} ({self.attention})"


def layout_in_use(
    model: PretrainedConfig, kind: AttentionKind, implementation: str, device: torch.device, dtype: torch.dtype
) -> SequenceLayout:
    """Return the layout `kind` with the kernel that computes its attention.

    Args:
        implementation: setting `model.attn_implementation`.
    """
    if str(model.get_text_config()._attn_implementation).startswith(VARLEN):
        return SequenceLayout(kind, "torch's variable-length kernel")
    return SequenceLayout(kind, attention_kernel(model.to_dict(), implementation, device, dtype))


_HOW = {
    AttentionKind.padded: "on padded rows",
    AttentionKind.tree: "packed with shared prefixes",
}

_LAYOUTS: dict[AttentionImplementation, tuple[SequenceLayout, ...]] = {
    AttentionImplementation.sdpa: (
        SequenceLayout(AttentionKind.tree, VARLEN),
        SequenceLayout(AttentionKind.packed, VARLEN),
        SequenceLayout(AttentionKind.tree, PACKED),
        SequenceLayout(AttentionKind.packed, PACKED),
        SequenceLayout(AttentionKind.padded, "sdpa"),
        SequenceLayout(AttentionKind.padded, "eager"),
    ),
    AttentionImplementation.flash_attention_2: (
        SequenceLayout(AttentionKind.flash, "flash_attention_2"),
        SequenceLayout(AttentionKind.padded, "flash_attention_2"),
    ),
    AttentionImplementation.eager: (SequenceLayout(AttentionKind.padded, "eager"),),
}


STREAM_ATTENTION = frozenset({PACKED, VARLEN})
"""Attention functions of a micro-batch that is one stream, each of which also works across ranks that have a part of it
(`asyncrl.trainer.engines.sharded.context_parallel`)."""
_WHOLE = "a layout without c (trainer.parallel)"


def first_layout(setting: AttentionImplementation) -> SequenceLayout:
    """Return the layout that `select_attention` tries first without a GPU."""
    return next(layout for layout in _LAYOUTS[setting] if layout.attention != VARLEN)


def select_attention(
    engine: ParityTestable,
    setting: AttentionImplementation,
    *,
    longest: int,
    row: int = 0,
    share_prefixes: bool = True,
    one_stream: bool = False,
) -> SequenceLayout:
    """Set `engine` to the first layout of `model.attn_implementation` that passes the parity check, and return the
    layout.

    Args:
        longest: tokens of the longest sequence of the run.
        row: tokens that may lie end to end in a packed micro-batch.
        share_prefixes: allow layouts that compute shared prefixes once.
        one_stream: allow only layouts that have an attention of `STREAM_ATTENTION`.

    Raises:
        UnsupportedModelError: no layout passes.
    """
    name, own = type(engine.network).__name__, _Subject(engine)
    copies: dict[int, _Subject | None] = {}  # with short lengths, by the tokens of the run's longest row
    faults: list[str] = []
    for layout in _LAYOUTS[setting]:
        if (layout.kind.shares_prefixes and not share_prefixes) or not _runs_on(engine.network, layout):
            continue
        if one_stream and layout.attention not in STREAM_ATTENTION:
            continue
        fault = _unseen_layers(engine.network, layout) or own.fault(layout)
        if fault is None:
            reach = longest if layout.kind == AttentionKind.padded else max(longest, row)
            if reach not in copies:
                copies[reach] = own.with_short_lengths(reach)
            short = copies[reach]
            fault = None if short is None else short.fault(layout)
        if fault is None:
            if faults:
                logger.warning("%s is trained %s, and not %s", name, layout, "; nor ".join(faults))
            return layout
        faults.append(f"{layout}: {fault}")
    others = " or ".join(sorted(set(AttentionImplementation) - {setting}))
    shorter = copies.get(longest)
    limit = (
        "" if shorter is None else f"sequences of fewer than {shorter.shortest} tokens (generation.context_length), "
    )
    raise UnsupportedModelError(
        f"{name} cannot be trained with model.attn_implementation={str(setting)!r}; tried {'; '.join(faults)}. Use "
        f"{limit}{_WHOLE if one_stream else f'model.attn_implementation={others}'}, or another model"
    )


def layouts(setting: AttentionImplementation) -> tuple[SequenceLayout, ...]:
    """Return the layouts to try for `setting`, in order."""
    return _LAYOUTS[setting]


def _runs_on(network: PreTrainedModel, layout: SequenceLayout) -> bool:
    """True if the kernel of `layout` exists for the device and type of `network`."""
    return layout.attention != VARLEN or kernel_exists(network.device, network.dtype)


def kernel_variants(layout: SequenceLayout) -> tuple[SequenceLayout, ...]:
    """Return the layouts by which micro-batches of `layout` are computed: a separate kernel may do those that share
    nothing.
    """
    if layout == SequenceLayout(AttentionKind.tree, VARLEN):
        return SequenceLayout(AttentionKind.packed, VARLEN), layout
    return (layout,)


def refuse_longer_than_independent(network: PreTrainedModel, longest: int) -> None:
    """Refuse sequences so long that they would change the results of other sequences in their micro-batch.

    Args:
        longest: tokens of the longest sequence of the run.

    Raises:
        UnsupportedModelError: the model has such a limit, and it is below `longest`.
    """
    limit = batch_independent_limit(network.config)
    if limit is not None and longest > limit:
        raise UnsupportedModelError(
            f"{type(network).__name__} cannot be trained on sequences of {longest} tokens: its rotary positions "
            f"(longrope) change for all sequences of a batch once one is longer than {limit} tokens. Use at most "
            f"{limit} tokens as dataset.max_prompt_tokens + rollout.sampling.max_new_tokens (or "
            "generation.context_length), or another model"
        )


def _unseen_layers(network: PreTrainedModel, layout: SequenceLayout) -> str | None:
    """Return an error message if layers of `network` cannot be correct under `layout`, although no short sequence
    shows it.

    On padded rows transformers builds the masks of all layers itself.
    """
    kinds = layer_types(network.config)
    unseen = kinds - PLAIN_LAYERS - RECURRENT_LAYERS - TOKENWISE_LAYERS
    if layout.kind == AttentionKind.padded:
        return None
    if unseen:
        return f"its layers {sorted(unseen)} look at other keys than packed attention gives them"
    if layout.kind.shares_prefixes and (recurrent := kinds & RECURRENT_LAYERS):
        return f"its layers {sorted(recurrent)} go from token to token, and cannot branch"
    return None


class _Subject(Subject):
    """A model that `engine` trains."""

    def __init__(
        self, engine: ParityTestable, original: _Subject | None = None, lengths: Mapping[str, int] | None = None
    ) -> None:
        self._engine, self._layout = engine, first_layout(AttentionImplementation.eager)
        probes = probe_for(engine.network)
        sequences = [*probes, *forks(probes)] if original is None else original.sequences
        super().__init__(engine.network, engine.weights(), engine.pictures, sequences, original, lengths)

    def fault(self, layout: SequenceLayout) -> str | None:
        """Return the fault of the model under `layout`; None if it has none. The model stays set to `layout`."""
        for variant in kernel_variants(layout):
            self._layout = variant
            if (fault := self.found_fault()) is not None:
                return fault
        return None

    def _refusal(self, reason: str) -> UnsupportedModelError:
        name = type(self.network).__name__
        return UnsupportedModelError(f"{name} cannot be trained: {reason}. Use another model.dtype, or another model")

    def _plain(self, tokens: Tokens) -> Tensor:
        return self._engine.plain(tokens)

    def _plain_again(self) -> Sequence[Tensor]:
        return self._engine.plain_again(self.sequences)

    def _copy(self, short: ShortModel) -> Self:
        return type(self)(self._engine.with_network(short.model), self, short.lengths)

    @torch.no_grad()
    def _difference(self, sequences: Sequence[Tokens], plain: Sequence[Tensor]) -> Difference:
        set_attention(self.network, self._layout.attention)
        self._engine.attention = self._layout.kind
        return Difference.of(plain, self._engine.together(sequences))

    def _leak(self, sequences: Sequence[Tokens]) -> str | None:
        return find_leak(self.network, sequences, self._engine.together)
