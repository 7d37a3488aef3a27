"""A back end of name resolution that is away for a while ends nobody who can wait."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from asyncrl.comm import name_resolve, names
from asyncrl.comm.name_files import FileResolver
from asyncrl.comm.name_resolve import (
    GRACE_S,
    NameEntryExists,
    NameResolveError,
    NameResolver,
    NameResolveTimeout,
    NameResolveUnavailable,
    OwnerFenced,
)
from asyncrl.comm.push_pull import TrajectoryPusher
from asyncrl.rollout import process
from asyncrl.rollout.process import RolloutWorker

LIMIT_S = 300.0


class Away:
    """Makes the next `times` file operations in `folder` fail with `error`; none where it is 0."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.times = 0
        self.error = errno.ESTALE
        self.failed = threading.Event()
        for owner, name in ((Path, "open"), (os, "listdir")):
            monkeypatch.setattr(owner, name, self._failing(getattr(owner, name)))

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.times > 0 and Path(str(args[0])).is_relative_to(self.folder):
                self.times -= 1
                self.failed.set()
                raise OSError(self.error, os.strerror(self.error), str(args[0]))
            return call(*args, **kwargs)

        return wrapped


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Away:
    return Away(tmp_path / "names", monkeypatch)


@pytest.fixture
def resolver(tmp_path: Path) -> Iterator[FileResolver]:
    with FileResolver(tmp_path / "names") as resolver:
        yield resolver


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO, errno.ENOSPC])
def test_every_call_survives_a_back_end_that_is_away(resolver: FileResolver, away: Away, error: int) -> None:
    away.error, away.times = error, 2
    resolver.add("a/b", "1")
    away.times = 2
    assert resolver.get("a/b") == "1"
    away.times = 2
    assert resolver.get_subtree("a") == {"a/b": "1"}
    away.times = 2
    assert resolver.watch("a/b", LIMIT_S, None) == "1"
    away.times = 2
    assert resolver.wait("a/b", LIMIT_S) == "1"
    away.times = 2
    assert resolver.delete("a/b")


def test_what_is_no_matter_of_time_is_told_at_once(resolver: FileResolver, away: Away) -> None:
    resolver.add("a", "1")
    away.error, away.times = errno.EACCES, 1
    with pytest.raises(NameResolveError, match="Permission denied") as refusal:
        resolver.get("a")
    assert not isinstance(refusal.value, NameResolveUnavailable)


def test_watching_in_an_outage_ends_at_its_own_limit(resolver: FileResolver, away: Away) -> None:
    away.times = 1_000_000
    with pytest.raises(NameResolveTimeout):
        resolver.watch("a", 0.05)
    with pytest.raises(NameResolveTimeout):
        resolver.watch("a", 0.05)
    assert resolver._failing.keys() == {"a"}, "one outage, whoever looks again"
    away.times = 0
    with pytest.raises(NameResolveTimeout):
        resolver.watch("a", 0.0)
    assert not resolver._failing


def test_an_outage_counts_over_all_looks_at_a_name(tmp_path: Path, away: Away) -> None:
    resolver = FileResolver(tmp_path / "names", patience_s=0.1)
    away.times = 1_000_000

    def look_again_and_again() -> None:
        while True:
            with contextlib.suppress(NameResolveTimeout):
                resolver.watch("a", 0.02)

    with pytest.raises(NameResolveUnavailable, match=r"Stale file handle.*failed for \d+ s"):
        look_again_and_again()


def test_an_outage_that_lasts_too_long_is_told_with_its_reason(tmp_path: Path, away: Away) -> None:
    resolver = FileResolver(tmp_path / "names", patience_s=0.1)
    away.times = 1_000_000
    with pytest.raises(NameResolveUnavailable, match=r"Stale file handle.*failed for \d+ s"):
        resolver.get_subtree("a")


def test_what_is_only_followed_raises_once_an_outage_lasts_too_long(tmp_path: Path, away: Away) -> None:
    """A manager that waits for the next version calls nothing that could fail for too long by itself."""
    with FileResolver(tmp_path / "names", patience_s=0.1) as resolver:
        followed = resolver.follow("a")
        away.times = 1_000_000
        reported = r"Stale file handle.*failed for \d+ s"
        resolver._wake()
        assert resolver._follower is not None
        resolver._follower.join(LIMIT_S)
        with pytest.raises(NameResolveUnavailable, match=reported):
            followed.entries()
        with pytest.raises(NameResolveUnavailable, match=reported):
            resolver.watch("a/b", LIMIT_S)


def test_who_begins_to_follow_in_an_outage_waits_for_its_end_and_not_for_ever(tmp_path: Path, away: Away) -> None:
    with FileResolver(tmp_path / "names") as resolver:
        resolver.add("a/b", "1")
        away.times = 2
        assert resolver.follow("a").entries() == {"a/b": "1"}
    with FileResolver(tmp_path / "names", patience_s=0.1) as resolver:
        away.times = 1_000_000
        with pytest.raises(NameResolveUnavailable, match=r"Stale file handle.*failed for \d+ s"):
            resolver.follow("a")
        away.times = 0


def test_a_process_that_was_asked_to_stop_does_not_wait_for_the_end_of_an_outage(
    resolver: FileResolver, away: Away
) -> None:
    away.times = 1_000_000
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(resolver.get, "a")
        assert away.failed.wait(LIMIT_S)
        resolver.hurry(0.1)
        with pytest.raises(NameResolveUnavailable):
            looking.result(LIMIT_S)


def test_a_process_that_is_about_to_end_makes_no_call_twice(resolver: FileResolver, away: Away) -> None:
    resolver.add("a", "1")
    assert resolver.get("a") == "1"
    resolver.hurry(0.0)
    assert resolver.get("a") == "1"
    away.times = 1_000_000
    with pytest.raises(NameResolveUnavailable):
        resolver.get("a")
    assert away.times == 999_999


class Renewing(NameResolver):
    """Renews as `renew` says. Every name is taken by others."""

    def __init__(self, renew: Callable[[str], Literal["kept", "lapsed", "gone"]], patience_s: float = 60.0) -> None:
        super().__init__("/names", patience_s)
        self._outcome = renew

    def _renew(self, name: str) -> Literal["kept", "lapsed", "gone"]:
        return self._outcome(name)

    def _create(self, name: str, value: str, lease_s: float | None, replace: bool) -> None:
        if not replace:
            raise NameEntryExists(name, self.root)

    def _read(self, name: str) -> str | None:
        return None

    def _read_subtree(self, root: str) -> dict[str, str]:
        return {}

    def _remove(self, name: str, value: str | None, own: bool) -> bool:
        return False

    def _snapshots(self) -> Iterator[dict[str, dict[str, str]]]:
        raise KeyError("a defect")


def test_a_lease_is_renewed_again_after_an_outage_of_any_length_with_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(name_resolve, "LOOK_S", 0.001)
    renewed = threading.Event()
    attempts = 0

    def renew(name: str) -> Literal["kept"]:
        nonlocal attempts
        attempts += 1
        if attempts < 20:
            raise NameResolveUnavailable("etcd is away")
        renewed.set()
        return "kept"

    with Renewing(renew, 0.005) as owner:
        owner.add("a", "x", lease_s=0.05, replace=True)
        assert renewed.wait(LIMIT_S)
        assert list(owner._leased) == ["a"]
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "name resolution under '/names' fails"
    ]


def test_a_name_that_is_lost_is_told_once_and_looked_at_further_on(caplog: pytest.LogCaptureFixture) -> None:
    states: Iterator[Literal["kept", "gone"]] = iter(["kept", "gone", "gone", "kept", "gone"])
    lost, over = list[str](), threading.Event()

    def renew(name: str) -> Literal["kept", "gone"]:
        state = next(states, None)
        if state is None:
            over.set()
            raise OwnerFenced(name, "/names")
        return state

    owner = Renewing(renew)
    owner.on_lost, owner.fences = lost.append, {"incarnation": "1"}
    owner.add("a", "x", lease_s=0.05, replace=True)
    assert over.wait(LIMIT_S)
    owner._stop_renewing()
    assert lost == ["a", "a"], "once for each time"
    assert owner._leased == {}, "it is another's for good"
    assert [record.getMessage() for record in caplog.records] == [
        *2 * ["name 'a' was deleted or taken by another owner"],
        "name 'a' under '/names' no longer belongs to this process: another process has replaced it",
    ]


def test_a_defect_in_one_renewal_is_logged_and_the_other_leases_live_on(caplog: pytest.LogCaptureFixture) -> None:
    healthy, broken = threading.Semaphore(0), threading.Semaphore(0)

    def renew(name: str) -> Literal["kept"]:
        if name == "broken":
            broken.release()
            raise KeyError("a defect")
        healthy.release()
        return "kept"

    with Renewing(renew) as owner:
        owner.add("broken", "x", lease_s=0.05, replace=True)
        for _ in range(2):
            assert broken.acquire(timeout=LIMIT_S)
        owner.add("healthy", "x", lease_s=0.05, replace=True)
        assert healthy.acquire(timeout=LIMIT_S)
    record = caplog.records[0]
    assert record.getMessage().startswith("the lease of 'broken' was not renewed")
    assert (record.exc_info or [None])[0] is KeyError


def test_a_defect_in_following_names_reaches_the_readers(caplog: pytest.LogCaptureFixture) -> None:
    with Renewing(lambda name: "kept") as resolver:
        reported = r"names under '/names' are not followed: KeyError\('a defect'\)"
        for root in ("workers", "status"):
            with pytest.raises(NameResolveError, match=reported):
                resolver.follow(root)
        with pytest.raises(NameResolveError, match=reported):
            resolver._followed["workers"].entries()
    (record,) = caplog.records
    assert (record.exc_info or [None])[0] is KeyError


class Calling(Renewing):
    """What its calls do says `script`, by name: None works, an error is raised."""

    def __init__(self, patience_s: float = 60.0) -> None:
        super().__init__(lambda name: "kept", patience_s)
        self.script: dict[str, Exception | None] = {}

    def _read(self, name: str) -> str | None:
        if (error := self.script.get(name)) is not None:
            raise error
        return "x"


def test_an_outage_is_told_once_and_another_one_again(caplog: pytest.LogCaptureFixture) -> None:
    resolver, away = Calling(), NameResolveUnavailable("disk full")
    first, second = object(), object()
    for call in (first, second, first, second):
        resolver._failed(call, away)
        assert resolver.get("another") == "x"
    assert len(caplog.records) == 1
    resolver._failing.clear()
    resolver._failed(first, away)
    assert len(caplog.records) == 2


def test_a_call_may_fail_for_so_long_whatever_others_do() -> None:
    """As on a full disk, which can be read."""
    resolver = Calling(0.2)
    resolver.script["full"] = NameResolveUnavailable("disk full")
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(resolver.get, "full")
        while not writing.done():
            assert resolver.get("another") == "x"
        with pytest.raises(NameResolveUnavailable, match=r"disk full \(name resolution has failed for 0 s\)"):
            writing.result()
    assert resolver.outage_s == 0.0, "the call has ended"


def test_an_outage_lasts_from_the_first_failure_of_what_is_retried_until_it_works() -> None:
    resolver = Calling()
    assert resolver.outage_s == 0.0
    resolver.script["a"] = NameResolveUnavailable("away")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(resolver.get, "a")
        while not (since := resolver.outage_s):
            assert not reading.done()
        while resolver.outage_s <= since:
            assert not reading.done()
        resolver.script.clear()
        assert reading.result(LIMIT_S) == "x"
    assert resolver.outage_s == 0.0


def test_a_renewal_that_fails_is_made_again_long_before_the_next_one_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    def renew(name: str) -> Literal["kept"]:
        raise NameResolveUnavailable("etcd is away")

    resolver = Renewing(renew)
    resolver._stop_renewing()  # this test says when it renews
    monkeypatch.setattr(name_resolve.time, "monotonic", lambda: 100.0)
    resolver.add("a", "x", lease_s=9.0, replace=True)
    resolver._renew_all()
    assert resolver._renewal_due == 100.0 + name_resolve.LOOK_S


def test_a_failed_call_and_a_late_renewal_are_trouble_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    hangs, continues = threading.Event(), threading.Event()

    def renew(name: str) -> Literal["kept"]:
        hangs.set()
        assert continues.wait(LIMIT_S)
        return "kept"

    resolver = Renewing(renew)
    resolver._stop_renewing()  # this test says when it renews
    monkeypatch.setattr(name_resolve.time, "monotonic", lambda: now)
    assert not resolver.in_trouble
    resolver.add("a", "x", lease_s=9.0, replace=True)
    now += 9.0 / name_resolve.RENEWALS_PER_LEASE
    assert not resolver.in_trouble, "it is due"
    now += name_resolve.LATE_S + 0.1
    assert resolver.in_trouble, "this process or the back end stands still"
    with ThreadPoolExecutor(1) as pool:
        renewing = pool.submit(resolver._renew_all)
        assert hangs.wait(LIMIT_S)
        now += 1.0
        assert resolver.in_trouble
        continues.set()
        renewing.result(LIMIT_S)
    assert resolver._renewal_due == now + 2.0, "a third of the lease after the renewal began"
    now += GRACE_S - 7.0
    assert resolver.in_trouble, "it did a moment ago"
    resolver._renew_all()
    resolver.delete("a")
    now += 7.1
    assert not resolver.in_trouble
    resolver._failed(object(), NameResolveError("away"))
    now += GRACE_S - 0.1
    assert resolver.in_trouble
    now += 0.2
    assert not resolver.in_trouble


async def test_a_rollout_worker_follows_the_training_ranks_through_an_outage(
    resolver: FileResolver, away: Away, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "LOOK_S", 0.0)
    followed: asyncio.Queue[list[str]] = asyncio.Queue()
    pusher = SimpleNamespace(set_addresses=lambda addresses: followed.put_nowait(list(addresses)))
    log = logging.getLogger("asyncrl.rollout_worker")
    own = {
        "log": log,
        "_has_joined": False,
        "name": "rollout_worker/0",
        "config": SimpleNamespace(system=SimpleNamespace(lease_s=None)),
    }
    worker = cast(RolloutWorker, SimpleNamespace(resolver=resolver, index=0, **own))
    resolver.add(names.puller_key(0), "tcp://one")
    following = asyncio.create_task(RolloutWorker._follow_pullers(worker, cast(TrajectoryPusher, pusher)))
    try:
        async with asyncio.timeout(LIMIT_S):
            assert await followed.get() == ["tcp://one"]
            away.times = 3
            resolver.add(names.puller_key(0), "tcp://two", replace=True)
            while await followed.get() != ["tcp://two"]:
                pass
            resolver.delete(names.puller_key(0))
            while await followed.get():
                pass
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    reported = [record.getMessage() for record in caplog.records if record.name == log.name]
    assert reported == ["no training rank is registered: complete trajectories wait here until one is"]


def test_a_shorter_value_replaces_a_longer_one_whose_add_failed_halfway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileResolver(tmp_path / "names", patience_s=0.0) as resolver:
        with monkeypatch.context() as broken:
            broken.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "away")))
            with pytest.raises(NameResolveUnavailable):
                resolver.add("a", 100 * "long ")
        resolver.add("a", "short")
        assert resolver.get("a") == "short"
