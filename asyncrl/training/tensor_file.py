"""Writing a safetensors file straight from the tensors' memory.

`safetensors.torch.save_file` refuses views that share a storage, so a trainer with flat parameters would have to copy
every tensor first: fresh memory as large as the model, at each version. Here a tensor on the CPU is written where it
lies, and one elsewhere passes through a copy of itself alone.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, little-endian; the header,
JSON padded with spaces, with dtype, shape and byte range of every tensor; then the bytes. Tensors lie in the order of
falling element size, so that each is aligned.

The file's checksum is computed from the same memory by a second thread while this one writes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import orjson
import torch
from torch import Tensor

from asyncrl.training.weights_manifest import FileEntry

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8
_SUM_BYTES = 1 << 20  # summed at a time: handing less to the other thread costs more than summing it


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write `tensors`, whatever their device and strides, to the new file `path`, not synced; its size and checksum.

    Raises:
        OSError: it cannot be written.
        TypeError: a tensor is of a type that has no name in the format.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"tensor {name!r} is {tensor.dtype}; a weight file takes {', '.join(map(str, DTYPE_NAMES))}"
            )
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    encoded = orjson.dumps(header)
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with FileIO(path, "x") as file, _Sum() as sum_:
        head = memoryview(struct.pack("<Q", len(encoded)) + encoded)
        _write(file, head)
        sum_.add(head)
        for _, tensor in ordered:
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().data
            _write(file, data)
            sum_.add(data)
        return FileEntry.of(len(head) + end, sum_.result())


def _write(file: FileIO, data: memoryview) -> None:
    """Write all of `data`: one call writes at most 2 GiB."""
    while data:
        data = data[file.write(data) :]


class _Sum:
    """The CRC-32 of what is added, computed on a thread of its own, which is never more than two lots behind: what it
    still has to sum stays in memory.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._waiting: list[memoryview] = []
        self._waiting_bytes = 0
        self._before: Future[int] | None = None

    def __enter__(self) -> _Sum:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def add(self, data: memoryview) -> None:
        """Sum `data` too; it must not change any more."""
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= _SUM_BYTES:
            self._before = self._pool.submit(_crc32, self._waiting, self._so_far())
            self._waiting, self._waiting_bytes = [], 0

    def result(self) -> int:
        """The sum of all that was added."""
        return _crc32(self._waiting, self._so_far())

    def _so_far(self) -> int:
        return 0 if self._before is None else self._before.result()


def _crc32(parts: Sequence[memoryview], before: int) -> int:
    for part in parts:
        before = zlib.crc32(part, before)
    return before
