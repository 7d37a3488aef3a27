"""Frames of a stream of server-sent events."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

DONE: Final = b"data: [DONE]\n\n"
WAITING: Final = b": waiting for the policy\n\n"
"""A comment, which clients skip: the connection lives."""
HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}

_PIECE = re.compile(r"\s*\S+\s*?|\s+")


def encoded(value: Any) -> bytes:
    """`value` as JSON."""
    return msgspec.json.encode(value)


def frame(event: Any, name: str | None = None) -> bytes:
    """`event` as JSON; where the API names its events, under `name`."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encoded(event) + b"\n\n"


def pieces(text: str) -> Iterator[str]:
    """`text` in parts, word by word: an answer is streamed once it is complete."""
    return (found.group() for found in _PIECE.finditer(text))
