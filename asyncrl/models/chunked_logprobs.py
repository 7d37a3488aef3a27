"""Log-probabilities and entropies from hidden states. The logits of a whole batch are never in memory.

For V = 150,000 the fp32 logits of 16k tokens take 10 GB. Their gradient takes as much again for each step from logits
to log-probabilities. Tokens are therefore scored in chunks whose logits take at most
`MAX_LOGITS_BYTES`. If gradients are needed and there is more than one chunk, a chunk's logits are not kept but computed
again in the backward pass. From logits to log-probabilities is one step (`_Score`), with the gradient written
over what the forward pass left: there are never more than two buffers of the chunk's size, three for logits in half
precision.

Shapes: N tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum, auto
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from asyncrl.models.transformers_internals import has_more_than_head, logits_of_head, logits_of_model

MAX_LOGITS_BYTES = 256 << 20
"""fp32 logits of one chunk: large enough that the head's matrix product is efficient, small beside any model."""
_BLOCK = 1 << 22
"""Numbers of a chunk that are processed at a time if that needs a separate buffer: 16 MiB, which stays near the caches.
"""
_GPU_BLOCK = 1 << 26
"""Numbers at a time on a GPU: all of a chunk of 256 MiB, because every piece costs launches."""


class EntropyMode(StrEnum):
    """Ways to compute entropies together with the log-probabilities."""

    none = auto()
    constant = auto()
    """For statistics: they carry no gradient."""
    differentiable = auto()
    """For an entropy bonus."""


LogitsOf = Callable[[Tensor], Tensor]
Score = Callable[[Tensor, Tensor, EntropyMode], tuple[Tensor, Tensor]]
"""Logits [N, V], targets [N], entropy mode to log-probabilities [N] and entropies [N]."""


def logits_function(model: PreTrainedModel) -> LogitsOf:
    """Return the map from hidden states [N, H] to logits [N, V] of `model`.

    It is the output embedding, scaled and soft-capped as configured, or the model's own code if there are other
    parameters. The check at load proves that `model` does no more (`asyncrl.trainer.model.layout_parity`).
    """
    if has_more_than_head(model):
        return logits_of_model(model)
    head = cast(nn.Module, model.get_output_embeddings())  # type: ignore[no-untyped-call]
    return logits_of_head(model.config, head)


def restricted(logits_NV: Tensor, allowed_A: Tensor, offset: int = 0) -> Tensor:
    """Return the logits with all tokens but `allowed_A` set to a number whose probability is exactly 0.

    The number is finite: with -inf, log 0 times probability 0 would make the entropy NaN.

    Args:
        logits_NV: logits of the tokens from `offset` on, of any float type.
    """
    ids_V = torch.arange(offset, offset + logits_NV.shape[-1], device=logits_NV.device)
    lowest = max(torch.finfo(logits_NV.dtype).min / 4, -1e30)
    return logits_NV.masked_fill(~torch.isin(ids_V, allowed_A), lowest)


def token_logprobs(
    hidden_NH: Tensor,
    targets_N: Tensor,
    logits_of: LogitsOf,
    *,
    temperature: float = 1.0,
    entropy: EntropyMode = EntropyMode.none,
    max_logits_bytes: int = MAX_LOGITS_BYTES,
    score: Score | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities of `targets_N` at `temperature` and the entropy of each distribution, in nats; fp32,
    [N].

    Args:
        hidden_NH: the trunk's output at the position before each target.
        score: needed if `logits_of` gives only a slice of the vocabulary; None if it gives all of it.
    """
    score_logits: Score = score or _Score.apply
    if len(targets_N) == 0:
        empty = hidden_NH.sum() * 0.0 + hidden_NH.new_zeros(0, dtype=torch.float32)
        return empty, None if entropy == EntropyMode.none else empty.detach()

    def score_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits_NV = logits_of(hidden)
        if temperature != 1.0:
            logits_NV = logits_NV.float().div_(temperature)  # not used elsewhere; autograd would raise an error
        return score_logits(logits_NV, targets, entropy)

    vocabulary = logits_of(hidden_NH[:1].detach()).shape[-1]
    rows = max(1, max_logits_bytes // (4 * vocabulary))
    if len(targets_N) <= rows:
        logprobs_N, entropy_N = score_chunk(hidden_NH, targets_N)
    else:
        parts = [
            checkpoint(score_chunk, hidden, targets, use_reentrant=False, preserve_rng_state=False)
            for hidden, targets in zip(torch.split(hidden_NH, rows), torch.split(targets_N, rows), strict=True)
        ]
        logprobs_N, entropy_N = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    return logprobs_N, None if entropy == EntropyMode.none else entropy_N


class _Score(Function):
    """Log-probabilities of the targets and entropies, both [N] in fp32, from logits [N, V] of any float type.

    With log p = log_softmax(x), a gradient g of log p(target) and h of the entropy S = -sum_v p_v log p_v give

        dx_v = g ([v = target] - p_v) - h p_v (log p_v + S)
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, entropy: EntropyMode) -> tuple[Tensor, Tensor]:
        all_NV = torch.log_softmax(logits_NV, dim=-1, dtype=torch.float32)
        logprobs_N = all_NV.gather(-1, targets_N[:, None]).squeeze(-1)
        wanted = _blocks(all_NV) if entropy != EntropyMode.none else ()
        entropy_N = torch.cat([logprobs_N[:0], *(-block.exp().mul_(block).sum(dim=-1) for block in wanted)])
        if entropy != EntropyMode.differentiable:
            ctx.mark_non_differentiable(entropy_N)
        ctx.save_for_backward(all_NV, targets_N, entropy_N)
        ctx.dtype, ctx.bonus = logits_NV.dtype, entropy == EntropyMode.differentiable
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor, None, None]:
        all_NV, targets_N, entropy_N = ctx.saved_tensors
        # Overwrites the saved tensor; autograd would raise an error in a second backward pass.
        if ctx.bonus:
            columns_N3 = torch.stack((entropy_N, grad_entropy_N, grad_N), dim=-1)
            for block, columns in zip(_blocks(all_NV), _blocks(all_NV, columns_N3), strict=True):
                entropies, grad_entropies, grads = columns[:, :, None].unbind(1)
                probabilities = block.exp()
                block.add_(entropies).mul_(grad_entropies).add_(grads).neg_().mul_(probabilities)
        else:
            all_NV.exp_().mul_(-grad_N[:, None])
        all_NV.scatter_add_(-1, targets_N[:, None], grad_N[:, None])
        return all_NV.to(ctx.dtype), None, None


def _blocks(all_NV: Tensor, values_N: Tensor | None = None) -> tuple[Tensor, ...]:
    """Split `values_N` (default: `all_NV`) into runs of tokens that have about `_BLOCK` numbers in `all_NV`."""
    block = _BLOCK if all_NV.device.type == "cpu" else _GPU_BLOCK
    rows = max(1, block // all_NV.shape[-1])
    return torch.split(all_NV if values_N is None else values_N, rows)
