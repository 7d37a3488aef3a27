"""Cut tensors into pieces of limited bytes, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def in_pieces(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield the items in order, in lists whose sizes add up to `limit` at most; a larger item has a separate list."""
    piece: list[T] = []
    total = 0
    for item in items:
        if piece and total + size(item) > limit:
            yield piece
            piece, total = [], 0
        piece.append(item)
        total += size(item)
    if piece:
        yield piece
