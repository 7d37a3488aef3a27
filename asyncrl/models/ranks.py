"""A group of training ranks, and the few collectives that training, checkpoints and published weights need.

No object collectives: those pickle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

_REASON_CHARACTERS = 2000


Result = TypeVar("Result")


class PeerFailed(RuntimeError):
    """Another rank failed in a step that all ranks take together."""


@dataclass(frozen=True)
class Ranks:
    """A group of ranks and this one's number in it; `group` None is the whole world.

    With `world` 1 every collective is the identity and `torch.distributed` is not needed. Tensors may be on the CPU or
    on the ranks' device, the same on all of them.
    """

    rank: int = 0
    world: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        """True if this rank does the work that one rank of the group does for all."""
        return self.rank == 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by its sum over the ranks, and return it."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Replace each element of `tensor` by its largest value over the ranks, and return it."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the `data` of every rank, by rank; their lengths may differ."""
        if self.world == 1:
            return [data]
        lengths = torch.zeros(self.world, dtype=torch.int64)
        lengths[self.rank] = len(data)
        longest = int(self.all_reduce_sum(lengths).max())
        mine = torch.zeros(longest, dtype=torch.uint8)
        if data:  # torch makes no tensor of an empty buffer
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(gathered, mine, group=self.group)
        pairs = zip(gathered, lengths.tolist(), strict=True)
        return [tensor[:length].numpy().tobytes() for tensor, length in pairs]

    def send(self, tensor: Tensor, to: int) -> dist.Work:
        """Begin to send `tensor` to the rank `to` of this group."""
        return _begun(dist.isend(tensor, group=self.group, group_dst=to))

    def receive(self, tensor: Tensor, source: int) -> dist.Work:
        """Begin to receive into `tensor` from the rank `source` of this group."""
        return _begun(dist.irecv(tensor, group=self.group, group_src=source))

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with that of the leading rank, and return it."""
        if self.world > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def together(self, action: Callable[[], Result], what: str) -> Result:
        """Run `action` here while the other ranks run theirs. Return its result once all are done.

        An action may itself use `together`, if either all ranks reach that call or none does.

        Raises:
            PeerFailed: an action failed on another rank; the message says why. An exception of this rank's `action` is
                raised unchanged.
        """
        failure: Exception | None = None
        result: Result | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        failed = self.all_reduce_max(torch.tensor([0.0 if failure is None else 1.0]))
        if failed.item() > 0.0:
            reasons = self.all_gather_bytes(b"" if failure is None else repr(failure)[:_REASON_CHARACTERS].encode())
            if failure is not None:
                raise failure
            rank, reason = next((rank, reason.decode()) for rank, reason in enumerate(reasons) if reason)
            raise PeerFailed(f"{what} failed on another rank, {rank} of {self.world}: {reason}")
        return cast(Result, result)

    def _all_reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world > 1:
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None is for ranks outside the group
    return work
