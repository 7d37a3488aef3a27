"""Files written from the tensors' memory are what safetensors reads back."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.comm import files
from asyncrl.comm.files import no_retry
from asyncrl.weights.folder_tensors import TensorSpec
from asyncrl.weights.manifest import file_entry
from asyncrl.weights.tensor_file import DTYPE_NAMES, TensorFile, write_tensors


def of_every_type() -> dict[str, Tensor]:
    """Odd sizes, so that only the order keeps what follows aligned."""
    torch.manual_seed(0)
    return {f"t{index}": (10 * torch.randn(3, 5)).to(dtype) for index, dtype in enumerate(reversed(list(DTYPE_NAMES)))}


def test_every_type_and_shape_reads_back_bit_for_bit(tmp_path: Path) -> None:
    flat = torch.arange(24.0)
    tensors = of_every_type() | {
        "a view": flat[2:8].view(2, 3),
        "another of the same storage": flat[6:10],
        "transposed": flat.view(4, 6).T,
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "trained": torch.nn.Parameter(torch.ones(2)),
        "ümläut": torch.ones(1),
    }
    write_tensors(tmp_path / "x", tensors)
    read = load_file(tmp_path / "x")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor.detach()), name


def test_transformers_finds_the_format_it_asks_for(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {"w": torch.ones(1)})
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_write_that_takes_only_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: write(descriptor, data[:7], offset))
    write_tensors(tmp_path / "x", {"w": torch.arange(100)})
    assert torch.equal(load_file(tmp_path / "x")["w"], torch.arange(100))


@pytest.mark.parametrize("entries", [10, 700_000])  # below and above what is handed to the disk at a time
def test_the_sum_is_that_of_the_file_in_whatever_order_it_was_written(tmp_path: Path, entries: int) -> None:
    tensors = {"w": torch.rand(2, entries), "t": torch.rand(entries, 2).T, "b": torch.ones(3, dtype=torch.bfloat16)}
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    for order in (("w", "t", "b"), ("t", "b", "w")):
        with TensorFile(tmp_path / order[0], specs) as written:
            for name in order:
                written.write(name, tensors[name])
        assert written.entry() == file_entry(tmp_path / order[0])
        read = load_file(tmp_path / order[0])
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_what_was_not_announced_or_does_not_come_is_named(tmp_path: Path) -> None:
    specs = [TensorSpec("w", (2,), torch.float32), TensorSpec("b", (1,), torch.float32)]
    file = TensorFile(tmp_path / "x", specs)
    file.write("w", torch.ones(2))
    for name, tensor in (("w", torch.ones(2)), ("b", torch.ones(2)), ("c", torch.ones(1))):
        with pytest.raises(ValueError, match=rf"got '{name}'"):
            file.write(name, tensor)
    with pytest.raises(ValueError, match=r"lacks 'b' \(1 missing\)"):
        file.__exit__(None, None, None)


def test_a_file_that_does_not_fit_is_refused_where_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with no_retry(), pytest.raises(OSError, match="No space left"):
        write_tensors(tmp_path / "x", {"w": torch.ones(1)})


def test_a_file_that_does_not_fit_now_is_written_once_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full again in the middle of it."""
    monkeypatch.setattr(files, "_BACKOFF", files.Backoff(0.001, 0.001))
    pwrite, calls = os.pwrite, [0]

    def full_at_times(descriptor: int, data: bytes, offset: int) -> int:
        calls[0] += 1
        if calls[0] % 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full_at_times)
    file = write_tensors(tmp_path / "x", {"w": torch.arange(500_000)})
    assert torch.equal(load_file(tmp_path / "x")["w"], torch.arange(500_000))
    assert file.entry() == file_entry(tmp_path / "x")
    assert "waiting to write" in caplog.text


def test_a_disk_that_takes_less_than_it_is_given_gets_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:1000], offset))
    write_tensors(tmp_path / "x", {"w": torch.arange(500_000)})
    assert torch.equal(load_file(tmp_path / "x")["w"], torch.arange(500_000))


def test_a_type_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'w' is torch\.complex64"):
        write_tensors(tmp_path / "x", {"w": torch.ones(1, dtype=torch.complex64)})
