"""A watched subtree: a removal is reported at once, but after an outage only once its owner has had time to come
back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.comm.name_resolve import FileResolver, NameResolveError, Subtree
from asyncrl.comm.name_resolve import file as file_module
from asyncrl.comm.name_resolve.file import _FileSystemClock, _Scan
from asyncrl.comm.name_resolve.outages import GRACE_S

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


def test_only_the_first_reading_is_stored_as_the_first_and_waits_end_with_a_change(clock: Clock) -> None:
    subtree = Subtree("w", clock)
    assert not subtree.is_read
    subtree.away()
    assert not subtree.is_read
    subtree.replace({}, first=True)
    assert subtree.is_read
    seen = subtree.changes
    subtree.replace({"w/a": "1"})
    subtree.replace({"w/a": "0"}, first=True)
    assert subtree.entries() == {"w/a": "1"}
    subtree.await_change(seen, 3600.0)
    seen = subtree.changes
    subtree.replace({"w/a": "1"})
    assert subtree.changes == seen


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


class FileSystemClock(_FileSystemClock):
    """Stands `ahead_s` after the last change of the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ahead_s = folder, 0.1

    def now(self, *, fresh: bool = False) -> float:
        return self.folder.stat().st_mtime + self.ahead_s


def _age(folder: Path, seconds: float) -> None:
    """As if the folder had been changed so long ago."""
    then = folder.stat().st_mtime - seconds
    os.utime(folder, (then, then))


def test_a_folder_that_did_not_change_is_not_read_again(
    resolver: FileResolver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "names"
    clock = FileSystemClock(folder)
    scan = _Scan(folder, clock)
    for index in range(20):
        resolver.add(f"w/{index}", "x", lease_s=3600.0 if index % 2 else None)
    resolver.add("other", "x")
    opened = Opened(folder, monkeypatch)
    assert len(scan.look(W)) == 20
    assert opened.count == 21
    assert len(scan.look(W)) == 20, "it changed a moment ago, so it may have changed again within a tick of its clock"
    assert opened.count == 42
    clock.ahead_s = 60.0
    scan.look(W)
    before = opened.count
    for _ in range(100):
        assert len(scan.look(W)) == 20
    assert opened.count == before
    assert scan.look(frozenset({"w/1", "other"})).keys() == {"other", "w/1"}, "another root is awaited"
    scan.look(W)
    before = opened.count
    resolver.add("w/3", "y", replace=True)
    assert scan.look(W)["w/3"] == "y"
    assert opened.count == before + 2, "the listing, and what is another file"
    resolver.delete("w/3")
    assert len(scan.look(W)) == 19


def test_a_lease_that_runs_out_and_one_that_comes_back_are_seen_though_the_folder_stays_the_same(
    resolver: FileResolver, tmp_path: Path
) -> None:
    folder = tmp_path / "names"
    resolver.add("w/0", "x", lease_s=3600.0)
    resolver._stop_renewing()
    _age(folder, 60.0)
    scan = _Scan(folder, _FileSystemClock(folder))
    assert scan.look(W) == {"w/0": "x"}
    past = folder.stat().st_mtime - 7200
    os.utime(folder / "w+0.json", (past, past))
    scan._seen["w/0"].expires = scan._until = 0.0  # as by now it would be
    assert scan.look(W) == {}
    os.utime(folder / "w+0.json")  # by its owner, which was stalled just before
    assert scan.look(W) == {}, "it is looked at now and then"
    scan._until = 0.0
    assert scan.look(W) == {"w/0": "x"}
    os.utime(folder / "w+0.json", (past, past))
    scan._seen["w/0"].expires = scan._until = 0.0
    assert scan.look(W) == {}
    resolver._renew_entry("w/0")
    assert scan.look(W) == {"w/0": "x"}


@pytest.mark.parametrize("set_by_s", [-7200.0, 7200.0])
def test_a_clock_that_is_set_ends_no_lease_that_is_renewed_and_one_that_is_not_ends(
    resolver: FileResolver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_by_s: float
) -> None:
    folder, now = tmp_path / "names", [0.0]
    for name in ("w/0", "w/1"):
        resolver.add(name, "x", lease_s=60.0)
    resolver._stop_renewing()
    _age(folder, 60.0)
    monkeypatch.setattr(file_module.time, "monotonic", lambda: now[0])
    clock = _FileSystemClock(folder)
    monkeypatch.setattr(resolver, "_clock", clock)
    scan = _Scan(folder, clock)
    assert scan.look(W).keys() == {"w/0", "w/1"}

    def ticks(seconds: float) -> None:
        now[0] += seconds
        before = clock.now()
        monkeypatch.setattr(clock, "now", lambda *, fresh=False: before + seconds + (set_by_s if fresh else 0.0))

    ticks(20.0)
    written = time_of(folder / "w+0.json") + 20.0 + set_by_s
    os.utime(folder / "w+0.json", (written, written))  # its owner renews it by the clock that was just set
    assert resolver.get("w/0") == "x"
    assert scan.look(W).keys() == {"w/0", "w/1"}, "followers measure by their own clock"
    now[0] += 45.0
    written += 45.0
    os.utime(folder / "w+0.json", (written, written))
    assert scan.look(W).keys() == {"w/0"}


def time_of(file: Path) -> float:
    return file.stat().st_mtime
