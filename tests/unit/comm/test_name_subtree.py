"""A watched subtree: a removal is reported at once, but after an outage only once its owner has had time to come
back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.comm import name_files as file_module
from asyncrl.comm.name_files import FileResolver, _Scan
from asyncrl.comm.name_resolve import GRACE_S, NameResolveError, Subtree
from asyncrl.comm.waits import LOOK_S

W = frozenset({"w"})


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def subtree(clock: Clock) -> Subtree:
    subtree = Subtree("w", clock)
    subtree.replace({"w/b": "2", "w/a": "1"})
    return subtree


def test_changes_are_told_at_once(subtree: Subtree) -> None:
    assert list(subtree.entries()) == ["w/a", "w/b"]
    subtree.replace({"w/a": "one", "w/c": "3"})
    assert subtree.entries() == {"w/a": "one", "w/c": "3"}
    assert (subtree.get("w/c"), subtree.get("w/b")) == ("3", None)
    subtree.replace({"w/d": "4"})
    assert subtree.entries() == {"w/d": "4"}


def test_what_goes_in_trouble_stays_until_its_owner_has_had_time_and_no_longer(subtree: Subtree, clock: Clock) -> None:
    subtree.replace({}, in_trouble=True)
    clock.now += 1.0
    subtree.replace({"w/a": "one"}, in_trouble=True)
    assert subtree.entries() == {"w/a": "one", "w/b": "2"}
    clock.now += GRACE_S - 2.0
    subtree.replace({"w/a": "two"}, in_trouble=True)
    assert subtree.entries() == {"w/a": "two", "w/b": "2"}
    clock.now += 1.0
    assert subtree.entries() == {"w/a": "two"}
    subtree.replace({})
    assert subtree.entries() == {}


def test_a_second_outage_holds_longer_what_the_first_one_held(subtree: Subtree, clock: Clock) -> None:
    subtree.replace({"w/b": "2"}, in_trouble=True)
    clock.now += GRACE_S - 1.0
    subtree.away()
    clock.now += GRACE_S - 1.0
    assert "w/a" in subtree.entries()
    clock.now += 1.0
    assert "w/a" not in subtree.entries()


def test_what_was_never_read_is_told_apart_from_nothing(clock: Clock) -> None:
    subtree = Subtree("w", clock)
    subtree.away()
    assert not subtree.await_first(0.0)
    subtree.replace({})
    assert subtree.await_first(0.0)
    assert subtree.entries() == {}


def test_a_refusal_is_raised_where_it_is_read(subtree: Subtree) -> None:
    subtree.refuse(NameResolveError("permission denied"))
    with pytest.raises(NameResolveError, match="permission denied"):
        subtree.entries()


class Opened:
    """Counts the files that are opened in, and the listings of, the folder of names."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.count = folder, 0
        for owner, name in ((Path, "open"), (os, "listdir")):
            monkeypatch.setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.count += Path(str(args[0])).is_relative_to(self.folder)
            return call(*args, **kwargs)

        return wrapped


@pytest.fixture
def resolver(tmp_path: Path) -> Iterator[FileResolver]:
    with FileResolver(tmp_path / "names") as resolver:
        yield resolver


class Now:
    """Takes the place of the module `time`: this process's clock, which this test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    now = Now()
    monkeypatch.setattr(file_module, "time", now)
    return now


def test_a_folder_that_did_not_change_is_not_read_again(
    resolver: FileResolver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: Now
) -> None:
    folder = tmp_path / "names"
    scan = _Scan(folder, resolver._left_s)
    for index in range(20):
        resolver.add(f"w/{index}", "x", lease_s=3600.0 if index % 2 else None)
    resolver.add("other", "x")
    opened = Opened(folder, monkeypatch)
    assert len(scan.look(W)) == 20
    assert opened.count == 21
    now.now += 1.9
    assert len(scan.look(W)) == 20, "it changed a moment ago, so it may have changed again within a tick of its clock"
    assert opened.count == 42
    now.now += 60.0
    assert len(scan.look(W)) == 20, "as well as before this process stood still"
    assert opened.count == 63
    for _ in range(100):
        assert len(scan.look(W)) == 20
    assert opened.count == 63
    assert scan.look(frozenset({"w/1", "other"})).keys() == {"other", "w/1"}, "another root is awaited"
    for _ in range(2):
        scan.look(W)
        now.now += 3.0
    scan.look(W)
    before = opened.count
    resolver.add("w/3", "y", replace=True)
    before = opened.count
    assert scan.look(W)["w/3"] == "y"
    assert opened.count == before + 2, "the listing, and what is another file"
    resolver.delete("w/3")
    assert len(scan.look(W)) == 19


def test_an_entry_that_is_replaced_within_a_tick_of_the_clock_by_a_file_with_the_same_number_is_read(
    resolver: FileResolver, tmp_path: Path, now: Now
) -> None:
    scan, file = _Scan(tmp_path / "names", resolver._left_s), tmp_path / "names" / "w+0.json"
    resolver.add("w/0", "old")
    folder_time, time = (tmp_path / "names").stat().st_mtime_ns, file.stat().st_mtime_ns
    assert scan.look(W) == {"w/0": "old"}
    file.write_bytes(file.read_bytes().replace(b"old", b"new"))
    os.utime(file, ns=(time, time))
    assert (tmp_path / "names").stat().st_mtime_ns == folder_time
    now.now += 1.0
    assert scan.look(W) == {"w/0": "new"}


def test_a_lease_that_runs_out_and_one_that_comes_back_are_seen_though_the_folder_stays_the_same(
    resolver: FileResolver, tmp_path: Path, now: Now
) -> None:
    folder = tmp_path / "names"
    resolver.add("w/0", "x", lease_s=3600.0)
    resolver._stop_renewing()
    scan = _Scan(folder, resolver._left_s)
    for _ in range(2):
        assert scan.look(W) == {"w/0": "x"}
        now.now += 3.0
    now.now += 3600.0
    past = folder.stat().st_mtime - 7200
    os.utime(folder / "w+0.json", (past, past))
    assert scan.look(W) == {}
    os.utime(folder / "w+0.json")  # by its owner, which was stalled just before
    assert scan.look(W) == {}, "it is looked at now and then"
    now.now += LOOK_S
    assert scan.look(W) == {"w/0": "x"}
    now.now += 3600.0
    os.utime(folder / "w+0.json", (past, past))
    assert scan.look(W) == {}
    resolver._renew_all()
    assert scan.look(W) == {"w/0": "x"}


@pytest.mark.parametrize("set_by_s", [-7200.0, 7200.0])
def test_a_clock_that_is_set_ends_no_lease_that_is_renewed_and_one_that_is_not_ends(
    resolver: FileResolver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: Now, set_by_s: float
) -> None:
    """The file system's clock."""
    folder = tmp_path / "names"
    for name in ("w/0", "w/1"):
        resolver.add(name, "x", lease_s=60.0)
    resolver._stop_renewing()
    scan = _Scan(folder, resolver._left_s)
    assert scan.look(W).keys() == {"w/0", "w/1"}
    now.now += 20.0
    utime = os.utime

    def set_clock(file: int | Path, times: tuple[float, float] | None = None) -> None:
        utime(file, (time.time() + set_by_s,) * 2 if times is None else times)

    monkeypatch.setattr(os, "utime", set_clock)
    os.utime(folder / "w+0.json")  # its owner renews it by the clock that was just set
    assert resolver.get("w/0") == "x"
    assert scan.look(W).keys() == {"w/0", "w/1"}, "followers measure by their own clock"
    late = _Scan(folder, resolver._left_s)
    assert ("w/1" in late.look(W)) == (set_by_s < 0)
    now.now += 45.0
    os.utime(folder / "w+0.json")
    assert scan.look(W).keys() == {"w/0"}
    now.now += 61.0
    assert late.look(W).keys() == {"w/0"}, "no lease lasts longer than it is, however far the clock was set back"
