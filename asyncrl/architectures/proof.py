"""Does an engine compute what transformers computes, and keep sequences apart? Asked once, at load, before a token counts.

The measure is transformers' own forward: eager attention, one sequence at a time, no cache. An engine is given several
short sequences at once, as it will get them in a run, and must pass two tests:

1. **Equal**: each sequence's numbers are those of the plain forward. Engine and plain forward sum in other orders, so
   they differ by rounding: by some 1e-6 nats a token in fp32, by some 1e-2 in bf16. What is wrong differs by 0.1 to 4
   nats a token on real weights: state that leaked from a neighbour, an attention sink or a soft cap that was left out.
2. **Alone**: with every other sequence replaced, the rest must not change. This sees a leak that hides in test 1's
   rounding, for shapes and kernels are the same and a right engine answers with the same bits (a mixture of experts
   within rounding: its groups change their sizes). The allowance is therefore what rounding does to the pack's *first*
   sequence, which nothing can leak into.

Both look at the mean of the absolute difference over a sequence's tokens: rounding averages to little, while one wrong
token of ten still shows. Random weights with the usual spread of 0.02 make attention almost uniform and leaks tiny
(LFM2: 2e-6 nats in fp32); test 2 finds them there too, as the mutation tests of this module show.

Short sequences cannot show what begins later: a window or a chunk of attention that is longer than they are. What
depends on those is checked by name (`transformers_internals.PLAIN_LAYERS`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.architectures.transformers_internals import attention, text_settings

Tokens = Sequence[int]

LENGTHS = (19, 12, 11, 7)
"""Tokens of the sequences: ragged and few, so that the proof costs some ten forwards of as many tokens as a sentence."""
_SEED = 77


class UnsupportedModelError(ValueError):
    """An engine cannot compute this model; the message holds the architecture, the reason and what works."""


@dataclass(frozen=True)
class Tolerance:
    """Greatest mean absolute differences of a sequence. `equal`: to the plain forward. `alone`: by other neighbours,
    or `ROUNDING_FACTOR` times the rounding of the first sequence where that is more."""

    equal: float
    alone: float


FLOAT32 = Tolerance(equal=1e-4, alone=1e-6)
COARSE = Tolerance(equal=0.05, alone=2e-3)
"""For bf16 and fp16."""
ROUNDING_FACTOR = 3.0


def tolerance(dtype: torch.dtype) -> Tolerance:
    """What is rounding where parameters are of `dtype`."""
    return FLOAT32 if dtype in (torch.float32, torch.float64) else COARSE


def probe_sequences(vocabulary: int, context: int | None) -> list[list[int]]:
    """The sequences that are asked for, longest first; none longer than `context`."""
    draw = random.Random(_SEED)
    lengths = LENGTHS if context is None else [min(length, context) for length in LENGTHS]
    return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]


def probe_for(model: PreTrainedModel) -> list[list[int]]:
    """`probe_sequences` for `model`."""
    settings = text_settings(model.config)
    return probe_sequences(int(settings["vocab_size"]), settings.get("max_position_embeddings"))


def with_other_neighbours(sequences: Sequence[Tokens], vocabulary: int) -> list[list[int]]:
    """`sequences` with the first and every second after it changed in every token."""
    draw = random.Random(_SEED + 1)
    changed = [[(token + 1 + draw.randrange(vocabulary - 1)) % vocabulary for token in each] for each in sequences]
    return [changed[i] if i % 2 == 0 else list(each) for i, each in enumerate(sequences)]


def find_fault(
    sequences: Sequence[Tokens],
    vocabulary: int,
    *,
    plain: Callable[[Tokens], Tensor],
    engine: Callable[[Sequence[Tokens]], Sequence[Tensor]],
    allowed: Tolerance,
) -> str | None:
    """What is wrong with `engine`; None where both tests pass.

    Args:
        plain: what transformers computes of one sequence, a number or a vector for each token.
        engine: the same of several sequences at once. Both are compared in nats, or where they are hidden states in
            multiples of their root mean square.
    """
    got = engine(sequences)
    rounding = 0.0
    for index, (tokens, mine) in enumerate(zip(sequences, got, strict=True)):
        difference = _mean_difference(plain(tokens), mine)
        if not difference <= allowed.equal:  # NaN is wrong too
            return (
                f"of {len(sequences)} sequences computed together, number {index + 1} differs from transformers' plain "
                f"forward of it alone by {difference:.2g} a token, where rounding is below {allowed.equal:g}"
            )
        if index == 0:
            rounding = difference
    other = engine(with_other_neighbours(sequences, vocabulary))
    limit = max(allowed.alone, ROUNDING_FACTOR * rounding)
    for index in range(1, len(sequences), 2):
        difference = _mean_difference(got[index], other[index])
        if not difference <= limit:
            return (
                f"sequence {index + 1} of {len(sequences)} computed together changes by {difference:.2g} a token when "
                f"its neighbours do, where rounding is below {limit:.2g}: they leak into it"
            )
    return None


def plain_logprobs(model: PreTrainedModel, tokens: Tokens) -> Tensor:
    """log p(tokens[t] | tokens[:t]) for t >= 1 at temperature 1 by transformers alone, [L - 1], fp32."""
    ids = torch.tensor([list(tokens)], device=model.device)
    with torch.no_grad(), attention(model, "eager"):
        logits_LV = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return logits_LV.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def plain_hidden(trunk: PreTrainedModel, tokens: Tokens) -> Tensor:
    """The last hidden state at each token by transformers alone, [L, H], fp32, each divided by its root mean square."""
    ids = torch.tensor([list(tokens)], device=trunk.device)
    with torch.no_grad(), attention(trunk, "eager"):
        hidden_LH: Tensor = trunk(input_ids=ids, use_cache=False).last_hidden_state[0]
    return in_rms(hidden_LH)


def in_rms(hidden_LH: Tensor) -> Tensor:
    """Hidden states in multiples of their own root mean square, fp32."""
    hidden_LH = hidden_LH.float()
    return hidden_LH / hidden_LH.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-12)


def _mean_difference(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().mean())
