"""Write safetensors files straight from memory: tensor by tensor (`TensorFile`), or in place (`MappedFile`).

`safetensors.torch.save_file` takes all tensors at once, and refuses views that share a storage. So a trainer would have
to gather and copy everything first. Here the file is laid out from names, shapes and types alone. Then each tensor is
written to its place, in any order, straight from CPU memory or through a copy of this tensor alone.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, little-endian; the header,
JSON padded with spaces, with dtype, shape and byte range of every tensor; then the bytes. Tensors are sorted by falling
element size, so that each is aligned. The checksum is computed from the bytes while they are still in the core's cache,
or from the file afterwards if the tensors come in another order (`entry`).

A checkpoint in memory is written after every step. Copied into buffers first and then into a new file, its values would
be in memory twice more, and each step would pay for new pages, cleared and pinned for a GPU. So such a file is mapped
once, and tensors are copied straight into the mapping, repeatedly:

    <folder>/<name>-<n>     the files of one writer, as long as it lives
    <version>/<name>        a further link to the file that has the version's tensors

A file that any version links to is never written. So a reader never sees values change, and a killed writer leaves
complete versions complete.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Self

import msgspec
import torch
import xxhash
from torch import Tensor

from asyncrl.comm.files import retry_write_blocking
from asyncrl.models.host_copies import pin, unpin
from asyncrl.weights.folder_tensors import TensorSpec
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
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""Types by their names in safetensors files and manifests."""
_ALIGNMENT = 8
_log = logging.getLogger(__name__)
_PIECE_BYTES = 1 << 20  # stays in the core's cache between being summed and being written


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Layout of a safetensors file.

    Attributes:
        start: first bytes of the file: the header's length and the header.
        offsets: by name, the place in the file at which a tensor's bytes begin.
        size: bytes of the whole file.
    """

    start: bytes
    offsets: Mapping[str, int]
    size: int

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> Self:
        """Lay out the file of `specs`, largest elements first.

        Raises:
            TypeError: a tensor is of a type that has no name in the format.
        """
        header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
        offsets: dict[str, int] = {}
        end = 0
        for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
            if spec.dtype not in DTYPE_NAMES:
                known = ", ".join(map(str, DTYPE_NAMES))
                raise TypeError(f"tensor {spec.name!r} is {spec.dtype}; a weight file takes {known}")
            offsets[spec.name], begin = end, end
            end += spec.nbytes
            header[spec.name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": spec.shape,
                "data_offsets": [begin, end],
            }
        encoded = msgspec.json.encode(header)
        encoded += b" " * (-len(encoded) % _ALIGNMENT)
        start = struct.pack("<Q", len(encoded)) + encoded
        return cls(start, {name: len(start) + offset for name, offset in offsets.items()}, len(start) + end)


class TensorFile:
    """The new file `path` of the tensors `specs`, which are then written one by one; not synced.

    Use it as a context manager: its exit checks that the file is complete.

    Args:
        metadata: the file's metadata, in its header.

    Raises:
        OSError: it cannot be written.
        TypeError: a tensor is of a type that has no name in the format.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        self.path = path
        layout = FileLayout.of(specs, metadata)
        self._size = layout.size
        self._missing = {spec.name: (spec, layout.offsets[spec.name]) for spec in specs}
        self._digest, self._summed = xxhash.xxh3_64(), 0
        self._file = retry_write_blocking(partial(FileIO, path, "x"), f"{path}", _log)
        self._put(memoryview(layout.start), 0)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is None and self._missing:
            raise ValueError(f"{self.path} lacks {next(iter(self._missing))!r} ({len(self._missing)} missing)")

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one of the file's tensors, from any device and with any strides.

        Raises:
            OSError: it cannot be written.
            ValueError: the tensor is not in `specs`, was written before, or has another shape or type.
        """
        spec, offset = self._missing.get(name, (None, 0))
        if spec is None or (spec.shape, spec.dtype) != (tuple(tensor.shape), tensor.dtype):
            raise ValueError(f"{self.path}: got {name!r}, {tensor.dtype}{list(tensor.shape)}, where {spec} is to come")
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        self._put(flat.view(torch.uint8).numpy().data, offset)
        del self._missing[name]

    def entry(self) -> FileEntry:
        """Return size and checksum of the complete file."""
        if self._summed == self._size:
            return FileEntry(self._size, self._digest.hexdigest())
        return file_entry(self.path)

    def _put(self, data: memoryview, offset: int) -> None:
        for begin in range(0, len(data), _PIECE_BYTES):
            piece = data[begin : begin + _PIECE_BYTES]
            if self._summed == offset + begin:
                self._digest.update(piece)
                self._summed += len(piece)
            while piece:  # waits for room if the disk is full
                write = partial(os.pwrite, self._file.fileno(), piece, offset + begin)
                count = retry_write_blocking(write, f"{self.path}", _log)
                piece, begin = piece[count:], begin + count


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> TensorFile:
    """Write `tensors` to the new file `path`; see `TensorFile`."""
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    with TensorFile(path, specs, metadata) as file:
        for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):  # the file's order
            file.write(spec.name, tensors[spec.name])
    return file


class MappedFile:
    """The new file `path`, mapped; it has room for all tensors of `layout`.

    Attributes:
        tensors: the file's tensors by name, to be filled; they are the file's own memory.

    Args:
        specs: the tensors of `layout`.
        pinned: pin the memory for copies from a GPU.

    Raises:
        OSError: there is no room for the file.
    """

    def __init__(self, path: Path, layout: FileLayout, specs: Sequence[TensorSpec], *, pinned: bool) -> None:
        self.path, self.layout = path, layout
        self._pinned: Tensor | None = None
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(self._descriptor, 0, layout.size)  # running out of room later would kill the process
            self._memory = mmap.mmap(self._descriptor, layout.size)
        except OSError:
            self.close()
            raise
        self._memory[: len(layout.start)] = layout.start
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        if pinned and pin(whole):
            self._pinned = whole
        elif pinned:
            _log.warning("%s cannot be pinned: copies into it are right, but slower", path)
        self.tensors: dict[str, Tensor] = {}
        for spec in specs:
            offset = layout.offsets[spec.name]
            self.tensors[spec.name] = whole[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)

    @property
    def is_free(self) -> bool:
        """True if no version has a link to the file."""
        return os.fstat(self._descriptor).st_nlink == 1

    def entry(self) -> FileEntry:
        """Return size and checksum of the file, from its memory."""
        with memoryview(self._memory) as whole:
            return FileEntry.of(
                whole[begin : begin + _PIECE_BYTES] for begin in range(0, self.layout.size, _PIECE_BYTES)
            )

    def close(self) -> None:
        """Remove the file's name, after the last copy into it. Its memory is freed with the last version or tensor that
        uses it.
        """
        if self._pinned is not None:
            unpin(self._pinned)
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


class MappedFiles:
    """The files of one writer in `folder`, all of the same tensors.

    Args:
        name: name of the files; files of an earlier writer of this name are removed from the folder.
        specs, metadata: tensors and metadata of each file.
        pinned: see `MappedFile`.
    """

    def __init__(
        self, folder: Path, name: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str], *, pinned: bool
    ) -> None:
        self._folder, self._name = folder, name
        self._specs, self._layout, self._pinned = specs, FileLayout.of(specs, metadata), pinned
        self._files: list[MappedFile] = []
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for former in folder.glob(f"{name}-*"):
            former.unlink()

    def take(self) -> MappedFile:
        """Return a file that no version has a link to; a new one if there is none.

        Raises:
            OSError: there is no room for it.
        """
        for file in self._files:
            if file.is_free:
                return file
        path = self._folder / f"{self._name}-{len(self._files)}"
        file = MappedFile(path, self._layout, self._specs, pinned=self._pinned)
        self._files.append(file)
        return file

    def close(self) -> None:
        """Remove all files' names."""
        while self._files:
            self._files.pop().close()
