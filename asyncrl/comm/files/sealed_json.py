"""A JSON file with its own checksum, so that a reader notices a flipped bit instead of using a wrong value.

    {"xxh3":"5f1d3c2a90b1e6d4","of":{"used_prompts":...}}

The checksum (XXH3, 64 bits) covers the bytes of the value after `"of":`. All other bytes are fixed, so a change of any
byte is noticed. The file stays JSON that other tools can read.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

_HEAD, _MIDDLE, _END = b'{"xxh3":"', b'","of":', b"}"
_DIGITS = 16


def seal(value: Any) -> bytes:
    """Return the JSON text of `value` with its checksum."""
    of = json.dumps(value).encode()
    return _HEAD + xxhash.xxh3_64_hexdigest(of).encode() + _MIDDLE + of + _END


def unseal(data: bytes) -> Any:
    """Return the value that `seal` turned into `data`.

    Raises:
        ValueError: `data` was changed, was cut off, or has no checksum.
    """
    of = data[len(_HEAD) + _DIGITS + len(_MIDDLE) : -len(_END)]
    if data != _HEAD + xxhash.xxh3_64_hexdigest(of).encode() + _MIDDLE + of + _END:
        raise ValueError("its checksum does not fit its content")
    return json.loads(of)
