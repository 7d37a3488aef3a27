"""The engine's calls of the model: one decode step, any forward that writes to slots, plain scoring of a prompt.

Packed linear layers
--------------------
Weights are in oneDNN's own blocked layout, without touching the model.

A decode step is mostly products of a few rows with large weights. Torch passes fp32 products to MKL with the weight as
it is. oneDNN packs the weight once, and was up to twice as fast where it was measured (AMD Zen 5, 8 to 128 rows). While
a `PackedLinears` is in force (it is a context manager), `F.linear` with a weight that it has packed goes to oneDNN;
everything else is unchanged. A 16-bit output embedding that computes in float32 (`compute_head_in_float32`) has a copy
in float32, which would otherwise be made at each step: `weight.float()` returns that copy.

The copies take the memory of the weights once more. They are rebuilt after a weight update: some 0.1 ms per weight for
oneDNN's preparation, beside the copying. A few dozen decode steps of many rows win that back. Without them a step of
SmolLM2-135M takes half as long again (fp32, 16 rows, one core).

The recorded step
-----------------
The decode step is recorded once as a TorchScript program, which saves Python's share of a small model's forward.

A decode forward of a small model is some hundred short operations, and Python's time between the operations is longer
than the operations. At 32 rows of a 0.2 M-parameter model the recorded program needs a third of the time, at 256 rows
four fifths. A step of SmolLM2-135M takes a quarter longer without it (fp32 and bfloat16, 16 rows, one core).

The recording (`torch.jit.trace`) is valid for every number of rows and keys, as long as the model's control flow does
not depend on data. That is checked: a tracer warning (data turned into a Python value) refuses the recording, and the
first shapes are computed both ways and compared. If a check fails, the engine continues eagerly and logs that once.
Parameters are arguments of the program, not constants in it, so nothing computed from them outlives a weight update.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.jit._trace import TracerWarning
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from asyncrl.inference.embedded.attention import (
    ATTENTION_NAME,
    DECODE_ATTENTION_NAME,
    AttentionMasks,
    MaskArgument,
    MaskMaker,
    install_attention,
)
from asyncrl.inference.embedded.cache import Prefix, PrefixRow, RowTensors, SlotCache, batches_of
from asyncrl.models.chunked_logprobs import logits_function, token_logprobs
from asyncrl.models.transformers_internals import (
    decoding_parts,
    layer_memories,
    set_attention,
    text_settings,
    trunk_of,
    weight_used_in_float32,
)

if TYPE_CHECKING:
    from asyncrl.inference.embedded.experts import ExpertRecorder
    from asyncrl.inference.embedded.states import StateAttribute
    from asyncrl.models.pictures import Pictures

logger = logging.getLogger(__name__)


LEAST_WEIGHT = 2**16
"""Entries below which a weight is left alone: oneDNN's fixed cost of a call, some 8 us, would exceed the gain."""


@torch.jit.script
def _packed_linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with a packed weight; scripted because `torch.jit.trace` cannot record the empty list of scalars."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return result


class PackedLinears(TorchFunctionMode):
    """The packed weights of a model's linear layers; empty if oneDNN would not help (other dtypes and devices).

    Args:
        weights: the parameters, as the layers hold them.
        packed: `weights` in oneDNN's layout, in the same order.
    """

    def __init__(self, weights: Sequence[Tensor], packed: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = tuple(weights)
        self.packed: tuple[Tensor, ...] = ()
        self._by_id: dict[int, Tensor] = {}
        self._hold(packed)

    @classmethod
    def of(cls, *parts: nn.Module, head: Tensor | None = None) -> PackedLinears:
        """Pack the weights of a model's `parts` that are large enough.

        Args:
            head: weight of another type that is used in float32.
        """
        extra = [] if head is None else [head]
        if not torch._C._has_mkldnn:
            return cls(extra, [_pack(weight) for weight in extra])
        layers = [layer for part in parts for layer in part.modules() if isinstance(layer, nn.Linear)]
        found = {id(layer.weight): layer.weight for layer in layers}
        weights = [
            weight
            for weight in found.values()
            if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= LEAST_WEIGHT
        ]
        weights += extra
        return cls(weights, [_pack(weight) for weight in weights])

    def drop(self) -> int:
        """Drop the copies until `renew`; return their bytes."""
        freed = sum(weight.numel() * torch.float32.itemsize for weight in self.weights) if self.packed else 0
        self.packed, self._by_id = (), {}
        return freed

    def renew(self) -> None:
        """Pack the weights as they are now, into the memory of the former copies, which are dropped first."""
        self.drop()
        self._hold([_pack(weight) for weight in self.weights])

    def _hold(self, packed: Sequence[Tensor]) -> None:
        self.packed = tuple(packed)
        pairs = list(zip(self.weights, packed, strict=True))
        self._by_id = {id(weight): copy for weight, copy in pairs}
        self._by_id |= {id(copy): copy for weight, copy in pairs if weight.dtype != torch.float32 and copy.is_mkldnn}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Send `F.linear(states, weight, bias)` to oneDNN if `weight` is packed."""
        if func is Tensor.float and args[0].dtype != torch.float32 and id(args[0]) in self._by_id:
            return self._by_id[id(args[0])]
        if func is nn.functional.linear and not kwargs:
            packed = self._by_id.get(id(args[1]))
            if packed is not None:
                return _packed_linear(args[0], packed, args[2] if len(args) > 2 else None)
        return func(*args, **(kwargs or {}))


def _pack(weight: Tensor) -> Tensor:
    values = weight.detach().float()
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return values
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(values)
    return packed


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


class ModelRunner:
    """An unmodified transformers causal LM with the slot cache.

    Args:
        model: in evaluation mode, on its device and in its dtype; its attention implementation is set here.
        max_total_tokens: limit of the KV cache, in positions.
        record_routing: record the experts that it chooses; steps are then computed eagerly.
        lean: do not copy weights to a faster layout and do not record steps, as in a parity check.
        pictures: pictures of `model`; None if it serves text alone.

    Raises:
        UnsupportedModelError: it has no routers whose choices could be recorded.

    Attributes:
        cache: slots of the running samples.
        experts: recorded choices of experts for the contents of the slots; None if they are not recorded.
        masks: draws the masks of attention.
        vocab_size: number of tokens of the model.
        three_positions: it has three positions for a token, so that decode steps take their difference to places.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_total_tokens: int,
        *,
        record_routing: bool = False,
        lean: bool = False,
        pictures: Pictures | None = None,
    ) -> None:
        self.model, self.pictures, self.device = model, pictures, model.device
        self.vocab_size = int(text_settings(model.config)["vocab_size"])
        self.three_positions = pictures is not None and pictures.three_positions
        model.train(False)
        model.requires_grad_(False)
        set_attention(model, install_attention())
        self._trunk, self._logits_of = trunk_of(model), logits_function(model)
        self._memories = layer_memories(model.config)
        self._state_attributes: list[StateAttribute] = []
        self.cache = self.make_cache(max_total_tokens)
        self.experts: ExpertRecorder | None = None
        if record_routing:
            from asyncrl.inference.embedded.experts import ExpertRecorder

            self.experts = ExpertRecorder(model, self.cache)
        self.masks = MaskMaker(model, pictures, attends=any(memory.keys for memory in self._memories))
        self._linears = PackedLinears((), ())
        if not lean:
            self._linears = PackedLinears.of(*decoding_parts(model), head=weight_used_in_float32(model))
        self._program = DecodeProgram(model, self._linears.weights, usable=not lean)

    def make_cache(self, max_total_tokens: int) -> SlotCache:
        """Return an empty cache with this number of positions."""
        if not self._state_attributes and not any(memory.states for memory in self._memories):
            return SlotCache(self._memories, self.device, max_total_tokens)
        from asyncrl.inference.embedded.states import ModuleStates, state_layer

        cache = SlotCache(self._memories, self.device, max_total_tokens, state_layer)
        if self._state_attributes:
            cache.states.append(ModuleStates(self._state_attributes))
        return cache

    def find_states(self) -> None:
        """Search for states that the model keeps outside its cache, by a forward; only while no sample runs."""
        if self.cache.states:
            from asyncrl.inference.embedded.states import states_in_modules

            self._state_attributes = states_in_modules(self.model)
            self._renew_cache()

    def drop_cache(self) -> int:
        """Drop the slots; only while no sample runs. Return their bytes."""
        freed = self.cache.nbytes
        for states in self.cache.states:
            states.expose({})  # the model's modules hold what it exposed last
        self._renew_cache()
        return freed

    def _renew_cache(self) -> None:
        before_growth, self.cache = self.cache.before_growth, self.make_cache(self.cache.limit)
        self.cache.before_growth = before_growth
        if self.experts is not None:
            self.experts.follow(self.cache)

    def drop_copies(self) -> int:
        """Drop what was made from the weights, which are about to change. Return the bytes of packed weights."""
        freed = self._linears.drop()
        if self.pictures is not None:
            self.pictures.tower.weights_changed()
        return freed

    def weights_changed(self) -> None:
        """Drop what was computed from the earlier weights."""
        self._linears.renew()
        if self.pictures is not None:
            self.pictures.tower.weights_changed()

    def _packed(self) -> AbstractContextManager[Any]:
        """Return a block in which linear layers use their packed weights, if there are some."""
        return self._linears if self._linears.packed else nullcontext()

    def forward(self, input_ids: Tensor, attention_mask: MaskArgument, position_ids: Tensor, **inputs: Any) -> Tensor:
        """Compute one eager forward by the cache's plan, and record the chosen experts; return its logits.

        Args:
            inputs: further arguments of the model.
        """
        inputs |= {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": True}
        with nullcontext() if self.experts is None else self.experts.recording(self.cache), self._packed():
            logits: Tensor = self.model(input_ids=input_ids, cache=self.cache, **inputs).logits
        self.cache.end_forward()
        return logits

    def showing(self, ids: NDArray[np.int64]) -> AbstractContextManager[None]:
        """Return a block in which the model knows the pictures in `ids`, in host memory, of its next input."""
        return nullcontext() if self.pictures is None else self.pictures.holding(ids, keep=True)

    def decode(self, tokens_R: Tensor, positions_R: Tensor, full_rows: bool, deltas_R: Tensor | None = None) -> Tensor:
        """Feed one token per row; return logits `[R, V]`.

        Args:
            positions_R: places in the slots.
            full_rows: every row fills its slot to the end.
            deltas_R: difference between positions and places, for models with `three_positions`.
        """
        plan = self.cache.begin_decode(tokens_R.shape[0], positions_R)
        masks = self.masks.of_step(positions_R, self.cache.layout.length, full_rows)
        position_ids = positions_R[:, None]
        if deltas_R is not None:
            position_ids = (position_ids + deltas_R[:, None]).expand(3, -1, 1)
        slots = None if self.cache.states else self.cache.decode_slots()
        if slots is None or self.experts is not None:
            return self.forward(tokens_R[:, None], masks.argument(), position_ids)[:, 0]
        step = DecodeInputs(
            tokens_R, position_ids, plan.index(self.cache.layout, slots[0].shape[1]), masks, self._linears.packed, slots
        )
        logits = self._program(step)
        if logits is None:
            logits = self.forward(tokens_R[:, None], masks.argument(), position_ids)[:, 0]
            self._program.check(step, logits)
        return logits

    def prompt_logprobs(self, prompt: tuple[int, ...], start: int) -> list[float | None]:
        """Return log-probabilities of `prompt[start:]` at temperature 1; None for the prompt's first token.

        Rows of pictures count as the placeholder. The logits of a part of the prompt are in memory at a time
        (`token_logprobs`).
        """
        ids = torch.tensor([prompt], device=self.device)
        inputs: dict[str, Any] = {"attention_mask": self.masks.of_prompts(ids), "use_cache": False}
        if self.three_positions and self.pictures is not None:
            inputs["position_ids"] = torch.from_numpy(self.pictures.positions(prompt)[:, None]).to(self.device)
        first = max(start, 1)
        with self._packed(), self.showing(np.array([prompt])):
            hidden_NH = self._trunk(input_ids=ids, **inputs).last_hidden_state[0, first - 1 : -1]
            plain = prompt if self.pictures is None else self.pictures.ids.plain(prompt)
            logprobs_N, _ = token_logprobs(hidden_NH, torch.tensor(plain[first:], device=self.device), self._logits_of)
        return [*([None] if start == 0 else []), *logprobs_N.tolist()]


PREFILL_TOKENS, PREFILL_TOKENS_CPU = 8192, 1024
"""Most prompt tokens (padding included) of one prefill forward: bounds its activations. On a CPU they then stay in its
caches, and prompts of one forward are of nearly one length: ragged ones take half the time of forwards of 8192."""


class PrefixForward:
    """The forwards that compute prefixes with the model and cache of `runner`.

    Attributes:
        most_tokens: largest number of tokens of one forward, padding included.
        supports_continuation: False if the model computes a prefix from its beginning only; the parity check finds it.
        computed_tokens: number of tokens of prefixes that were computed so far.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.most_tokens = PREFILL_TOKENS_CPU if runner.device.type == "cpu" else PREFILL_TOKENS
        self.supports_continuation = True
        self.computed_tokens = 0

    def compute(self, slots_of: Mapping[Prefix, list[int]], bases: Mapping[Prefix, int] | None = None) -> None:
        """Compute keys, values and states of the prefixes, and store each in its slots; an empty prefix has none.

        Args:
            slots_of: slots of each prefix.
            bases: by prefix, the number of its tokens that its slots have already, fewer than all; 0 for missing ones.
        """
        cache = self.runner.cache
        if empty := slots_of.get(()):
            cache.clear(torch.tensor(empty, device=self.runner.device))
        rows = [PrefixRow(prefix, (bases or {}).get(prefix, 0)) for prefix in filter(None, slots_of)]
        for batch in batches_of(rows, self.most_tokens, ragged=not cache.states):
            tensors = RowTensors.of(batch, slots_of, self.runner.device, self._positions_of)
            cache.begin_prefill(tensors)
            self._forward(tensors)
        self.computed_tokens += sum(row.size for row in rows)

    def compute_part(
        self, prefix: Prefix, base: int, rows: list[Tensor], states: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Compute `prefix[base:]` without a slot.

        Args:
            prefix: tokens up to the end of the part.
            base: beginning of the part.
            rows: rows before the part, in the form of `SlotCache.read`.
            states: states before the part, in the form of `SlotCache.read_states`.

        Returns:
            Rows and states of the part, in the same forms.
        """
        cache = self.runner.cache
        part = PrefixRow(prefix, base)
        cache.begin_part(rows, states)
        self._forward(RowTensors.of([part], {prefix: [0]}, self.runner.device, self._positions_of))
        self.computed_tokens += part.size
        return cache.part()

    def end_of_part(self, prefix: Prefix, end: int) -> int:
        """Return the first place from `end` on at which a part of `prefix` may end."""
        pictures = self.runner.pictures
        return pictures.end_outside(prefix, end) if pictures is not None and pictures.two_way else end

    @property
    def _positions_of(self) -> Callable[[Prefix], NDArray[np.int64]] | None:
        pictures = self.runner.pictures
        return pictures.positions if pictures is not None and pictures.three_positions else None

    def _forward(self, rows: RowTensors) -> None:
        """Compute `rows` by the cache's plan."""
        with self.runner.showing(rows.ids_BU):
            self.runner.forward(rows.tokens_BU, self.runner.masks.of_rows(rows), rows.positions, logits_to_keep=1)
