"""The models that the engine serves: those that pass a comparison with transformers.

When a model is loaded, the engine is compared with transformers: prompts that begin alike, decode steps, a slot that
is copied meanwhile, prompts that continue from the copy, a scored prompt.

A model that passes is served. Any other is refused with its name, the reason, and what serves it. Faults that show only
in longer sequences than those of the check are searched for on a copy with short lengths
(`asyncrl.models.parity`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.inference.embedded.cache import LENGTH_STEP
from asyncrl.inference.embedded.step import ModelRunner, PrefixForward
from asyncrl.models.parity import (
    Difference,
    ShortModel,
    Subject,
    Tokens,
    UnsupportedModelError,
    forks,
    other_kernel,
    plain_logprobs,
    probe_for,
)
from asyncrl.models.transformers_internals import (
    CHUNKED_LAYERS,
    PLAIN_LAYERS,
    RECURRENT_LAYERS,
    TOKENWISE_LAYERS,
    attention_is_replaceable,
    batch_independent_limit,
    context_limit,
    keeps_recurrent_state,
    layer_types,
)

_log = logging.getLogger(__name__)

STEPS = 5
"""Tokens of each sequence that are decoded one by one; what is before goes into its slot as a prompt."""
_LATE = 2
"""The other sequences join this number of steps after the first."""
_FIRST = 4
"""Number of sequences that join first."""


def longest_sequence(model: PreTrainedModel, max_model_len: int | None) -> int:
    """Return the longest sequence that is served, in tokens: `max_model_len`, or by default the model's own limit.

    Raises:
        UnsupportedModelError: the engine does not serve such a model.
        ValueError: the length is missing, or out of range.
    """
    limit = context_limit(model.config)
    longest = limit if max_model_len is None else max_model_len
    if longest is None:
        raise ValueError("max_model_len is not given, and the model's config names no longest sequence; give one")
    refuse_unserved(model, longest)
    if longest < 1:
        raise ValueError(f"max_model_len is {longest}; it must be at least 1")
    if limit is not None and longest > limit:
        raise ValueError(f"max_model_len is {longest}, but the model's positions end at {limit}; lower it")
    return longest


def _positions(sequences: Sequence[Tokens]) -> int:
    """Return the number of cache positions for all `sequences`."""
    return len(sequences) * (max(map(len, sequences)) + 2 * LENGTH_STEP)


def refuse_unserved(model: PreTrainedModel, longest: int) -> None:
    """Refuse what slots cannot hold, and what only sequences of up to `longest` tokens would show.

    Raises:
        UnsupportedModelError: the model has it.
    """
    kinds = layer_types(model.config)
    unserved = sorted(kinds - PLAIN_LAYERS - CHUNKED_LAYERS - RECURRENT_LAYERS - TOKENWISE_LAYERS)
    if keeps_recurrent_state(model) and not kinds & RECURRENT_LAYERS:
        raise _refusal(model, "it carries a state from token to token in a form of its own, not in transformers' cache")
    if unserved:
        raise _refusal(model, f"its layers {unserved} do not look at all keys or at the last of a window")
    limit = batch_independent_limit(model.config)
    if limit is not None and longest > limit:
        raise _refusal(
            model,
            f"a context of {longest} tokens was asked for, and its rotary positions (longrope) change for all "
            f"sequences of a batch once one is longer than {limit}. Use generation.context_length={limit} or less",
        )


def check_parity(forward: PrefixForward, longest: int) -> None:
    """Find settings of `forward` and its runner that compute what transformers' plain forward computes; leave them so.

    Several sequences share the batch. They are computed by the model, and by a copy with lengths below theirs.

    Args:
        longest: tokens of the longest sequence that will be served.

    Raises:
        UnsupportedModelError: the results differ by more than rounding, or the model cannot be computed so.
    """
    model, subject = forward.runner.model, _Subject(forward)
    own = "" if attention_is_replaceable(model) else "it has an attention of its own; "
    fault, hint = "", ""
    short = subject.with_short_lengths(longest)
    # Attention may use places in a row instead of positions, as in MPT; a scan may restart at every prefill.
    for supports_continuation in (True, False):
        for pattern in range(len(forward.runner.masks.patterns)):
            hint, found = "", subject.fault(pattern, supports_continuation)
            if found is None and short is not None:
                hint = f"generation.context_length={short.shortest - 1} or less, or "
                found = short.fault(pattern, supports_continuation)
            if found is None:
                if not supports_continuation:
                    _log.info("%s: %severy prompt is prefilled from its beginning", type(model).__name__, own)
                return
            fault = found
    raise _refusal(model, f"{own}{fault}", hint)


class _Subject(Subject):
    """A model that `forward` serves."""

    forward_of_engine = "its forward with slots"

    def __init__(
        self, forward: PrefixForward, original: _Subject | None = None, lengths: Mapping[str, int] | None = None
    ) -> None:
        self._forward = forward
        model, pictures = forward.runner.model, forward.runner.pictures
        sequences = _sequences(model) if original is None else original.sequences
        weights = dict(model.named_parameters(remove_duplicate=False))
        super().__init__(model, weights, pictures, sequences, original, lengths)

    def fault(self, pattern: int, supports_continuation: bool) -> str | None:
        """Describe how the runner's results for the sequences are wrong; None if they are right.

        Args:
            pattern: pattern of attention that the runner is set to.
            supports_continuation: value that the forward is set to.
        """
        self._forward.runner.masks.pattern = pattern
        self._forward.supports_continuation = supports_continuation
        return self.found_fault()

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return _refusal(self.network, reason)

    def _compute_plain(self) -> None:
        super()._compute_plain()
        self._forward.runner.find_states()

    def _plain(self, tokens: Tokens) -> Tensor:
        return plain_logprobs(self.network, tokens, self._pictures)

    def _plain_again(self) -> Sequence[Tensor]:
        return other_kernel(self.network, self.sequences)

    def _copy(self, short: ShortModel) -> Self:
        pictures = None if self._pictures is None else self._pictures.around(short.model)
        runner = ModelRunner(short.model, _positions(self.sequences), lean=True, pictures=pictures)
        return type(self)(PrefixForward(runner), self, short.lengths)

    def _difference(self, sequences: Sequence[Tokens], plain: Sequence[Tensor]) -> Difference:
        """Compare what is decoded and what is scored of `sequences` with `plain`, and return the larger difference: the
        two have their own code. Other sequences join `sequences` until they are as many as the text probes.
        """
        others = self.sequences[len(sequences) :]
        decoded = _decoded(self._forward, [*sequences, *others])[: len(sequences)]
        scored = [_scored(self._forward.runner, tokens) for tokens in sequences]
        tails = [its[-len(mine) :] for its, mine in zip(plain, decoded, strict=True)]
        found = Difference.of(tails, decoded), Difference.of(plain, scored)
        return max(found, key=lambda each: (math.isnan(each.mean), each.mean))


def _sequences(model: PreTrainedModel) -> list[list[int]]:
    probes = probe_for(model)
    forked = forks(probes)
    first = [*probes[:2], *forked[:2]]  # they join together
    held = first[-1][: len(first[-1]) - 1 - STEPS + _LATE]  # in its slot when others join, one by a copy
    empty = probes[0][: STEPS + 1]  # a single token, so nothing is prefilled
    later = [[*held, *more, *empty] for more in (probes[2][:2], probes[0][:2], probes[0][:3])]  # continue from `held`
    return [*first, *probes[2:], *forked[2:], [*held, *empty], *later, empty]


def _refusal(model: PreTrainedModel, reason: str, other: str = "") -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} is not served by the embedded engine: {reason}. Use {other}generation.backend=sglang"
    )


@torch.inference_mode()
def _decoded(forward: PrefixForward, sequences: Sequence[Tokens]) -> list[Tensor]:
    """Return log-probabilities of the last tokens of `sequences`, decoded together in a separate cache, `[STEPS]`."""
    steps = min(STEPS, min(len(tokens) for tokens in sequences) - 1)
    prompts = [tuple(tokens[: len(tokens) - 1 - steps]) for tokens in sequences]
    runner = forward.runner
    cache, runner.cache = runner.cache, runner.make_cache(_positions(sequences))
    try:
        logprobs: list[list[Tensor]] = [[] for _ in sequences]
        _join(forward, prompts, range(_FIRST), {})
        for step in range(steps + _LATE):
            if step == _LATE:
                held = {tuple(sequences[row][: len(prompts[row]) + step]): row for row in range(_FIRST)}
                _join(forward, prompts, range(_FIRST, len(sequences)), held)
            rows = _FIRST if step < _LATE else len(sequences)
            begun = [0 if row < _FIRST else _LATE for row in range(rows)]
            fed = [min(step - begun[row], steps - 1) for row in range(rows)]  # at the end: once more
            positions = [len(prompts[row]) + fed[row] for row in range(rows)]
            runner.cache.reserve(rows, max(positions) + 1, rows, max(positions))
            tokens_R = torch.tensor(
                [sequences[row][position] for row, position in enumerate(positions)], device=runner.device
            )
            deltas_R = None
            if runner.pictures is not None and runner.three_positions:
                deltas = [runner.pictures.delta(sequences[row]) for row in range(rows)]
                deltas_R = torch.tensor(deltas, device=runner.device)
            logits_RV = runner.decode(tokens_R, torch.tensor(positions, device=runner.device), False, deltas_R)
            for row, position in enumerate(positions):
                if len(logprobs[row]) < steps:
                    logprobs[row].append(logits_RV[row].float().log_softmax(-1)[sequences[row][position + 1]])
        return [torch.stack(each) for each in logprobs]
    finally:
        runner.cache = cache


def _join(
    forward: PrefixForward, prompts: Sequence[tuple[int, ...]], rows: range, held: Mapping[tuple[int, ...], int]
) -> None:
    """Copy what earlier rows have of the prompts of `rows`, and prefill the rest."""
    runner = forward.runner
    live = max((len(tokens) for tokens in held), default=0)
    runner.cache.reserve(rows.stop, max(live, max(len(prompts[row]) for row in rows)) + 1, rows.start, live)
    slots_of: dict[tuple[int, ...], list[int]] = {}
    bases: dict[tuple[int, ...], int] = {}
    for row in rows:
        prompt = prompts[row]
        base = next((tokens for tokens in held if prompt[: len(tokens)] == tokens), ())
        if base and (forward.supports_continuation or len(base) == len(prompt)):
            target, source_1 = (torch.tensor([slot], device=runner.device) for slot in (row, held[base]))
            runner.cache.move(target, source_1, len(base))
            bases[prompt] = len(base)
        if bases.get(prompt, 0) < len(prompt) or not prompt:
            slots_of.setdefault(prompt, []).append(row)
    forward.compute(slots_of, bases)


@torch.inference_mode()
def _scored(runner: ModelRunner, tokens: Tokens) -> Tensor:
    scores = runner.prompt_logprobs(tuple(tokens), 0)[1:]
    return torch.tensor([score for score in scores if score is not None], device=runner.device)
