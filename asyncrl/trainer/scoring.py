"""Log-probabilities and entropies from hidden states, without ever holding the logits of a whole batch.

For V = 150,000 the fp32 logits of 16k tokens take 10 GB, and as much again for the gradient. Tokens are therefore
scored in chunks whose logits take at most `MAX_LOGITS_BYTES`; where gradients are needed and there is more than one
chunk, a chunk's logits are computed again in the backward pass instead of kept.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum, auto
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from asyncrl.architectures.transformers_internals import logits_of_head

MAX_LOGITS_BYTES = 256 << 20
"""fp32 logits of one chunk: large enough that the head's matrix product is efficient, small beside any model."""


class EntropyMode(StrEnum):
    """Whether entropies are computed with the log-probabilities."""

    none = auto()
    constant = auto()
    """For statistics: they carry no gradient."""
    differentiable = auto()
    """For an entropy bonus."""


LogitsOf = Callable[[Tensor], Tensor]


def logits_function(model: PreTrainedModel) -> LogitsOf:
    """The map from hidden states [N, H] to logits [N, V] of `model`: its output embedding, scaled and soft-capped as
    its config says. That `model` does no more is proven at load (`asyncrl.trainer.proof`).
    """
    head = cast(nn.Module, model.get_output_embeddings())  # type: ignore[no-untyped-call]
    return logits_of_head(model.config, head)


def token_logprobs(
    hidden_NH: Tensor,
    targets_N: Tensor,
    logits_of: LogitsOf,
    *,
    temperature: float = 1.0,
    entropy: EntropyMode = EntropyMode.none,
    max_logits_bytes: int = MAX_LOGITS_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of `targets_N` at `temperature` and the entropy of each distribution, in nats; fp32, [N].

    Args:
        hidden_NH: the trunk's output at the position before each target.
    """
    if len(targets_N) == 0:
        empty = hidden_NH.sum() * 0.0 + hidden_NH.new_zeros(0, dtype=torch.float32)
        return empty, None if entropy == EntropyMode.none else empty.detach()

    def score(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return _score(logits_of(hidden), targets, temperature, entropy)

    vocabulary = logits_of(hidden_NH[:1].detach()).shape[-1]
    rows = max(1, max_logits_bytes // (4 * vocabulary))
    if len(targets_N) <= rows:
        logprobs_N, entropy_N = score(hidden_NH, targets_N)
    else:
        parts = [
            checkpoint(score, hidden, targets, use_reentrant=False, preserve_rng_state=False)
            for hidden, targets in zip(torch.split(hidden_NH, rows), torch.split(targets_N, rows), strict=True)
        ]
        logprobs_N, entropy_N = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    return logprobs_N, None if entropy == EntropyMode.none else entropy_N


def _score(logits_NV: Tensor, targets_N: Tensor, temperature: float, entropy: EntropyMode) -> tuple[Tensor, Tensor]:
    logits_NV = logits_NV.float()
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    all_NV = torch.log_softmax(logits_NV, dim=-1)
    logprobs_N = all_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    if entropy == EntropyMode.none:
        return logprobs_N, logprobs_N.new_zeros(0)
    if entropy == EntropyMode.constant:
        all_NV = all_NV.detach()
    return logprobs_N, -(all_NV.exp() * all_NV).sum(dim=-1)
