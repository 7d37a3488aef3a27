"""What writing together asks of the ranks that do it; the trainer's groups of ranks are such."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """A group of ranks that write one folder, and this one's number in it. Every method is called by all of them."""

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""

    @property
    def world(self) -> int:
        """How many there are."""

    @property
    def leads(self) -> bool:
        """Whether this rank does what one of them has to do for all: creating the folder, completing it."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum of `tensor` over ranks, in place."""

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Largest of `tensor` over ranks, in place."""

    def together(self, action: Callable[[], None], what: str) -> None:
        """Run `action` here while the other ranks run theirs; returns once all have, raises if one failed."""
