"""A directory that is not what its manifest says is never taken for weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncrl.weights.manifest import (
    MANIFEST_FILE,
    Manifest,
    ManifestError,
    TensorEntry,
    file_entry,
    read_manifest,
    verify,
    write_manifest,
)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    (tmp_path / "a.safetensors").write_bytes(b"weights" * 1000)
    (tmp_path / "empty.json").write_bytes(b"")
    files = {name: file_entry(tmp_path / name) for name in ("a.safetensors", "empty.json")}
    write_manifest(tmp_path, Manifest("actor", 3, files, {"w": TensorEntry((2, 3), "F32", "a.safetensors")}))
    return tmp_path


def test_a_whole_directory_reads_back_as_written(whole: Path) -> None:
    manifest = verify(whole)
    assert (manifest.role, manifest.version) == ("actor", 3)
    assert manifest.tensors == {"w": TensorEntry((2, 3), "F32", "a.safetensors")}


def test_a_missing_file_is_torn(whole: Path) -> None:
    (whole / "a.safetensors").unlink()
    with pytest.raises(ManifestError, match=r"a\.safetensors is missing"):
        verify(whole, checksums=False)


def test_a_short_file_is_torn(whole: Path) -> None:
    (whole / "a.safetensors").write_bytes(b"weights" * 999)
    with pytest.raises(ManifestError, match="6993 bytes, its manifest says 7000"):
        verify(whole, checksums=False)


def test_a_changed_byte_is_found_by_the_checksum_only(whole: Path) -> None:
    data = bytearray((whole / "a.safetensors").read_bytes())
    data[77] ^= 1
    (whole / "a.safetensors").write_bytes(data)
    verify(whole, checksums=False)
    with pytest.raises(ManifestError, match="damaged"):
        verify(whole)


def test_damage_is_found_in_any_file_however_many(tmp_path: Path) -> None:
    for count in (1, 3):
        names = [f"{index}.safetensors" for index in range(count)]
        for name in names:
            (tmp_path / name).write_bytes(bytes(1 << 20))
        write_manifest(tmp_path, Manifest("actor", 3, {name: file_entry(tmp_path / name) for name in names}))
        verify(tmp_path)
        with (tmp_path / names[-1]).open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"x")
        with pytest.raises(ManifestError, match="damaged"):
            verify(tmp_path)


def test_no_manifest_means_not_written_whole(whole: Path) -> None:
    (whole / MANIFEST_FILE).unlink()
    with pytest.raises(ManifestError, match=r"has no manifest\.json"):
        verify(whole)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', '{"format": 9}', '{"format": 1, "files": []}'])
def test_a_manifest_that_is_none_is_refused(whole: Path, text: str) -> None:
    (whole / MANIFEST_FILE).write_text(text)
    with pytest.raises(ManifestError):
        read_manifest(whole)


def test_a_manifest_cannot_point_outside_its_directory(whole: Path) -> None:
    manifest = read_manifest(whole)
    entry = manifest.files["a.safetensors"]
    write_manifest(whole, replace(manifest, files={"../a.safetensors": entry}))
    with pytest.raises(ManifestError, match="files lie in"):
        read_manifest(whole)


def test_another_model_is_told_by_its_tensors(whole: Path) -> None:
    manifest = read_manifest(whole)
    manifest.check_same_tensors(replace(manifest, version=4))
    reshaped = replace(manifest, tensors={"w": TensorEntry((3, 2), "F32", "a.safetensors")})
    with pytest.raises(ManifestError, match=r"'w' is F32\[3, 2\]"):
        manifest.check_same_tensors(reshaped)
    with pytest.raises(ManifestError, match="differ in the tensors 'w'"):
        manifest.check_same_tensors(replace(manifest, tensors={}))
