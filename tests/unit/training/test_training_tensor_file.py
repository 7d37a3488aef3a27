"""Files written from the tensors' memory are what safetensors reads back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.training import tensor_file
from asyncrl.training.tensor_file import DTYPE_NAMES, write_tensors


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
    class Reluctant(tensor_file.FileIO):
        def write(self, data: memoryview) -> int:  # type: ignore[override]
            return super().write(data[:7])

    monkeypatch.setattr(tensor_file, "FileIO", Reluctant)
    write_tensors(tmp_path / "x", {"w": torch.arange(100)})
    assert torch.equal(load_file(tmp_path / "x")["w"], torch.arange(100))


def test_a_type_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'w' is torch\.complex64"):
        write_tensors(tmp_path / "x", {"w": torch.ones(1, dtype=torch.complex64)})
