"""Deltas lead from one file to the other exactly, are small where little changed, and damage is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.staging import fetch as module
from asyncrl.staging.fetch import DeltaError, apply_delta, worth_a_delta, write_delta
from asyncrl.weights.manifest import FileEntry, Manifest, TensorEntry, file_entry
from asyncrl.weights.tensor_file import write_tensors
from tests.examples import examples


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deltas")


@settings(max_examples=examples(60), deadline=None)
@given(old=st.binary(max_size=700), changes=st.dictionaries(st.integers(0, 699), st.integers(0, 255), max_size=9))
def test_any_file_comes_back(folder: Path, old: bytes, changes: dict[int, int]) -> None:
    new = bytearray(old)
    for place, value in changes.items():
        if place < len(new):
            new[place] = value
    paths = [folder / name for name in ("old", "new", "delta", "again")]
    paths[0].write_bytes(old)
    paths[1].write_bytes(new)
    if write_delta(*paths[:3]):
        assert apply_delta(paths[0], paths[2], paths[3]) == file_entry(paths[1])
        assert paths[3].read_bytes() == bytes(new)
        assert paths[2].stat().st_size <= len(new) / 2
    else:
        assert not paths[2].exists()


@settings(max_examples=examples(60), deadline=None)
@given(place=st.integers(0, 10_000), value=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_delta_is_refused_or_leads_to_another_checksum(
    folder: Path, place: int, value: int, cut: bool
) -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 255, 2000, np.uint8)
    new = old.copy()
    new[:2000:40] ^= 3
    paths = [folder / name for name in ("old", "new", "delta", "again")]
    paths[0].write_bytes(old.tobytes())
    paths[1].write_bytes(new.tobytes())
    assert write_delta(*paths[:3])
    damaged = bytearray(paths[2].read_bytes())
    place %= len(damaged)
    damaged[place] ^= value
    paths[2].write_bytes(damaged[:place] if cut else damaged)
    try:
        found = apply_delta(paths[0], paths[2], paths[3])
    except DeltaError:
        return
    assert found != file_entry(paths[1])


def test_files_of_another_size_or_with_all_changed_have_no_delta(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    old, new, delta = (tmp_path / name for name in ("old", "new", "delta"))
    old.write_bytes(random.bytes(4000))
    for content in (random.bytes(4000), random.bytes(4001)):
        new.write_bytes(content)
        assert not write_delta(old, new, delta)
        assert not delta.exists()


def test_a_small_step_in_bf16_is_a_small_part_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 4 << 20)
    generator = torch.Generator().manual_seed(0)
    weights = 0.02 * torch.randn(200_000, generator=generator)
    stepped = weights - 1e-6 * torch.randn(200_000, generator=generator).sign()
    old, new, delta = (tmp_path / name for name in ("old", "new", "delta"))
    write_tensors(old, {"w": weights.bfloat16()})
    write_tensors(new, {"w": stepped.bfloat16()})
    assert write_delta(old, new, delta)
    assert delta.stat().st_size < 0.1 * new.stat().st_size


def test_fp32_is_sent_whole() -> None:
    files = {"model.safetensors": FileEntry(1 << 20, "0" * 16)}

    def manifest(*dtypes: str) -> Manifest:
        entries = {str(number): TensorEntry((1,), dtype, "model.safetensors") for number, dtype in enumerate(dtypes)}
        return Manifest("actor", 1, files, entries)

    assert worth_a_delta(manifest("BF16", "BF16", "F32"), "model.safetensors")
    assert not worth_a_delta(manifest("F32", "F32", "BF16"), "model.safetensors")
    assert not worth_a_delta(manifest(), "model.safetensors")
