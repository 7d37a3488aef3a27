"""TensorBoard event files of scalars, without TensorBoard, protobuf or torch.

The usual writers import torch or TensorFlow, which the MasterWorker must not: it starts in a second and stays small.
What they write for scalars is simple. A file is a series of records

    uint64 length | uint32 masked CRC-32C of the length | the event | uint32 masked CRC-32C of the event

in little-endian, and an event is a protobuf message (field numbers of tensorflow/core/util/event.proto):

    Event   {1: double wall_time, 2: int64 step, 3: string file_version, 5: Summary, 7: SessionLog}
    Summary {1: repeated Value}      Value {1: string tag, 2: float simple_value}      SessionLog {1: enum status}

A resumed run begins its file with a START of its first step, upon which TensorBoard hides later points of earlier
files.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # protobuf wire types
_CRC32C_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_SESSION_START = 1


class EventFile:
    """A new event file in `folder`, made if need be.

    Args:
        first_step: points of earlier files from this step on are hidden; None: a new run.
    """

    def __init__(self, folder: Path, first_step: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("xb")
        self._write(0, _field(3, _BYTES, b"brain.Event:2"))
        if first_step is not None:
            self._write(first_step, _field(7, _BYTES, _field(1, _VARINT, _varint(_SESSION_START))))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one point of `step` to every curve named in `scalars`."""
        values = b"".join(
            _field(1, _BYTES, _field(1, _BYTES, tag.encode()) + _field(2, _FIXED32, struct.pack("<f", value)))
            for tag, value in scalars.items()
        )
        self._write(step, _field(5, _BYTES, values))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, step: int, content: bytes) -> None:
        event = _field(1, _FIXED64, struct.pack("<d", time.time())) + _field(2, _VARINT, _varint(step)) + content
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_crc(length) + event + _masked_crc(event))
        self._file.flush()


def _field(number: int, wire_type: int, payload: bytes) -> bytes:
    """A protobuf field; `payload` is its encoded value, for bytes without their length."""
    length = _varint(len(payload)) if wire_type == _BYTES else b""
    return _varint(number << 3 | wire_type) + length + payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_CRC32C_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of `data`."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _CRC_TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def _masked_crc(data: bytes) -> bytes:
    """The checksum as TFRecord files store it: rotated and offset, so that a checksum of checksums is no accident."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)
