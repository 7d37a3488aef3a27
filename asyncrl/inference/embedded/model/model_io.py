"""The engine's calls of the model: one decode step over the slots, any forward that writes to them (`prefix_forward`
uses it), and plain scoring of a prompt.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.inference.embedded.decoding.cache import CacheMaker
from asyncrl.inference.embedded.model.cached_attention import install_attention
from asyncrl.inference.embedded.model.linears import PackedLinears
from asyncrl.inference.embedded.model.masks import MaskArgument, MaskMaker
from asyncrl.inference.embedded.model.program import DecodeInputs, DecodeProgram
from asyncrl.inference.embedded.model.slot_experts import ExpertRecorder
from asyncrl.inference.embedded.model.states import states_in_modules
from asyncrl.models.chunked_logprobs import logits_function, token_logprobs
from asyncrl.models.pictures.picture_rows import Pictures
from asyncrl.models.transformers_internals import (
    decoding_parts,
    set_attention,
    text_settings,
    trunk_of,
    weight_used_in_float32,
)


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
        caches: makes caches for this model.
        cache: slots of the running samples.
        experts: recorded choices of experts for the contents of the slots; None if they are not recorded.
        masks: draws the masks of attention.
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
        model.train(False)
        model.requires_grad_(False)
        set_attention(model, install_attention())
        self.caches = CacheMaker(model)
        self.cache = self.caches.make(max_total_tokens)
        self.experts = ExpertRecorder(model, self.cache) if record_routing else None
        self.masks = MaskMaker(model, pictures, attends=self.caches.has_keys)
        self._linears = PackedLinears((), ())
        if not lean:
            self._linears = PackedLinears.of(*decoding_parts(model), head=weight_used_in_float32(model))
        self._program = DecodeProgram(model, self._linears.weights, usable=not lean)

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the model."""
        return int(text_settings(self.model.config)["vocab_size"])

    @property
    def three_positions(self) -> bool:
        """True if the model has three positions for a token, so that decode steps take their difference to places."""
        return self.pictures is not None and self.pictures.three_positions

    def find_states(self) -> None:
        """Search for states that the model keeps outside its cache, by a forward; only while no sample runs."""
        if self.cache.states:
            self.caches.places = states_in_modules(self.model)
            self._renew_cache()

    def drop_cache(self) -> int:
        """Drop the slots; only while no sample runs. Return their bytes."""
        freed = self.cache.nbytes
        for states in self.cache.states:
            states.expose({})  # the model's modules hold what it exposed last
        self._renew_cache()
        return freed

    def _renew_cache(self) -> None:
        make_room, self.cache = self.cache.make_room, self.caches.make(self.cache.limit)
        self.cache.make_room = make_room
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

    def _logits(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Compute one eager forward of the model."""
        with self._packed():
            logits: Tensor = self.model(input_ids=input_ids, **inputs).logits
        return logits

    def _packed(self) -> AbstractContextManager[Any]:
        """Return a block in which linear layers use their packed weights, if there are some."""
        return self._linears if self._linears.packed else nullcontext()

    def forward(self, input_ids: Tensor, attention_mask: MaskArgument, position_ids: Tensor, **inputs: Any) -> Tensor:
        """Compute one eager forward by the cache's plan, and record the chosen experts; return its logits.

        Args:
            inputs: further arguments of the model.
        """
        inputs |= {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": True}
        with nullcontext() if self.experts is None else self.experts.recording(self.cache):
            logits = self._logits(input_ids, cache=self.cache, **inputs)
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
        trunk, logits_of, first = trunk_of(self.model), logits_function(self.model), max(start, 1)
        with self._packed(), self.showing(np.array([prompt])):
            hidden_NH = trunk(input_ids=ids, **inputs).last_hidden_state[0, first - 1 : -1]
            plain = prompt if self.pictures is None else self.pictures.ids.plain(prompt)
            logprobs_N, _ = token_logprobs(hidden_NH, torch.tensor(plain[first:], device=self.device), logits_of)
        return [*([None] if start == 0 else []), *logprobs_N.tolist()]
