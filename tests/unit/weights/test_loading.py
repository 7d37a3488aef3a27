"""Weights are verified where they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.weights.loading import read_checkpoint, stage_weights
from asyncrl.weights.manifest import MANIFEST_FILE, DamagedWeights, Manifest, file_entry, write_manifest

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of weights with a manifest."""
    for number, name in enumerate(FILES):
        save_file({f"w{number}": torch.full((64,), float(number))}, tmp_path / name)
    write_manifest(tmp_path, Manifest("actor", 3, {name: file_entry(tmp_path / name) for name in FILES}))
    return tmp_path


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_whole_folder_is_read(folder: Path) -> None:
    assert {name: float(tensor[0]) for name, tensor in read_checkpoint(folder).items()} == {"w0": 0.0, "w1": 1.0}


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_in_any_file_refuses_the_whole(folder: Path, name: str) -> None:
    flip_last_byte(folder / name)
    with pytest.raises(DamagedWeights, match=f"{name} has the checksum"):
        read_checkpoint(folder)


def test_what_lacks_a_file_or_has_one_more_is_refused(folder: Path) -> None:
    save_file({"w2": torch.ones(1)}, folder / "model-00003-of-00003.safetensors")
    with pytest.raises(DamagedWeights, match=r"00003-of-00003\.safetensors is not listed"):
        read_checkpoint(folder)
    (folder / FILES[1]).unlink()
    with pytest.raises(DamagedWeights, match="is missing"):
        read_checkpoint(folder)


def test_a_manifest_that_is_none_is_refused(folder: Path) -> None:
    (folder / MANIFEST_FILE).write_text("{")
    with pytest.raises(DamagedWeights, match="is not a manifest"):
        read_checkpoint(folder)


def test_what_others_made_has_no_manifest_and_is_read_as_it_is(folder: Path) -> None:
    flip_last_byte(folder / FILES[1])
    (folder / MANIFEST_FILE).unlink()
    staged = stage_weights({"w0": torch.zeros(64), "w1": torch.zeros(64)}, folder)
    assert len(staged) == 2
