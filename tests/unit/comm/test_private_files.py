from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.comm.files.private_files import NotPrivate, check_tree, make_private_folder, open_private_file


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
