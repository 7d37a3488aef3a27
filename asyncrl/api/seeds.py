"""Derive seeds from the values that they depend on."""

from __future__ import annotations

import hashlib


def seed_from(*parts: int | str) -> int:
    """Return a 31-bit seed that depends on all `parts`; seeds of different parts are unrelated.

    Every inference engine accepts 31 bits.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF
