"""The decode step, recorded once as a TorchScript program, which saves Python's share of a small model's forward.

A decode forward of a small model is some hundred short operations, and Python's time between the operations is longer
than the operations. At 32 rows of a 0.2 M-parameter model the recorded program needs a third of the time, at 256 rows
four fifths.

The recording (`torch.jit.trace`) is valid for every number of rows and keys, as long as the model's control flow does
not depend on data. That is checked: a tracer warning (data turned into a Python value) refuses the recording, and the
first shapes are computed both ways and compared. If a check fails, the engine continues eagerly and logs that once.
Parameters are arguments of the program, not constants in it, so nothing computed from them outlives a weight update.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning
from transformers import PreTrainedModel

from asyncrl.inference.embedded.model.cached_attention import ATTENTION_NAME, DECODE_ATTENTION_NAME
from asyncrl.inference.embedded.model.linears import PackedLinears
from asyncrl.inference.embedded.model.masks import AttentionMasks
from asyncrl.models.transformers_internals import set_attention

logger = logging.getLogger(__name__)

Recorded = Callable[..., Tensor]

CHECKED_SHAPES = 4
"""Distinct (rows, keys) that every program is compared at before it is trusted."""
TOLERANCE = {torch.float32: 1e-5}
COARSE_TOLERANCE = 5e-2
"""Largest difference allowed relative to the largest logit: rounding of fp32, and of 16-bit types."""


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a decode step: a token per row, its position, the place of its key, and what the layers read."""

    tokens_R: Tensor
    position_ids: Tensor
    """`[R, 1]`, or `[3, R, 1]` of models with three positions a token."""
    index: Tensor
    """Flat positions of the slots to write to, see `DecodePlan.index`."""
    masks: AttentionMasks
    packed: tuple[Tensor, ...]
    """See `PackedLinears`."""
    slots: list[Tensor]
    """Keys and values of every layer."""

    @property
    def kind(self) -> tuple[bool, bool]:
        """Return which masks are present; every combination has its own program."""
        return (self.masks.full is not None, self.masks.windowed is not None)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and keys."""
        return (self.tokens_R.shape[0], self.slots[0].shape[2])

    def flat(self) -> tuple[Tensor, ...]:
        """Return the program's arguments."""
        masks = [mask for mask in (self.masks.full, self.masks.windowed) if mask is not None]
        return (
            self.tokens_R[:, None],
            self.position_ids,
            self.index,
            *masks,
            *self.packed,
            *self.slots,
        )


class _SlotTensors:
    """Replaces the cache while recording: writes to slot tensors that are inputs of the program."""

    def __init__(self, index: Tensor, slots: tuple[Tensor, ...]) -> None:
        self._index, self._slots = index, slots

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write this step's keys and values; return the slots."""
        key_slots, value_slots = self._slots[2 * layer], self._slots[2 * layer + 1]
        for slots, states in ((key_slots, keys), (value_slots, values)):
            slots.view(-1, slots.shape[3]).index_copy_(0, self._index, states.reshape(-1, slots.shape[3]))
        return key_slots, value_slots

    def get_seq_length(self, *_: object) -> int:
        """As `SlotLayer.get_seq_length`."""
        return 0


class _DecodeStep(nn.Module):
    """A decode forward with everything that changes between steps as an argument."""

    def __init__(self, model: PreTrainedModel, masks: AttentionMasks, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.model = model
        self._has_full, self._has_windowed = masks.full is not None, masks.windowed is not None
        self._mixed = masks.mixed
        self._weights = tuple(weights)

    def forward(self, tokens_R1: Tensor, position_ids: Tensor, index: Tensor, *tensors: Tensor) -> Tensor:
        """Return logits `[R, 1, V]`; `tensors` are the present masks, the packed weights, keys and values of every
        layer.
        """
        rest = list(tensors)
        full = rest.pop(0) if self._has_full else None
        windowed = rest.pop(0) if self._has_windowed else None
        count = len(self._weights)
        with PackedLinears(self._weights, rest[:count]):
            logits: Tensor = self.model(
                input_ids=tokens_R1,
                attention_mask=AttentionMasks(full, windowed, self._mixed).argument(),
                position_ids=position_ids,
                cache=_SlotTensors(index, tuple(rest[count:])),
                use_cache=True,
            ).logits
        return logits


@contextmanager
def _recording(model: PreTrainedModel) -> Iterator[list[warnings.WarningMessage]]:
    """Install the decode attention, and catch warnings.

    Embeddings do not know their padding token meanwhile: torch compares it with the size of the vocabulary, which the
    tracer takes for control flow. It matters to gradients alone.

    The tracer reads every property of the model, among them `loss_function`, and transformers would tell the user that
    the config names no loss.
    """
    reader = logging.getLogger("transformers.modeling_utils")
    level = reader.level
    padding = [(each, each.padding_idx) for each in model.modules() if isinstance(each, nn.Embedding)]
    set_attention(model, DECODE_ATTENTION_NAME)
    reader.setLevel(logging.ERROR)
    try:
        for embedding, _ in padding:
            embedding.padding_idx = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    finally:
        for embedding, token in padding:
            embedding.padding_idx = token
        reader.setLevel(level)
        set_attention(model, ATTENTION_NAME)


class DecodeProgram:
    """Runs recorded decode steps, one program for each set of masks. An answer of `None` means: compute it eagerly.

    Args:
        model: model that is recorded.
        weights: the parameters that every step brings packed.
        usable: steps are recorded at all.
    """

    def __init__(self, model: PreTrainedModel, weights: Sequence[Tensor], *, usable: bool = True) -> None:
        self._model, self._weights = model, weights
        self._programs: dict[tuple[bool, bool], Recorded] = {}
        self._checked: dict[tuple[bool, bool], set[tuple[int, int]]] = {}
        self._usable = usable and model.device.type == "cpu"

    def __call__(self, step: DecodeInputs) -> Tensor | None:
        """Return logits `[R, V]`; None if this shape has to be computed eagerly, and then passed to `check`."""
        checked = self._checked.setdefault(step.kind, set())
        if not self._usable or (len(checked) < CHECKED_SHAPES and step.shape not in checked):
            return None
        program = self._programs.get(step.kind)
        return None if program is None else program(*step.flat())[:, 0]

    def check(self, step: DecodeInputs, expected_RV: Tensor) -> None:
        """Record the step if it is not recorded yet, and compare it with the eager forward's result for the same input.

        The step writes the same keys and values once more, so repeating it is harmless.
        """
        if not self._usable:
            return
        program = self._programs.get(step.kind) or self._record(step)
        if program is None:
            return
        self._programs[step.kind] = program
        logits = program(*step.flat())[:, 0]
        tolerance = TOLERANCE.get(expected_RV.dtype, COARSE_TOLERANCE) * max(1.0, expected_RV.abs().max().item())
        difference = (logits - expected_RV).abs().max().item()
        if not difference <= tolerance:
            self._give_up(f"it differs from the eager forward by {difference:.2e} at shape {step.shape}")
            return
        self._checked[step.kind].add(step.shape)

    def _record(self, step: DecodeInputs) -> Recorded | None:
        try:
            with _recording(self._model) as caught:
                program: Recorded = torch.jit.trace(  # type: ignore[no-untyped-call]
                    _DecodeStep(self._model, step.masks, self._weights),
                    step.flat(),
                    check_trace=False,
                    _store_inputs=False,  # it would keep the current packed weights and slots in memory
                )
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
            self._give_up(f"recording failed: {error!r:.300}")
            return None
        doubts = [warning for warning in caught if issubclass(warning.category, TracerWarning)]
        if doubts:
            self._give_up(f"its control flow depends on data: {doubts[0].message!s:.300}")
            return None
        return program

    def _give_up(self, reason: str) -> None:
        self._usable = False
        self._programs.clear()
        logger.warning("decoding %s without a recorded program: %s", type(self._model).__name__, reason)
