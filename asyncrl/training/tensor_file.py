"""Writing a safetensors file straight from the tensors' memory.

`safetensors.torch.save_file` refuses views that share a storage, so a trainer with flat parameters would have to copy
every tensor first: fresh memory as large as the model, at each version. Here a tensor on the CPU is written where it
lies, and one elsewhere passes through a copy of itself alone.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, little-endian; the header,
JSON padded with spaces, with dtype, shape and byte range of every tensor; then the bytes. Tensors lie in the order of
falling element size, so that each is aligned.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors`, whatever their device and strides, to the new file `path`; not synced.

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
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with FileIO(path, "x") as file:
        _write(file, memoryview(struct.pack("<Q", len(encoded)) + encoded))
        for _, tensor in ordered:
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            _write(file, flat.view(torch.uint8).numpy().data)


def _write(file: FileIO, data: memoryview) -> None:
    """Write all of `data`: one call writes at most 2 GiB."""
    while data:
        data = data[file.write(data) :]
