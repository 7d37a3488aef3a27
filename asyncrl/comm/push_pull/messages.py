"""The messages of push-pull.

    pusher ─▶ puller    [ seq + seq + ..., header, payload ]    trajectories of trajectory_codec.py and their numbers
    puller ─▶ pusher    [ "A" + seq + seq + ... ]               accepted (said again for duplicates)
                        [ "N" + seq + reason ]                  invalid: no use in sending it again

`seq` is the pusher's own number of a trajectory, an unsigned 64-bit little-endian number. Trajectories that are pushed
at about the same time share a message, because most of what a small one costs is paid per message: up to
BATCH_TRAJECTORIES and BATCH_BYTES. A message of more than BATCH_BYTES holds a single trajectory, so that a refusal for
size hits nobody else.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from asyncrl.comm.codec import CodecError, Frame
from asyncrl.comm.push_pull.outbox import Entry
from asyncrl.comm.trajectory_codec import Prepared, encode_prepared

_REFUSAL = struct.Struct("<cQ")
_ACK, _NACK = b"A", b"N"
BATCH_BYTES = 1 << 20  # of arrays in one message: beyond it what is paid per message no longer shows
BATCH_TRAJECTORIES = 64  # in one message: a quarter of what a pusher holds by default, so that both ends have work
_MAX_REASON = 500  # bytes of a refusal's reason
DEFAULT_MAX_BYTES = 256 << 20
"""Limit of one trajectory in bytes: 20 million tokens."""


class Batch:
    """What is to share one message."""

    def __init__(self) -> None:
        self.entries: list[Entry[Prepared]] = []
        self._nbytes = 0

    def add(self, entry: Entry[Prepared]) -> bool:
        """Take `entry` in; False if it has no room here. An empty batch has room for every one."""
        nbytes = self._nbytes + entry.content.nbytes
        if self.entries and (nbytes > BATCH_BYTES or len(self.entries) == BATCH_TRAJECTORIES):
            return False
        self.entries.append(entry)
        self._nbytes = nbytes
        return True


def pack(entries: Sequence[Entry[Prepared]]) -> list[Frame]:
    """The message that carries `entries`."""
    seqs = struct.pack(f"<{len(entries)}Q", *(entry.seq for entry in entries))
    return [seqs, *encode_prepared([entry.content for entry in entries])]


def unpack_seqs(frame: memoryview) -> tuple[int, ...]:
    """The numbers at the head of a pusher's message.

    Raises:
        CodecError: these are none.
    """
    if not len(frame) or len(frame) % 8:
        raise CodecError(f"message begins with {len(frame)} bytes, which are no trajectories' numbers")
    return struct.unpack(f"<{len(frame) // 8}Q", frame)


def pack_acks(seqs: Sequence[int]) -> bytes:
    """The acknowledgement of these numbers."""
    return struct.pack(f"<c{len(seqs)}Q", _ACK, *seqs)


def pack_nack(seq: int, reason: str) -> bytes:
    """The refusal of number `seq`."""
    return _REFUSAL.pack(_NACK, seq) + reason.encode()[:_MAX_REASON]


def unpack_reply(frame: bytes) -> tuple[tuple[int, ...], str | None]:
    """The numbers in a puller's reply, and None if they are acknowledged, else the reason of the refusal.

    Raises:
        CodecError: it is no reply of a puller.
    """
    if frame[:1] == _ACK and len(frame) % 8 == 1:
        return struct.unpack_from(f"<{len(frame) // 8}Q", frame, 1), None
    if frame[:1] == _NACK and len(frame) >= _REFUSAL.size:
        return (_REFUSAL.unpack_from(frame)[1],), frame[_REFUSAL.size :].decode(errors="replace")
    raise CodecError(f"reply of {len(frame)} bytes is neither an acknowledgement nor a refusal")
