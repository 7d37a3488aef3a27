"""Files in memory are filled in place, written again once nothing links to them, and read by others' code."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from asyncrl.weights import tensor_file
from asyncrl.weights.folder_tensors import TensorSpec
from asyncrl.weights.manifest import file_entry
from asyncrl.weights.tensor_file import MappedFile, MappedFiles

SPECS = [
    TensorSpec("rng", (5,), torch.uint8),
    TensorSpec("weights", (3, 4), torch.float32),
    TensorSpec("rounded", (7,), torch.bfloat16),
    TensorSpec("step", (), torch.int64),
    TensorSpec("none", (0, 2), torch.float32),
]


def files_in(folder: Path) -> MappedFiles:
    return MappedFiles(folder, "shard", SPECS, {"format": "pt"}, pinned=False)


def fill(file: MappedFile, value: int) -> None:
    for tensor in file.tensors.values():
        tensor.fill_(value)


def test_safetensors_reads_what_was_filled_in_and_the_checksum_is_the_files(tmp_path: Path) -> None:
    file = files_in(tmp_path).take()
    fill(file, 3)
    read = load_file(file.path)
    assert {name: (tuple(t.shape), t.dtype) for name, t in read.items()} == {s.name: (s.shape, s.dtype) for s in SPECS}
    assert all(torch.equal(read[name], tensor) for name, tensor in file.tensors.items())
    with safe_open(file.path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert file.entry() == file_entry(file.path)


def test_a_file_that_a_version_has_is_not_written_and_a_free_one_is_used_again(tmp_path: Path) -> None:
    files, version = files_in(tmp_path / "files"), tmp_path / "v1"
    first = files.take()
    fill(first, 1)
    version.hardlink_to(first.path)
    second = files.take()
    assert second is not first
    fill(second, 2)
    assert load_file(version)["weights"].unique().tolist() == [1.0]
    version.unlink()
    assert files.take() is first
    assert len(list((tmp_path / "files").iterdir())) == 2


def test_a_later_writer_leaves_alone_what_a_version_has_of_an_earlier_one(tmp_path: Path) -> None:
    earlier = files_in(tmp_path / "files").take()
    fill(earlier, 1)
    (tmp_path / "v1").hardlink_to(earlier.path)
    later = files_in(tmp_path / "files").take()
    fill(later, 2)
    assert load_file(tmp_path / "v1")["weights"].unique().tolist() == [1.0]


def test_a_lack_of_room_is_an_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no room"):
        files_in(tmp_path).take()
    assert list(tmp_path.iterdir()) == []


def test_memory_that_was_pinned_is_unpinned_before_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA refuses copies to what is mapped at the same addresses next; seen on a GPU."""
    pinned: set[int] = set()
    monkeypatch.setattr(tensor_file, "pin", lambda memory: pinned.add(memory.data_ptr()) is None)
    monkeypatch.setattr(tensor_file, "unpin", lambda memory: pinned.remove(memory.data_ptr()))
    files = MappedFiles(tmp_path, "shard", SPECS, {"format": "pt"}, pinned=True)
    (tmp_path / "v1").hardlink_to(files.take().path)
    files.take()
    assert len(pinned) == 2
    files.close()
    assert not pinned
