"""The pictures that a server keeps for requests that name them: each content once, up to a limit in bytes.

A request names its pictures by hash. The client sends missing ones once and repeats the request. The least recently
used are dropped first. A running request holds its own pictures, so a drop only costs another transfer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from asyncrl.api.picture import Picture, PictureRef, PlacedPicture

CACHE_BYTES = 512 << 20
"""`max_bytes` of a server outside of a run."""


class MissingPicture(LookupError):
    """The request names pictures that are not kept here; `hashes` are theirs."""

    def __init__(self, hashes: Sequence[str]) -> None:
        super().__init__(f"{len(hashes)} pictures are not kept here: send their bytes to /pictures, then ask again")
        self.hashes = hashes


class PictureCache:
    """Pictures by hash, the least recently used first. For one thread.

    Args:
        max_bytes: largest number of bytes that are kept; one picture is kept however large.

    Attributes:
        received: number of pictures received so far.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Picture] = OrderedDict()
        self.nbytes = 0
        self.received = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, picture: Picture) -> None:
        """Keep `picture`."""
        self.received += 1
        if picture.sha256 not in self._kept:
            self._kept[picture.sha256] = picture
            self.nbytes += len(picture.data)
        self._kept.move_to_end(picture.sha256)
        while self.nbytes > self._max_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self.nbytes -= len(dropped.data)

    def placed(self, prompts: Sequence[Sequence[PictureRef]]) -> list[tuple[PlacedPicture, ...]]:
        """Return the pictures of each prompt.

        Raises:
            MissingPicture: some are not kept here.
        """
        wanted = dict.fromkeys(ref.sha256 for refs in prompts for ref in refs)
        if missing := [sha256 for sha256 in wanted if sha256 not in self._kept]:
            raise MissingPicture(missing)
        for sha256 in wanted:
            self._kept.move_to_end(sha256)
        return [
            tuple(PlacedPicture(ref.position, ref.length, self._kept[ref.sha256]) for ref in refs) for refs in prompts
        ]
