"""Requests to an EncoderServer, and its replies."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from msgspec import Struct

MAX_CLIPS, MAX_FRAMES = 1024, 1024
"""Most clips of a request, and most frames of a clip."""
MAX_BODY_BYTES = 256 << 20
"""Largest request; pictures are base64 in it."""


class EmbedRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /embed`: embed clips.

    Attributes:
        clips: SHA-256 of the frames of each clip, in order.
        pictures: PNG or JPEG bytes of frames, by SHA-256; without those of a clip only a cached embedding is returned.
    """

    clips: list[list[str]]
    pictures: dict[str, bytes] = {}


class EmbedReply(Struct, frozen=True):
    """Embeddings `[N, D]` of the clips; null for a clip whose frames the server needs."""

    embeddings: list[list[float] | None]


def clip_key(frames: Sequence[str]) -> str:
    """Return the name of a clip: the hash of its frames' hashes."""
    return hashlib.sha256("".join(frames).encode()).hexdigest()
