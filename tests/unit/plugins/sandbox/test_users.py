"""As root, no two programs of a machine have the same user, whichever process runs them."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.plugins import sandbox as users
from asyncrl.plugins.sandbox import SandboxUnavailable, lent_user

ALL_IDS = "         0          0 4294967295\n"
HOLD = """
import os, secrets, sys
from pathlib import Path
from asyncrl.plugins import sandbox as users
os.getuid = lambda: 0
users._LOCKS = Path(sys.argv[1])
secrets.randbelow = lambda count: 5
with users.lent_user() as user:
    print(user.uid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(users, "_LOCKS", tmp_path / "locks")
    return tmp_path / "locks"


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def drawing(*numbers: int) -> None:
        drawn: Iterator[int] = iter(numbers)
        monkeypatch.setattr(secrets, "randbelow", lambda _: next(drawn))

    return drawing


def test_two_programs_of_one_process_have_two_users(draw: Callable[..., None]) -> None:
    draw(5, 5, 6, 5)
    with lent_user() as one, lent_user() as two:
        assert one.uid is not None
        assert two.uid == one.uid + 1
    with lent_user() as again:
        assert again.uid == one.uid


def test_a_program_of_another_process_has_another_user(draw: Callable[..., None], locks: Path) -> None:
    draw(5, 6)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(locks)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        taken = int(other.stdout.readline())
        with lent_user() as user:
            assert user.uid == taken + 1
        other.communicate()


def test_a_user_is_taken_as_long_as_its_program_runs(draw: Callable[..., None]) -> None:
    """The process that asked for it may be killed before its program is."""
    draw(5, 5, 6, 5)
    with lent_user() as user:
        program = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=user.held)
    with lent_user() as meanwhile:
        assert meanwhile.uid != user.uid
    program.communicate()
    with lent_user() as after:
        assert after.uid == user.uid


def test_the_users_are_those_that_a_container_has() -> None:
    everywhere, container = users._lendable(ALL_IDS), users._lendable("0 100000 65536\n")
    assert everywhere.start > 524_288, "not a container's"
    assert container.stop <= 61_184, "where systemd's own begin"
    with pytest.raises(SandboxUnavailable, match="65,536 ids"):
        users._lendable("0 1000 1\n1 100000 999\n")


def test_an_ordinary_users_programs_run_as_that_user(monkeypatch: pytest.MonkeyPatch, locks: Path) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with lent_user() as user:
        assert (user.uid, user.held) == (None, ())
    assert not locks.exists()


def test_where_locks_cannot_be_had_or_all_are_taken_it_is_said(
    monkeypatch: pytest.MonkeyPatch, draw: Callable[..., None], locks: Path
) -> None:
    draw(*[5] * 2000)
    with lent_user(), pytest.raises(SandboxUnavailable, match="all taken"), lent_user():
        pass
    os.symlink("elsewhere", locks.with_name("link"))
    monkeypatch.setattr(users, "_LOCKS", locks.with_name("link"))
    with pytest.raises(SandboxUnavailable, match=r"as root.*user each.*writable"), lent_user():
        pass
