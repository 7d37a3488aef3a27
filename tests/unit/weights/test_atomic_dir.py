"""Whatever change the disk refuses once, in a folder that is written, replaced or removed: it comes to the same."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.comm import files as files_module
from asyncrl.comm.files import remove_leftover
from asyncrl.weights import atomic_dir
from tests.refusing_disk import refusing

LOG = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_BACKOFF", files_module.Backoff(0.001, 0.001))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # most of the time that these tests would take


def make(folder: Path, content: bytes = b"old") -> Path:
    """A folder with two files, one in a folder of its own."""
    (folder / "deep").mkdir(parents=True)
    for name in ("file", "deep/file"):
        (folder / name).write_bytes(content)
    return folder


def content(root: Path) -> dict[str, bytes]:
    """All visible files below `root`, by name."""
    files = (file for file in sorted(root.rglob("*")) if file.is_file())
    names = {str(file.relative_to(root)): file.read_bytes() for file in files}
    return {name: data for name, data in names.items() if not name.startswith(".")}


def leave_nothing(root: Path) -> None:
    """Leave what there is."""


def leave_halves(root: Path) -> None:
    """Leave what killed writers and removers of both versions were at."""
    for version in ("v0", "v1"):
        make(root / f".{version}.writing", b"half")
        make(root / f".{version}.removing", b"half")


def write(root: Path) -> None:
    directory = atomic_dir.begin(root / "v1")
    atomic_dir.write_file(directory / "deep" / "file", b"new")
    atomic_dir.link_file(root / "v0" / "file", directory / "deeper" / "linked")
    atomic_dir.commit(root / "v1")


def replace(root: Path) -> None:
    directory = atomic_dir.begin(root / "v0")
    atomic_dir.write_file(directory / "file", b"newer")
    atomic_dir.commit(root / "v0")


def remove(root: Path) -> None:
    atomic_dir.remove(root / "v0")
    atomic_dir.remove(root / "never there")


def rename(root: Path) -> None:
    atomic_dir.rename(root / "v0", root / "v0.damaged")


@pytest.mark.parametrize("left", [leave_nothing, leave_halves])
@pytest.mark.parametrize("operation", [write, replace, remove, rename, atomic_dir.clear_leftovers])
def test_whichever_change_is_refused_once_it_comes_to_the_same(
    operation: Callable[[Path], None], left: Callable[[Path], None], tmp_path: Path
) -> None:
    def root_of(name: str) -> Path:
        root = make(tmp_path / name / "v0").parent
        left(root)
        return root

    whole = root_of("whole")
    operation(whole)
    for at in itertools.count(1):
        root = root_of(f"{at}")
        with refusing(at, (errno.EROFS, errno.ENOSPC)[at % 2], root) as disk:
            operation(root)
        assert content(root) == content(whole), f"change {at}"
        atomic_dir.clear_leftovers(root)
        assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []
        if not disk.refused:
            break
    assert at > 1 or (operation, left) == (atomic_dir.clear_leftovers, leave_nothing)


def test_a_rename_that_was_made_and_reported_as_failed_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file server whose answer was lost."""
    renamed, calls = Path.rename, [0]

    def lose_the_answer(source: Path, target: Path) -> Path:
        renamed(source, target)
        calls[0] += 1
        if calls[0] % 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return target

    monkeypatch.setattr(Path, "rename", lose_the_answer)
    make(tmp_path / "v0")
    replace(tmp_path)
    assert content(tmp_path) == {"v0/file": b"newer"}
    with pytest.raises(FileNotFoundError):
        atomic_dir.rename(tmp_path / "never there", tmp_path / "v1")


def test_what_cannot_be_deleted_is_no_longer_seen_and_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For instance a file that is open on a host of a file server: its folder does not become empty."""
    make(tmp_path / "v0")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        atomic_dir.remove(tmp_path / "v0")
        atomic_dir.clear_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".v0.removing"]
    assert caplog.text.count("cannot be deleted: [Errno 39]") == 2
    atomic_dir.clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def refuse(folder: Path, **_: object) -> None:
    if folder.exists():
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))


def test_a_leftover_that_others_delete_too_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, file = make(tmp_path / "v0"), tmp_path / "file"
    deleted, others = os.unlink, [True]

    def delete_all(name: str, *, dir_fd: int | None = None) -> None:
        if others:
            others.clear()
            deleted(name, dir_fd=dir_fd)
        deleted(name, dir_fd=dir_fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", delete_all)
        remove_leftover(folder, LOG)
    file.touch()
    for leftover in (file, file, folder):
        remove_leftover(leftover, LOG)
    assert list(tmp_path.iterdir()) == []
    assert caplog.records == []


def test_a_disk_that_refuses_for_good_ends_the_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing could be written there either."""
    monkeypatch.setattr(files_module, "PATIENCE_S", 0.01)
    make(tmp_path / "v0")

    def read_only(*_: object) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "rename", read_only)
    with pytest.raises(OSError, match="Read-only"):
        atomic_dir.remove(tmp_path / "v0")
    assert content(tmp_path).keys() == {"v0/file", "v0/deep/file"}
