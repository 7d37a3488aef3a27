"""Log-probabilities and entropies where each tensor-parallel rank has the logits of a slice of the vocabulary.

Three numbers per token cross the ranks: the largest logit, then the sums of exp and of exp times logit, with the
target's logit from whoever has it. All are whole, and alike, on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.trainer.engines.sharded.collectives import Group


class _Logprobs(torch.autograd.Function):
    """With p the distribution and H its entropy: d log p_t / dx_j = [j = t] - p_j; dH / dx_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(ctx: Any, logits_Nv: Tensor, targets_N: Tensor, offset: int, group: Group) -> tuple[Tensor, Tensor]:
        width = logits_Nv.shape[-1]
        largest_N = logits_Nv.amax(dim=-1) if width else logits_Nv.new_full((len(logits_Nv),), float("-inf"))
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        shifted_Nv = logits_Nv - largest_N[:, None]
        exp_Nv = shifted_Nv.exp()
        local_N = targets_N - offset
        mine_N = (local_N >= 0) & (local_N < width)
        place_N = local_N.clamp(0, max(width - 1, 0))
        target_N = shifted_Nv.gather(-1, place_N[:, None]).squeeze(-1) if width else torch.zeros_like(largest_N)
        sums_3N = torch.stack([exp_Nv.sum(-1), (exp_Nv * shifted_Nv).sum(-1), torch.where(mine_N, target_N, 0.0)])
        dist.all_reduce(sums_3N, group=group)
        total_N, weighted_N, target_N = sums_3N
        log_total_N = total_N.log()
        entropy_N = log_total_N - weighted_N / total_N
        ctx.save_for_backward(shifted_Nv, log_total_N, entropy_N, place_N, mine_N)
        return target_N - log_total_N, entropy_N

    @staticmethod
    def backward(ctx: Any, d_logprob_N: Tensor, d_entropy_N: Tensor) -> tuple[Tensor, None, None, None]:
        shifted_Nv, log_total_N, entropy_N, place_N, mine_N = ctx.saved_tensors
        log_p_Nv = shifted_Nv - log_total_N[:, None]
        grad_Nv = -(d_logprob_N[:, None] + d_entropy_N[:, None] * (log_p_Nv + entropy_N[:, None])) * log_p_Nv.exp()
        if grad_Nv.shape[-1]:
            grad_Nv.scatter_add_(-1, place_N[:, None], (d_logprob_N * mine_N)[:, None])
        return grad_Nv, None, None, None


def sliced_logprobs(logits_Nv: Tensor, targets_N: Tensor, vocabulary: int, group: Group) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `targets_N` and entropies of the distributions, in nats; fp32, [N] each.

    Args:
        logits_Nv: this rank's slice of the fp32 logits: ceil(V / ranks) of `vocabulary` V, fewer on the last ranks.
    """
    offset = -(-vocabulary // dist.get_world_size(group)) * dist.get_rank(group)
    result: tuple[Tensor, Tensor] = _Logprobs.apply(logits_Nv, targets_N, offset, group)  # type: ignore[no-untyped-call]
    return result
