from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.comm import files
from asyncrl.comm.files import (
    NotPrivate,
    check_tree,
    make_private_folder,
    open_private_file,
    read_own_file,
)


@pytest.fixture(params=[0o000, 0o022, 0o077], autouse=True)
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    previous = os.umask(request.param)
    yield
    os.umask(previous)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_made_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    make_private_folder(folder)
    os.close(open_private_file(folder / "lock"))
    assert [mode(path) for path in (folder, folder.parent, folder / "lock")] == [0o700, 0o700, 0o600]
    check_tree(tmp_path / "a")


def test_what_others_could_only_read_is_closed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o755)
    (tmp_path / "a" / "lock").touch()
    (tmp_path / "a" / "lock").chmod(0o644)
    make_private_folder(tmp_path / "a")
    os.close(open_private_file(tmp_path / "a" / "lock"))
    assert (mode(tmp_path / "a"), mode(tmp_path / "a" / "lock")) == (0o700, 0o600)


@pytest.mark.parametrize("bad", [0o720, 0o702, 0o777])
def test_what_others_could_write_to_is_refused_with_its_mode(tmp_path: Path, bad: int) -> None:
    make_private_folder(tmp_path / "a" / "b")
    (tmp_path / "a" / "b").chmod(bad)
    with pytest.raises(NotPrivate, match=f"b has mode {bad:04o}.*go-w"):
        make_private_folder(tmp_path / "a" / "b")
    with pytest.raises(NotPrivate, match=f"b has mode {bad:04o}"):
        check_tree(tmp_path / "a")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("theirs")
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        open_private_file(tmp_path / "lock")
    make_private_folder(tmp_path / "a")
    (tmp_path / "a" / "out").symlink_to("/")
    check_tree(tmp_path / "a")  # and not the whole machine


def test_what_lies_deep_in_a_tree_is_checked_too(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "a" / "b" / "c")
    (tmp_path / "a" / "b" / "c" / "file").touch()
    (tmp_path / "a" / "b" / "c" / "file").chmod(0o620)
    with pytest.raises(NotPrivate, match="c/file has mode 0620"):
        check_tree(tmp_path / "a")


def test_only_a_short_regular_file_of_this_user_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, fifo, link = (tmp_path / name for name in ("file", "fifo", "link"))
    file.write_bytes(b"12345")
    os.mkfifo(fifo)
    link.symlink_to(file)
    opened = len(os.listdir("/proc/self/fd"))
    assert read_own_file(file, 5) == b"12345"
    with pytest.raises(NotPrivate, match="file has more than 4 bytes"):
        read_own_file(file, 4)
    with pytest.raises(NotPrivate, match="fifo is no regular file"):
        read_own_file(fifo, 5)
    with pytest.raises(OSError, match="symbolic links"):
        read_own_file(link, 5)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    for look in (lambda: read_own_file(file, 5), lambda: check_tree(file), lambda: make_private_folder(tmp_path)):
        with pytest.raises(NotPrivate, match=r"of user|belongs to user"):
            look()
    assert len(os.listdir("/proc/self/fd")) == opened


def test_what_vanishes_while_a_tree_is_checked_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dying launcher's processes still rotate their checkpoints."""
    for name in ("a", "b"):
        make_private_folder(tmp_path / "run" / name / "deeper")
    looked: list[Path] = []

    def rotated_meanwhile(path: Path, status: os.stat_result) -> None:
        looked.append(path)
        if path.name == "a":
            shutil.rmtree(tmp_path / "run" / "a")
            shutil.rmtree(tmp_path / "run" / "b")

    monkeypatch.setattr(files, "check_owned", rotated_meanwhile)
    check_tree(tmp_path / "run")
    assert tmp_path / "run" / "a" in looked
    with pytest.raises(FileNotFoundError):
        check_tree(tmp_path / "nothing")
