"""Safetensors files in memory, whose tensors are filled in place, repeatedly.

A checkpoint in memory is written after every step. If its values were copied into buffers first and then into a new
file, they would be in memory twice more. Each step would also pay for new pages, cleared and pinned for a GPU. Here a
file is mapped once, and tensors are copied straight into the mapping.

    <folder>/<name>-<n>     the files of one writer, as long as it lives
    <version>/<name>        a further link to the file that has the version's tensors

A file that any version links to is never written. So a reader of a version never sees its values change, and a killed
writer leaves complete versions complete.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.models.host_copies import pin, unpin
from asyncrl.models.weights.model_files.tensor_file import FileLayout
from asyncrl.models.weights.versions.manifest import FileEntry
from asyncrl.models.weights.versions.published import TensorSpec

_log = logging.getLogger(__name__)
_PIECE_BYTES = 1 << 20  # stays in the core's cache while it is summed


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
            place = layout.places[spec.name]
            self.tensors[spec.name] = whole[place : place + spec.nbytes].view(spec.dtype).view(spec.shape)

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
