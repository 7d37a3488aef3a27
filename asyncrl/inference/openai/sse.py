"""Frames of a stream of server-sent events."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

DONE: Final = b"data: [DONE]\n\n"
WAITING: Final = b": waiting for the policy\n\n"
"""A comment, which clients skip, to show that the connection is alive."""
HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}

_PIECE = re.compile(r"\s*\S+\s*?|\s+")


def encoded(value: Any) -> bytes:
    """Return `value` as JSON."""
    return msgspec.json.encode(value)


def frame(event: Any, name: str | None = None) -> bytes:
    """Return the frame of `event`, as JSON, with its `name` if the API names its events."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encoded(event) + b"\n\n"


def pieces(text: str) -> Iterator[str]:
    """Yield `text` word by word: an answer is streamed once it is complete."""
    return (found.group() for found in _PIECE.finditer(text))
