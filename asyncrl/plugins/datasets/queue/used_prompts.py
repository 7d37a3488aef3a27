"""Set of used prompts, that is, trained or dropped for good; compact and ready for JSON.

A prompt id is `e<epoch>-<row>`, so the set is one bitmap of rows per epoch: a million rows take 125 kB, and
compressed a finished epoch takes next to nothing. Ids of another form (a user's own stream) are kept as they are.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PROMPT_ID = re.compile(r"e(0|[1-9]\d*)-(0|[1-9]\d*)")
_MAX_ROW = 1 << 32


class UsedPrompts:
    """A set of prompt ids that only grows."""

    def __init__(self, prompt_ids: Iterable[str] = ()) -> None:
        self._rows: dict[int, bytearray] = {}
        self._packed: dict[int, str] = {}  # of unchanged epochs, so that only changed ones are packed again
        self._others: set[str] = set()
        self._count = 0
        for prompt_id in prompt_ids:
            self.add(prompt_id)

    def add(self, prompt_id: str) -> None:
        """Add an id. Adding it again has no effect."""
        if prompt_id in self:
            return
        self._count += 1
        parsed = parse_prompt_id(prompt_id)
        if parsed is None:
            self._others.add(prompt_id)
            return
        epoch, row = parsed
        self._packed.pop(epoch, None)
        bitmap = self._rows.setdefault(epoch, bytearray())
        byte = row >> 3
        if byte >= len(bitmap):
            bitmap.extend(bytes(max(byte + 1 - len(bitmap), len(bitmap))))  # at least doubled: growing stays linear
        bitmap[byte] |= 1 << (row & 7)

    def __contains__(self, prompt_id: object) -> bool:
        parsed = parse_prompt_id(prompt_id) if isinstance(prompt_id, str) else None
        if parsed is None:
            return prompt_id in self._others
        epoch, row = parsed
        bitmap = self._rows.get(epoch, b"")
        return (row >> 3) < len(bitmap) and bool(bitmap[row >> 3] >> (row & 7) & 1)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        """Yield the ids by epoch and row, then those of another form."""
        for epoch in sorted(self._rows):
            for byte, bits in enumerate(self._rows[epoch]):
                yield from (f"e{epoch}-{byte * 8 + bit}" for bit in range(8) if bits >> bit & 1)
        yield from sorted(self._others)

    @property
    def epochs(self) -> list[int]:
        """The epochs of which a prompt is used, ascending."""
        return sorted(self._rows)

    def rows(self, epoch: int) -> NDArray[np.int64]:
        """Return the rows that are used in `epoch`, ascending."""
        return np.flatnonzero(np.unpackbits(np.frombuffer(self._rows[epoch], np.uint8), bitorder="little"))

    def to_json(self) -> dict[str, Any]:
        """Return the set as JSON values; `from_json` reads it back."""
        for epoch in self._rows.keys() - self._packed.keys():
            bitmap = bytes(self._rows[epoch]).rstrip(b"\0")
            self._packed[epoch] = base64.b64encode(zlib.compress(bitmap)).decode()
        epochs = {str(epoch): packed for epoch, packed in self._packed.items()}
        return {"count": self._count, "epochs": epochs, "others": sorted(self._others)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> UsedPrompts:
        """Return the set that `to_json` wrote.

        Raises:
            ValueError: the value is malformed, or its number of ids is not the one it states.
        """
        try:
            used, count = cls(value["others"]), int(value["count"])
            for epoch, packed in value["epochs"].items():
                bitmap = bytearray(zlib.decompress(base64.b64decode(packed)))
                used._rows[int(epoch)] = bitmap
                used._count += sum(byte.bit_count() for byte in bitmap)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, zlib.error) as error:
            raise ValueError(f"used prompts cannot be read; the file is damaged: {error!r:.200}") from error
        if used._count != count:
            raise ValueError(f"used prompts: {used._count} ids where count says {count}; the file is damaged")
        return used


def parse_prompt_id(prompt_id: str) -> tuple[int, int] | None:
    """Return the epoch and row of the prompt id `e<epoch>-<row>`; None if it is of another form."""
    match = _PROMPT_ID.fullmatch(prompt_id)
    if match is None or int(match[2]) >= _MAX_ROW:
        return None
    return int(match[1]), int(match[2])
