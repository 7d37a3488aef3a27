"""Seeds made of what they depend on."""

from __future__ import annotations

import hashlib


def seed_from(*parts: int | str) -> int:
    """A 31-bit seed (what every inference engine takes) that depends on all of `parts`; unrelated for unlike parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF
