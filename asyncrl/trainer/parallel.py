"""The data-parallel ranks and the few collectives that training needs. No object collectives: those pickle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


class PeerFailed(RuntimeError):
    """Another rank failed in a step that all ranks take together."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among `world` data-parallel ranks, each with a whole copy of every role.

    With `world` 1 every collective is the identity and `torch.distributed` is not needed. Tensors may be on the CPU or
    on the ranks' device, the same on all of them.
    """

    rank: int = 0
    world: int = 1

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum of `tensor` over ranks, in place."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Largest of `tensor` over ranks, in place."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def together(self, action: Callable[[], None], what: str) -> None:
        """Run `action` here while the other ranks run theirs; returns once all have.

        Raises:
            PeerFailed: it failed on another rank. An exception of this rank's `action` is raised as it is.
        """
        failure: BaseException | None = None
        try:
            action()
        except Exception as error:
            failure = error
        failed = self.all_reduce_max(torch.tensor([0.0 if failure is None else 1.0]))
        if failure is not None:
            raise failure
        if failed.item() > 0.0:
            raise PeerFailed(f"{what} failed on another rank than {self.rank}; see that model_worker's log")

    def _all_reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world > 1:
            dist.all_reduce(tensor, operation)
        return tensor
