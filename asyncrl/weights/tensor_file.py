"""Writing a safetensors file straight from the tensors' memory.

`safetensors.torch.save_file` refuses views that share a storage, so a trainer with flat parameters would have to copy
every tensor first: fresh memory as large as the model, at each version. Here a tensor on the CPU is written where it
lies, and one elsewhere passes through a copy of itself alone.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, little-endian; the header,
JSON padded with spaces, with dtype, shape and byte range of every tensor; then the bytes. Tensors lie in the order of
falling element size, so that each is aligned.

The checksum comes from the same memory, or from the file where that memory was a copy. It is left to the caller, who
may compute it while the disk takes the file; beside the writing itself it would only slow that down.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from asyncrl.weights.early_writeback import EarlyWriteback
from asyncrl.weights.manifest import FileEntry, file_entry

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


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file, and the memory that it was written from; None where that was not the tensors' own."""

    path: Path
    parts: Sequence[memoryview] | None

    def entry(self) -> FileEntry:
        """Size and checksum; the tensors must not have changed since."""
        if self.parts is None:
            return file_entry(self.path)
        return FileEntry.of(self.parts)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> WrittenFile:
    """Write `tensors`, whatever their device and strides, to the new file `path`; not synced.

    Args:
        metadata: of the file, in its header.

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
    header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    parts = [memoryview(struct.pack("<Q", len(encoded)) + encoded)]
    with FileIO(path, "x") as file:
        writer = EarlyWriteback(file.fileno(), len(parts[0]) + end)
        writer.write(parts[0])
        for _, tensor in ordered:
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().data
            writer.write(data)
            if flat.data_ptr() == tensor.data_ptr():
                parts.append(data)
    return WrittenFile(path, parts if len(parts) == 1 + len(ordered) else None)
