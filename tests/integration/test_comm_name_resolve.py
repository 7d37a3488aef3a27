"""One suite over every back end of name resolution. `etcd3` runs against a real server (`etcd_address`)."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from asyncrl.comm import name_files as file_module
from asyncrl.comm.files import FileLock, is_held
from asyncrl.comm.name_files import SCAN_S, FileResolver
from asyncrl.comm.name_resolve import (
    NameEntryExists,
    NameEntryNotFound,
    NameResolveError,
    NameResolver,
    NameResolveTimeout,
    NameResolveUnavailable,
    OwnerFenced,
    Subtree,
    is_below,
    make_resolver,
)

from ..leases import LONG_S, PATIENCE_S, assert_stays, renew_often

LEASE_S = 1.0

MakeResolver = Callable[[], NameResolver]


@dataclass(slots=True)
class _Entry:
    value: str
    owner: object
    lease_s: float | None
    expires: float


@dataclass(slots=True)
class MemoryStore:
    """State that the resolvers of one process share; `clock` gives seconds."""

    clock: Callable[[], float] = time.monotonic
    entries: dict[str, _Entry] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class MemoryResolver(NameResolver):
    """The interface at its plainest: what the suite asks of every back end holds of a dictionary too."""

    def __init__(self, root: str, store: MemoryStore) -> None:
        super().__init__(root)
        self._store = store
        self._prefix = f"{root}/"

    def _create(self, name: str, value: str, lease_s: float | None, replace: bool) -> None:
        fenced = self._fenced()
        with self._store.lock:
            if fenced:
                raise OwnerFenced(name, self.root)
            if not replace and self._living(name) is not None:
                raise NameEntryExists(name, self.root)
            self._store.entries[self._prefix + name] = _Entry(value, self, lease_s, self._expiry(lease_s))

    def _read(self, name: str) -> str | None:
        with self._store.lock:
            entry = self._living(name)
            return None if entry is None else entry.value

    def _read_subtree(self, root: str) -> dict[str, str]:
        with self._store.lock:
            names = [key.removeprefix(self._prefix) for key in self._store.entries if key.startswith(self._prefix)]
            entries = {name: self._living(name) for name in names if is_below(name, root)}
            return {name: entry.value for name, entry in entries.items() if entry is not None}

    def _remove(self, name: str, value: str | None, own: bool) -> bool:
        with self._store.lock:
            entry = self._living(name)
            if entry is None or (own and entry.owner is not self) or value not in (None, entry.value):
                return False
            del self._store.entries[self._prefix + name]
            return True

    def _renew(self, name: str) -> Literal["kept", "lapsed", "gone"]:
        with self._store.lock:
            entry = self._store.entries.get(self._prefix + name)
            if entry is None or entry.owner is not self:
                return "gone"
            if self._living(name) is None:
                return "lapsed"
            entry.expires = self._expiry(entry.lease_s)
            return "kept"

    def _snapshots(self) -> Iterator[dict[str, dict[str, str]]]:
        while not self._closing.wait(0.01):
            yield {subtree.root: self._read_subtree(subtree.root) for subtree in self._subtrees()}

    def _living(self, name: str) -> _Entry | None:
        entry = self._store.entries.get(self._prefix + name)
        return entry if entry is not None and self._store.clock() < entry.expires else None

    def _expiry(self, lease_s: float | None) -> float:
        return float("inf") if lease_s is None else self._store.clock() + lease_s


@pytest.fixture(params=["memory", "file", pytest.param("etcd3", marks=pytest.mark.etcd)])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeResolver]:
    """Makes resolvers that share one root, as processes of one trial do."""
    store, made = MemoryStore(), []
    address = request.getfixturevalue("etcd_address") if request.param == "etcd3" else ""
    root = f"/asyncrl/{uuid.uuid4().hex}" if request.param == "etcd3" else str(tmp_path / "names")

    def one() -> NameResolver:
        memory = request.param == "memory"
        made.append(
            MemoryResolver(root, store)
            if memory
            else make_resolver(request.param, root, access={"addresses": address} if address else None)
        )
        return made[-1]

    yield one
    for resolver in made:
        resolver.close()


def abandon(owner: NameResolver) -> None:
    """Leave the owner's entries to lapse, as if its process had been killed."""
    owner._stop_renewing()


def test_an_added_entry_is_seen_by_other_resolvers(make: MakeResolver) -> None:
    one, other = make(), make()
    one.add("workers/actor/0", "tcp://somewhere:1")
    assert other.get("workers/actor/0") == "tcp://somewhere:1"


def test_values_are_any_text(make: MakeResolver) -> None:
    value = 'a "quoted"\nline, ünïcode, ' + "long " * 1000
    make().add("a", value)
    assert make().get("a") == value


def test_getting_a_missing_entry_names_it(make: MakeResolver) -> None:
    resolver = make()
    with pytest.raises(NameEntryNotFound, match="'nobody/7'"):
        resolver.get("nobody/7")
    assert not resolver.delete("nobody/7")


def test_a_name_is_taken_until_it_is_replaced_or_deleted(make: MakeResolver) -> None:
    one, other = make(), make()
    one.add("a", "1")
    with pytest.raises(NameEntryExists, match="'a'"):
        other.add("a", "2")
    other.add("a", "3", replace=True)
    assert one.get("a") == "3"
    assert one.delete("a")
    other.add("a", "4")
    assert one.get("a") == "4"


@pytest.mark.parametrize("name", ["", "/", "a/", "/a", "a//b", "../a", "a b", ".a", "a/.b", "a+b", "a" * 201])
def test_names_that_could_leave_the_root_are_refused(make: MakeResolver, name: str) -> None:
    with pytest.raises(ValueError, match="not valid"):
        make().add(name, "x")


def test_a_lease_too_short_to_keep_is_refused(make: MakeResolver) -> None:
    with pytest.raises(ValueError, match="lease_s"):
        make().add("a", "x", lease_s=0.0)


def test_a_subtree_holds_the_entry_itself_and_what_is_below_but_no_lookalikes(make: MakeResolver) -> None:
    resolver = make()
    for name in ("w", "w/0", "w/1/x", "w2", "w2/0"):
        resolver.add(name, name.upper())
    assert resolver.get_subtree("w") == {"w": "W", "w/0": "W/0", "w/1/x": "W/1/X"}
    assert list(resolver.get_subtree()) == ["w", "w/0", "w/1/x", "w2", "w2/0"]
    assert resolver.follow("w").entries() == {"w": "W", "w/0": "W/0", "w/1/x": "W/1/X"}
    assert list(resolver.follow("").entries()) == ["w", "w/0", "w/1/x", "w2", "w2/0"]


def test_a_value_is_deleted_by_one_of_many_and_only_where_it_is_still_there(make: MakeResolver) -> None:
    resolvers = [make() for _ in range(4)]
    resolvers[0].add("a", "old")
    assert not resolvers[1].delete("a", value="other")
    with ThreadPoolExecutor(4) as pool:
        deleted = list(pool.map(lambda resolver: resolver.delete("a", value="old"), resolvers))
    assert sorted(deleted) == [False, False, False, True]
    assert resolvers[0].get_subtree() == {}


def test_waiting_ends_when_the_entry_appears(make: MakeResolver) -> None:
    one, other = make(), make()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.wait, "late", PATIENCE_S)
        other.add("late", "here")
        assert waiting.result(PATIENCE_S) == "here"


def test_waiting_in_vain_names_the_key_the_root_and_the_seconds(make: MakeResolver) -> None:
    resolver = make()
    with pytest.raises(NameResolveTimeout) as caught:
        resolver.wait("never", 0.05)
    for part in ("'never'", resolver.root, "0.05 s", "appear"):
        assert part in str(caught.value)


def test_watching_reports_change_and_disappearance(make: MakeResolver) -> None:
    one, other = make(), make()
    one.add("v", "1")
    assert other.watch("v", PATIENCE_S) == "1"
    with ThreadPoolExecutor(1) as pool:
        changed = pool.submit(other.watch, "v", PATIENCE_S, "1")
        one.add("v", "2", replace=True)
        assert changed.result(PATIENCE_S) == "2"
        gone = pool.submit(other.watch, "v", PATIENCE_S, "2")
        one.delete("v")
        assert gone.result(PATIENCE_S) is None
    with pytest.raises(NameResolveTimeout, match="appear"):
        other.watch("v", 0.05, None)


def test_what_is_followed_is_known_without_asking(make: MakeResolver) -> None:
    one, other = make(), make()
    one.add("w/0", "a")
    one.add("w2", "no part of it")
    followed = other.follow("w")
    assert followed.entries() == {"w/0": "a"}
    assert other.follow("w") is followed
    one.add("w/1", "b", lease_s=LEASE_S)
    await_entries(followed, {"w/0": "a", "w/1": "b"})
    one.add("w/0", "c", replace=True)
    await_entries(followed, {"w/0": "c", "w/1": "b"})
    one.delete("w/0")
    await_entries(followed, {"w/1": "b"})
    abandon(one)
    await_entries(followed, {})
    other.close()
    assert followed.entries() == {}


def await_entries(followed: Subtree, expected: dict[str, str]) -> None:
    pause = threading.Event()
    deadline = time.monotonic() + PATIENCE_S
    while (found := followed.entries()) != expected:
        assert time.monotonic() < deadline, found
        pause.wait(0.01)


def test_a_leased_entry_outlives_its_lease_while_its_owner_lives(make: MakeResolver) -> None:
    owner, other = make(), make()
    owner.add("a", "x", lease_s=2.0)  # etcd's shortest
    assert_stays(owner, other, "a", "x", lease_s=2.0)


def test_an_abandoned_entry_disappears_and_its_name_is_free(make: MakeResolver) -> None:
    owner, other = make(), make()
    owner.add("a", "x", lease_s=LEASE_S)
    abandon(owner)
    assert other.watch("a", PATIENCE_S, "x") is None
    assert other.get_subtree() == {}
    assert not other.delete("a"), "it is no more"
    other.add("a", "y", lease_s=60.0)
    assert other.get("a") == "y"


def test_closing_removes_leased_entries_and_leaves_the_others(make: MakeResolver) -> None:
    owner, other = make(), make()
    owner.add("leased", "x", lease_s=60.0)
    owner.add("for_good", "x")
    owner.close()
    owner.close()
    assert list(other.get_subtree()) == ["for_good"]
    with pytest.raises(NameResolveError, match="closed"):
        owner.add("a", "x")


def test_closing_leaves_a_name_that_another_owner_has_taken_over(make: MakeResolver) -> None:
    owner, other = make(), make()
    owner.add("a", "x", lease_s=60.0)
    other.add("a", "y", lease_s=60.0, replace=True)
    owner.close()
    assert other.get("a") == "y"


def test_a_deleted_entry_does_not_come_back_by_renewal(make: MakeResolver, monkeypatch: pytest.MonkeyPatch) -> None:
    renew_often(monkeypatch)
    owner, other, lost = make(), make(), queue.Queue[str]()
    owner.on_lost = lost.put
    owner.add("a", "x", lease_s=LONG_S)
    other.delete("a")
    assert lost.get(timeout=PATIENCE_S) == "a", "it was to be renewed"
    assert other.get_subtree() == {}


@pytest.mark.parametrize(
    ("launch", "incarnation", "returns"),
    [("mine", None, True), ("mine", "1", True), ("mine", "2", False), ("another", None, False)],
)
def test_what_was_given_up_while_it_was_away_does_not_put_its_entries_back(
    make: MakeResolver, launch: str, incarnation: str | None, returns: bool
) -> None:
    """Nobody has taken its name yet; the lease has run out, as of a process that was stopped or cut off."""
    away, launcher = make(), make()
    away.fences = {"launch": "mine", "incarnations/0": "1"}
    launcher.add("launch", "mine")
    away.add("status/0", "x", lease_s=LEASE_S)
    abandon(away)
    assert launcher.watch("status/0", PATIENCE_S, "x") is None
    launcher.add("launch", launch, replace=True)
    if incarnation is not None:
        launcher.add("incarnations/0", incarnation)
    away._renew_all()
    assert returns == (launcher.get_subtree("status") == {"status/0": "x"})


def test_an_owner_with_fences_has_its_name_again_once_it_is_free_unless_it_was_given_up(
    make: MakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a rank stands still and whoever had taken its name, a proxy, leaves it."""
    renew_often(monkeypatch)
    owner, other, lost, given_up = make(), make(), queue.Queue[str](), threading.Event()
    owner.fences = {"incarnations/0": "1"}
    owner.on_lost, owner.on_fenced = lost.put, given_up.set
    owner.add("pullers/0", "mine", lease_s=LONG_S)
    other.delete("pullers/0")
    assert other.wait("pullers/0", PATIENCE_S) == "mine"
    other.add("pullers/0", "proxy", lease_s=LONG_S, replace=True)
    assert lost.get(timeout=PATIENCE_S) == "pullers/0"
    assert other.get("pullers/0") == "proxy"
    assert other.delete("pullers/0", own=True)
    assert other.wait("pullers/0", PATIENCE_S) == "mine"
    other.add("incarnations/0", "2")
    other.delete("pullers/0")
    assert given_up.wait(PATIENCE_S)
    assert other.get_subtree("pullers") == {}


def test_what_its_owner_deletes_while_it_is_put_back_stays_deleted(
    make: MakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = make(), make()
    owner.fences = {"incarnations/0": "1"}
    owner.add("server/0", "mine", lease_s=LONG_S)
    abandon(owner)
    other.delete("server/0")
    create = owner._create

    def withdrawn_meanwhile(*args: Any, **kwargs: Any) -> None:
        assert not owner.delete("server/0", own=True)
        create(*args, **kwargs)

    monkeypatch.setattr(owner, "_create", withdrawn_meanwhile)
    owner._renew_all()
    assert other.get_subtree() == {}


@pytest.mark.parametrize("incarnation", [None, "1", "2"])
@pytest.mark.parametrize("lease_s", [None, 60.0])
def test_what_was_given_up_adds_no_entry_in_place_of_its_successors(
    make: MakeResolver, incarnation: str | None, lease_s: float | None
) -> None:
    away, launcher, successor = make(), make(), make()
    away.fences, successor.fences = {"incarnations/0": "1"}, {"incarnations/0": "2"}
    if incarnation is not None:
        launcher.add("incarnations/0", incarnation)
    if incarnation != "2":
        away.add("server/0", "old", lease_s=lease_s)
        assert launcher.get("server/0") == "old"
        return
    successor.add("server/0", "new", lease_s=60.0)
    reported: list[bool] = []
    away.on_fenced = lambda: reported.append(True)
    for name in ("server/0", "server/1"):
        with pytest.raises(OwnerFenced, match=name):
            away.add(name, "old", lease_s=lease_s, replace=True)
    assert len(reported) == 2
    assert launcher.get_subtree("server") == {"server/0": "new"}


def test_who_withdraws_a_name_leaves_that_of_another_owner(make: MakeResolver) -> None:
    old, new, other = make(), make(), make()
    old.add("server/0", "old", lease_s=60.0)
    new.add("server/0", "new", lease_s=60.0, replace=True)
    assert not old.delete("server/0", own=True)
    assert other.get("server/0") == "new"
    assert new.delete("server/0", own=True)
    assert not new.delete("server/0", own=True)
    assert other.get_subtree() == {}


def test_an_owner_is_told_of_what_it_has_lost(make: MakeResolver, monkeypatch: pytest.MonkeyPatch) -> None:
    renew_often(monkeypatch)
    owner, other, lost = make(), make(), queue.Queue[str]()
    owner.on_lost = lost.put
    for name in ("kept", "taken", "deleted"):
        owner.add(name, "x", lease_s=LONG_S)
    other.add("taken", "y", replace=True)
    other.delete("deleted")
    assert {lost.get(timeout=PATIENCE_S), lost.get(timeout=PATIENCE_S)} == {"taken", "deleted"}
    assert other.get("kept") == "x"


def test_of_many_adders_exactly_one_wins(make: MakeResolver) -> None:
    resolvers = [make() for _ in range(8)]
    start = threading.Barrier(len(resolvers))

    def add(index: int) -> bool:
        start.wait(PATIENCE_S)
        try:
            resolvers[index].add("prize", str(index))
        except NameEntryExists:
            return False
        return True

    with ThreadPoolExecutor(len(resolvers)) as pool:
        won = [index for index, wins in enumerate(pool.map(add, range(len(resolvers)))) if wins]
    assert len(won) == 1
    assert resolvers[0].get("prize") == str(won[0])


def test_of_many_adders_over_an_expired_entry_exactly_one_wins(tmp_path: Path) -> None:
    owner = FileResolver(tmp_path)
    owner.add("prize", "old", lease_s=LEASE_S)
    abandon(owner)
    resolvers = [FileResolver(tmp_path) for _ in range(8)]
    resolvers[0].watch("prize", PATIENCE_S, "old")
    start = threading.Barrier(len(resolvers))

    def add(resolver: FileResolver) -> int:
        start.wait(PATIENCE_S)
        try:
            resolver.add("prize", "new", lease_s=60.0)
        except NameEntryExists:
            return 0
        return 1

    with ThreadPoolExecutor(len(resolvers)) as pool:
        assert sum(pool.map(add, resolvers)) == 1
    for resolver in resolvers:
        resolver.close()


def test_an_owner_killed_with_sigkill_loses_its_entry(tmp_path: Path) -> None:
    resolver = FileResolver(tmp_path)
    with _owner_process(tmp_path) as process:
        assert resolver.wait("child", PATIENCE_S) == "alive"
        process.kill()
        process.wait()
        assert resolver.watch("child", PATIENCE_S, "alive") is None


def test_a_stalled_owner_gets_its_entry_back_unless_it_was_taken(tmp_path: Path) -> None:
    resolver = FileResolver(tmp_path)
    with _owner_process(tmp_path) as process:
        resolver.wait("child", PATIENCE_S)
        os.kill(process.pid, signal.SIGSTOP)
        assert resolver.watch("child", PATIENCE_S, "alive") is None
        os.kill(process.pid, signal.SIGCONT)
        assert resolver.wait("child", PATIENCE_S) == "alive"
        os.kill(process.pid, signal.SIGSTOP)
        assert resolver.watch("child", PATIENCE_S, "alive") is None
        resolver.add("child", "successor")
        os.kill(process.pid, signal.SIGCONT)
        with pytest.raises(NameResolveTimeout):
            resolver.watch("child", 3 * LEASE_S, "successor")


_WRITER = """
import os, signal, sys
from asyncrl.comm.name_files import FileResolver
from asyncrl.comm.name_resolve import NameResolveError

moment, root, call = sys.argv[1:]
resolver = FileResolver(root)
resolver.fences = {"incarnation": "1"}
stopped = []

def stop():
    if not stopped:
        stopped.append(True)
        os.kill(os.getpid(), signal.SIGSTOP)

if moment == "staged":
    listdir = os.listdir
    os.listdir = lambda path: (stop(), listdir(path))[1]
else:
    commit = FileResolver._commit
    def slow(self, name, content, is_right):
        return commit(self, name, content, lambda: (is_right(), stop())[0])
    FileResolver._commit = slow
try:
    result = eval(call)
except NameResolveError as error:
    result = type(error).__name__
print(result, flush=True)
sys.stdin.read()
"""


class Stopped:
    """A process that stops while it writes: once its file is `staged`, or once it has `checked` that it may."""

    def __init__(self, moment: str, root: Path, call: str) -> None:
        command = [sys.executable, "-c", _WRITER, moment, str(root), call]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def resume(self) -> str:
        """Return what its call returned or raised."""
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __enter__(self) -> Stopped:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("moment", ["staged", "checked"])
@pytest.mark.parametrize(
    ("call", "meanwhile", "outcome", "left"),
    [
        ("resolver.add('prize', 'late')", lambda one: one.add("prize", "x"), "NameEntryExists", "x"),
        ("resolver.add('prize', 'late')", lambda one: one.add("other", "x"), "None", "late"),
        ("resolver.add('prize', 'late', replace=True)", lambda one: one.add("prize", "x"), "None", "late"),
        (
            "resolver.add('prize', 'late', replace=True)",
            lambda one: (one.add("incarnation", "2"), one.add("prize", "x")),
            "OwnerFenced",
            "x",
        ),
        ("resolver.delete('prize', value='old')", lambda one: one.add("prize", "x", replace=True), "False", "x"),
        ("resolver.delete('prize', value='old')", lambda one: one.add("other", "x"), "True", None),
        ("resolver.delete('prize', value='old')", lambda one: one.delete("prize"), "False", None),
    ],
)
def test_a_process_that_stops_while_it_writes_stops_nobody_and_changes_only_what_is_right_when_it_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    call: str,
    meanwhile: Callable[[NameResolver], object],
    outcome: str,
    left: str | None,
) -> None:
    monkeypatch.setattr(file_module, "ANSWER_S", 0.1)
    with FileResolver(tmp_path) as one, FileResolver(tmp_path) as two:
        if "delete" in call:
            one.add("prize", "old")
        with Stopped(moment, tmp_path, call) as stopped:
            meanwhile(one)
            for index in range(20):
                two.add(f"many/{index}", "x", lease_s=LONG_S)
            assert not is_held(tmp_path / ".lock"), "who stands still is not waited for again"
            assert stopped.resume() == outcome
        found = one.get_subtree()
        assert found.get("prize") == left
        assert len(one.get_subtree("many")) == 20


def test_writers_that_disturb_each_other_all_get_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each had been stopped with the lock, and went on at once."""
    monkeypatch.setattr(file_module, "ANSWER_S", 0.0)
    resolvers = [FileResolver(tmp_path) for _ in range(8)]

    def write(resolver: FileResolver) -> int:
        won = 0
        for round_ in range(20):
            try:
                resolver.add(f"prize/{round_}", resolver._owner)
            except NameEntryExists:
                continue
            won += 1
        return won

    with ThreadPoolExecutor(len(resolvers)) as pool:
        won = list(pool.map(write, resolvers))
    assert sum(won) == 20, "one for each"
    entries = list(resolvers[0].get_subtree().values())
    assert won == [entries.count(resolver._owner) for resolver in resolvers]


def test_a_process_that_ends_does_not_disturb_a_slow_writer(tmp_path: Path) -> None:
    """As one of 256 that end at once on a slow file system."""
    with FileResolver(tmp_path) as ending, FileLock(tmp_path / ".lock") as writing:
        assert writing.take()
        ending.hurry(0.0)
        timer = threading.Timer(1.0, fcntl.flock, (writing.descriptor, fcntl.LOCK_UN))
        timer.start()
        ending.add("a", "x")
        assert writing.is_current()
        timer.join()


def test_a_file_system_without_locks_takes_names_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", without)
    with FileResolver(tmp_path, patience_s=0.0) as resolver:
        resolver.add("a", "x")
        assert resolver.get("a") == "x"
        assert resolver.delete("a")


@pytest.mark.parametrize("step", ["write", "rename"])
def test_a_writer_whose_file_another_removed_on_nfs_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    stale, rename = iter([True]), Path.rename

    class Staged(io.FileIO):
        def write(self, content: Any) -> int:
            fail_once("write")
            return super().write(content)

    def fail_once(here: str) -> None:
        if here == step and next(stale, False):
            raise OSError(errno.ESTALE, "Stale file handle")

    def renamed(path: Path, target: Path) -> Path:
        fail_once("rename")
        return rename(path, target)

    monkeypatch.setattr(file_module, "open", Staged, raising=False)
    monkeypatch.setattr(Path, "rename", renamed)
    with FileResolver(tmp_path, patience_s=0.0) as resolver:
        resolver.add("a", "x")
        assert resolver.get("a") == "x"
    assert next(stale, None) is None


def test_what_a_change_depends_on_is_read_after_a_look_at_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that NFS asks the server whether a name that was free still is."""
    calls: list[str] = []
    open_file, open_path = os.open, Path.open

    def looks(path: Any, *args: Any, **kwargs: Any) -> int:
        calls.append(Path(path).name)
        return open_file(path, *args, **kwargs)

    def reads(path: Path, *args: Any) -> Any:
        calls.append(path.name)
        return open_path(path, *args)

    with FileResolver(tmp_path) as resolver:
        monkeypatch.setattr(os, "open", looks)
        monkeypatch.setattr(Path, "open", reads)
        resolver.add("a", "x")
    assert calls.index("a.json") == calls.index(tmp_path.name) + 1


def test_a_damaged_file_is_reported_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(NameResolveError, match=r"a\.json.*damaged"):
        FileResolver(tmp_path).get("a")


def test_who_stood_still_waits_for_owners_that_may_have_stood_still_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all processes of a machine do that is stopped for longer than a lease, in whatever order they go on."""
    stood_still_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stood_still_s)
    with FileResolver(tmp_path) as owner, FileResolver(tmp_path) as resolver:
        owner.add("w/0", "a", lease_s=10.0)
        resolver.add("w/1", "b", lease_s=10.0)
        for each in (owner, resolver):
            abandon(each)
        for module in ("name_resolve", "name_files"):
            monkeypatch.setattr(f"asyncrl.comm.{module}.time", clock)
        subtree = resolver._followed["w"] = Subtree("w")
        looks = resolver._snapshots()
        subtree.replace(next(looks)["w"])
        stood_still_s = 20.0
        found = next(looks)
        assert found == {"w": {}}
        subtree.replace(found["w"], in_trouble=resolver.in_trouble)
        assert subtree.entries() == {"w/0": "a", "w/1": "b"}
        monkeypatch.undo()


def test_expiry_follows_the_clock_of_the_file_system(tmp_path: Path) -> None:
    owner, other = FileResolver(tmp_path), FileResolver(tmp_path)
    owner.add("a", "x", lease_s=3600.0)
    abandon(owner)
    assert other.get("a") == "x"
    past = (tmp_path / "a.json").stat().st_mtime - 3601
    os.utime(tmp_path / "a.json", (past, past))
    with pytest.raises(NameEntryNotFound):
        other.get("a")


def test_an_unknown_back_end_is_refused() -> None:
    with pytest.raises(ValueError, match="'zookeeper'"):
        make_resolver("zookeeper", "x")  # type: ignore[arg-type]


@pytest.mark.etcd
@pytest.mark.parametrize("forgets", [False, True])
def test_entries_and_look_ups_survive_an_etcd_server_that_is_away(etcd_server: Any, forgets: bool) -> None:
    """Away for longer than the lease; `forgets`: it comes back without what it had stored."""

    def one() -> NameResolver:
        access = {"addresses": etcd_server.address}
        return make_resolver("etcd3", "/asyncrl/away", access=access, patience_s=4 * PATIENCE_S)

    with one() as owner, one() as other, ThreadPoolExecutor(4) as pool:
        owner.add("leased", "x", lease_s=2.0)
        looks = [
            pool.submit(other.watch, "published", 4 * PATIENCE_S),
            pool.submit(other.wait, "added", 4 * PATIENCE_S),
        ]
        etcd_server.kill()
        looks.append(pool.submit(other.get_subtree, "nothing"))
        adding = pool.submit(owner.add, "added", "y", replace=True)
        threading.Event().wait(3.0)
        assert not any(look.done() for look in [*looks, adding])
        if forgets:
            shutil.rmtree(etcd_server.data_dir())
        etcd_server.start()
        adding.result(PATIENCE_S)
        owner.add("published", "z")
        assert [look.result(PATIENCE_S) for look in looks] == ["z", "y", {}]
        assert other.wait("leased", PATIENCE_S) == "x"
        assert_stays(owner, other, "leased", "x", lease_s=2.0)


@pytest.mark.etcd
def test_an_entry_whose_addition_was_not_confirmed_is_known_as_ones_own(
    etcd_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server added it anew, and the reply was lost: adding it once more finds the name taken, by oneself."""
    root = f"/asyncrl/{uuid.uuid4().hex}"
    with make_resolver("etcd3", root, access={"addresses": etcd_address}) as owner:
        put = owner._put  # type: ignore[attr-defined]
        calls = 0

        def put_and_lose_the_reply(*args: Any) -> None:
            nonlocal calls
            calls += 1
            put(*args)
            if calls == 1:
                raise NameResolveUnavailable("the connection broke")

        monkeypatch.setattr(owner, "_put", put_and_lose_the_reply)
        owner.add("a", "x", lease_s=LONG_S)
        assert calls == 2
        with make_resolver("etcd3", root, access={"addresses": etcd_address}) as other:
            with pytest.raises(NameEntryExists):
                other.add("a", "y", lease_s=LONG_S)
            assert owner._renew("a") == "kept", "it is its own"
            assert other.get("a") == "x"


@pytest.mark.etcd
@pytest.mark.parametrize("imported_before", [False, True])
def test_etcd3_loads_beside_any_protobuf_or_says_what_to_set(imported_before: bool) -> None:
    protobuf = int(pytest.importorskip("google.protobuf").__version__.split(".")[0])
    code = f"""
if {imported_before}:
    import google.protobuf.descriptor_pb2
from asyncrl.comm.name_resolve import NameResolveError
try:
    import asyncrl.hosts.etcd
except NameResolveError as error:
    assert "set PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python" in str(error), error
    print("explained")
else:
    print("loaded")
import os
assert "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION" not in os.environ, "what this process starts has its own protobuf"
"""
    environment = {key: value for key, value in os.environ.items() if key != "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == ("explained" if imported_before and protobuf >= 4 else "loaded")


_OWNER = f"""
import sys, threading
from asyncrl.comm.name_files import FileResolver
FileResolver(sys.argv[1]).add("child", "alive", lease_s={LEASE_S})
sys.stdin.read()
"""


class _owner_process:
    """A process that holds the leased entry `child` until it is killed."""

    def __init__(self, root: Path) -> None:
        self._arguments = [sys.executable, "-c", _OWNER, str(root)]

    def __enter__(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(self._arguments, stdin=subprocess.PIPE)
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def test_one_thread_looks_at_all_followed_names_a_few_times_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    class Woken(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return True

    resolver = FileResolver(tmp_path / "names")
    monkeypatch.setattr(resolver, "_woken", Woken())
    resolver._followed = {root: Subtree(root) for root in ("servers", "workers")}
    looks = resolver._snapshots()

    def look() -> dict[str, dict[str, str]]:
        found = next(looks)
        for root in found:
            resolver._followed[root].replace(found[root])
        return found

    assert look() == {"servers": {}, "workers": {}}
    assert look() == {}, "nothing has changed"
    resolver._followed["turn"] = Subtree("turn")
    assert look() == {"servers": {}, "workers": {}, "turn": {}}
    assert waits == [SCAN_S, SCAN_S]
    resolver.close()


def test_all_followers_share_one_thread_and_a_wait_leaves_nothing(make: MakeResolver) -> None:
    before = set(threading.enumerate())
    one, other = make(), make()
    one.add("a/0", "x")
    for root in ("a", "b", "c"):
        other.follow(root)
    with pytest.raises(NameResolveTimeout):
        other.watch("late", 0.05)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(other.watch, "late", PATIENCE_S) for _ in range(2)]
        started = {thread for thread in threading.enumerate() if thread.name == "follow names"} - before
        one.add("late", "here")
        assert [each.result(PATIENCE_S / 2) for each in waiting] == ["here", "here"], "woken, not late"
    assert started == {other._follower}
    assert set(other._followed) == {"a", "b", "c"}


def test_a_wait_ends_when_its_resolver_is_closed(make: MakeResolver) -> None:
    resolver = make()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(resolver.watch, "never", PATIENCE_S)
        resolver.close()
        with pytest.raises(NameResolveError, match="closed"):
            waiting.result(PATIENCE_S / 2)
