"""The messages of push-pull.

    pusher ─▶ puller    [ Numbers, header, payload ]    trajectories of `trajectory_codec` and their numbers
    puller ─▶ pusher    [ Accepted | Refused ]

Each pusher numbers its trajectories. Those pushed at about the same time share a message of up to BATCH_TRAJECTORIES
and BATCH_BYTES, because most of the cost of a small trajectory is per message. A message of more than BATCH_BYTES holds
a single trajectory, so that a refusal for size affects no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from asyncrl.comm.push_pull.outbox import OutboxEntry
from asyncrl.comm.sockets import Frame
from asyncrl.comm.trajectory_codec import Prepared, decode_typed, encode_prepared
from asyncrl.comm.typed import msgpack_decoder

BATCH_BYTES = 1 << 20  # of arrays in one message: above this size the cost per message is negligible
BATCH_TRAJECTORIES = 64  # in one message: a quarter of what a pusher holds by default, so that both ends have work
MAX_REASON = 500  # characters of a refusal's reason
DEFAULT_MAX_BYTES = 256 << 20
"""Limit of one trajectory in bytes: 20 million tokens."""


class Batch:
    """Trajectories that share one message."""

    def __init__(self) -> None:
        self.entries: list[OutboxEntry[Prepared]] = []
        self._nbytes = 0

    def add(self, entry: OutboxEntry[Prepared]) -> bool:
        """Add `entry` and return True, or return False if it does not fit. An empty batch takes any entry."""
        nbytes = self._nbytes + entry.content.nbytes
        if self.entries and (nbytes > BATCH_BYTES or len(self.entries) == BATCH_TRAJECTORIES):
            return False
        self.entries.append(entry)
        self._nbytes = nbytes
        return True


Numbers: TypeAlias = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]


class Accepted(msgspec.Struct, tag="accepted", frozen=True):
    """The trajectories with these numbers were accepted. Duplicates get this reply again."""

    numbers: Numbers


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The trajectories with these numbers are invalid and must not be sent again."""

    numbers: Numbers
    reason: str


Reply: TypeAlias = Accepted | Refused
_NUMBERS = msgpack_decoder(Numbers)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgpack_decoder(Reply)


def pack(entries: Sequence[OutboxEntry[Prepared]]) -> list[Frame]:
    """Return the message that carries `entries`."""
    return [encode([entry.seq for entry in entries]), *encode_prepared([entry.content for entry in entries])]


def encode(message: list[int] | Reply) -> bytes:
    """Return the frame of numbers or of a reply."""
    return msgspec.msgpack.encode(message)


def decode_numbers(frame: Frame) -> list[int]:
    """Return the numbers in the first frame of a pusher's message.

    Raises:
        CodecError: the frame is malformed.
    """
    return decode_typed(_NUMBERS, frame, "numbers of trajectories")


def decode_reply(frame: Frame) -> Reply:
    """Decode a puller's reply.

    Raises:
        CodecError: it is not a puller's reply.
    """
    return decode_typed(_REPLY, frame, "reply")
