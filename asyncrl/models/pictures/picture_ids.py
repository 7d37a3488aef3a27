"""Ids for the rows of pictures, beyond a model's vocabulary: equal ids are equal inputs.

A picture is prepared once, as long as it is referenced, and its rows have the ids `first ... first + rows - 1`. The
most recently prepared pictures are held here, up to a limit in bytes.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.models.pictures.picture_processor import PictureProcessor

LAST_ID: Final = (1 << 31) - 1
"""Ids fit 32 bits, by which prefixes are sorted."""
RECENT_BYTES: Final = 256 << 20
"""Bytes of prepared pictures, with their rows, that are held even if no sample needs them."""


class Rows(NamedTuple):
    """Vectors of pictures: `embeds` [N, H] for the input, `deep` [N, H] for each of the first layers (DeepStack)."""

    embeds: Tensor
    deep: tuple[Tensor, ...]


@dataclass(eq=False)
class SeenPicture:
    """A picture prepared for the model.

    Attributes:
        sha256: hash of the encoded bytes.
        inputs: arguments of `get_image_features`, on the CPU.
        rows: number of rows.
        first: id of the first row; the others follow.
        nbytes: memory of inputs and rows.
        kept: the rows, and the weights that they were computed with.
    """

    sha256: str
    inputs: dict[str, Tensor]
    rows: int
    first: int
    nbytes: int
    kept: tuple[object, Rows] | None = field(default=None, repr=False)


class _Recent:
    """Holds the most recently prepared pictures, up to `RECENT_BYTES`, and always the last one."""

    def __init__(self) -> None:
        self.pictures: OrderedDict[str, SeenPicture] = OrderedDict()
        self.bytes = 0

    def add(self, seen: SeenPicture) -> None:
        """Hold `seen`, and release the oldest pictures beyond the limit."""
        self.pictures[seen.sha256] = seen
        self.bytes += seen.nbytes
        while self.bytes > RECENT_BYTES and len(self.pictures) > 1:
            _, old = self.pictures.popitem(last=False)
            self.bytes -= old.nbytes


class PictureIds:
    """The pictures of one model folder. For any thread.

    Args:
        processor: prepares the pictures.
        wanted: the prepared arrays that the model takes, by name.
        first: first id beyond the vocabulary.
        row_bytes: memory of a row.

    Attributes:
        token_id: the placeholder.
    """

    def __init__(self, processor: PictureProcessor, wanted: Collection[str], first: int, row_bytes: int) -> None:
        self._processor, self._wanted, self._row_bytes = processor, frozenset(wanted), row_bytes
        self.token_id, self.first = processor.token_id, first
        self._lock = threading.Lock()
        self._next: int = first
        self._seen: weakref.WeakValueDictionary[str, SeenPicture] = weakref.WeakValueDictionary()
        self._by_first: weakref.WeakValueDictionary[int, SeenPicture] = weakref.WeakValueDictionary()
        self._recent = _Recent()

    def at(self, first: int) -> SeenPicture | None:
        """Return the picture whose rows begin with the id `first`; None if there is none."""
        return self._by_first.get(first)

    def of_row(self, row: int) -> SeenPicture | None:
        """Return the picture that has the row of this id; None if there is none."""
        for first in range(row, self.first - 1, -1):
            if (seen := self.at(first)) is not None:
                return seen if row < first + seen.rows else None
        return None

    def seen(self, picture: Picture) -> SeenPicture:
        """Prepare `picture` for the model; returns the same object as long as it is referenced. For any thread.

        Raises:
            PictureError: the picture is damaged.
        """
        with self._lock:
            found = self._seen.get(picture.sha256)
            if found is not None:
                return found
        made, rows = self._processor.read(picture.image())
        inputs = {name: torch.as_tensor(np.asarray(value)) for name, value in made.items() if name in self._wanted}
        with self._lock:
            found = self._seen.get(picture.sha256)
            if found is None:
                size = sum(tensor.nbytes for tensor in inputs.values()) + rows * self._row_bytes
                found = SeenPicture(picture.sha256, inputs, rows, self._take_ids(rows), size)
                self._seen[picture.sha256] = self._by_first[found.first] = found
                self._recent.add(found)
            return found

    def shown(self, ids: Sequence[int], placed: Sequence[PlacedPicture]) -> tuple[list[int], list[SeenPicture]]:
        """Replace placeholders in `ids` by the rows of pictures. Return the new ids and the pictures.

        The caller must keep the pictures alive as long as it uses these ids.

        Raises:
            ValueError: the number of placeholders in a picture's span differs from the number of its rows.
            PictureError: a picture is damaged.
        """
        shown, pictures = list(ids), []
        for number, each in enumerate(placed):
            seen = self.seen(each.picture)
            places = [at for at in range(each.position, each.end) if ids[at] == self.token_id]
            if len(places) != seen.rows:
                raise ValueError(
                    f"picture {number} of {each.picture.size} pixels has {seen.rows} rows, and its span from "
                    f"{each.position} to {each.end} has {len(places)} placeholders ({self.token_id}); render it anew"
                )
            for row, at in enumerate(places):
                shown[at] = seen.first + row
            pictures.append(seen)
        return shown, pictures

    def plain(self, ids: Sequence[int]) -> list[int]:
        """Return `ids` with placeholders in place of rows."""
        return [token if token < self.first else self.token_id for token in ids]

    def within(self, ids: Sequence[int]) -> list[tuple[int, SeenPicture]]:
        """Return the pictures of a sequence of ids, each with the position of its first row."""
        return [(at, seen) for at, each in enumerate(ids) if each >= self.first and (seen := self.at(each))]

    def _take_ids(self, rows: int) -> int:
        if self._next + rows > LAST_ID:
            self._next = self.first
        for first, seen in sorted(self._by_first.items()):
            if first < self._next + rows and self._next < first + seen.rows:
                self._next = first + seen.rows
        self._next += rows
        return self._next - rows
