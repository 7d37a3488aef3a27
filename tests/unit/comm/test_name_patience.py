"""A back end of name resolution that is away for a while ends nobody who can wait."""

from __future__ import annotations

import asyncio
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

from asyncrl.comm import names
from asyncrl.comm.name_resolve import (
    FileResolver,
    NameEntryExists,
    NameResolveError,
    NameResolver,
    NameResolveTimeout,
    NameResolveUnavailable,
    OwnerFenced,
    base,
)
from asyncrl.comm.name_resolve.outages import RECENT_S, Outages
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


def test_an_outage_that_lasts_too_long_is_told_with_its_reason(tmp_path: Path, away: Away) -> None:
    resolver = FileResolver(tmp_path / "names", patience_s=0.1)
    away.times = 1_000_000
    with pytest.raises(NameResolveUnavailable, match=r"Stale file handle.*failed for \d+ s"):
        resolver.get_subtree("a")


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
    monkeypatch.setattr(base, "LOOK_S", 0.001)
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
        followed = resolver.follow("workers")
        assert resolver._follower is not None
        resolver._follower.join(LIMIT_S)
        told = r"names under '/names' are not followed: KeyError\('a defect'\)"
        with pytest.raises(NameResolveError, match=told):
            followed.entries()
        with pytest.raises(NameResolveError, match=told):
            resolver.follow("status")
    (record,) = caplog.records
    assert (record.exc_info or [None])[0] is KeyError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_outage_is_told_once_and_another_one_again(caplog: pytest.LogCaptureFixture) -> None:
    clock, error = Clock(), OSError("disk full")
    outages = Outages("/names", 60.0, clock)
    for failures in range(1, 5):
        clock.now += 10
        assert outages.failed("add", error, failures) > 0
        assert outages.failed("get", error, failures) > 0
        outages.worked("watch")
    assert len(caplog.records) == 1
    outages.worked("add")
    outages.worked("get")
    outages.failed("get", error, 1)
    assert len(caplog.records) == 2


def test_calls_of_one_kind_may_fail_for_so_long_whatever_others_do() -> None:
    """As on a full disk, which can be read."""
    clock, error = Clock(), OSError("disk full")
    outages = Outages("/names", 60.0, clock)
    for _ in range(6):
        outages.failed("add", error, 1)
        outages.worked("get")
        clock.now += 10.0
    with pytest.raises(NameResolveUnavailable, match=r"disk full \(name resolution has failed for 60 s\)"):
        outages.failed("add", error, 7)


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
        "_register_pusher": lambda: resolver.add(names.pusher_key(0), "rollout_worker/0"),
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
    told = [record.getMessage() for record in caplog.records if record.name == log.name]
    assert told == ["no training rank is registered: complete trajectories wait here until one is"]


def test_a_shorter_value_replaces_a_longer_one_whose_add_failed_halfway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileResolver(tmp_path / "names", patience_s=0.0) as resolver:
        with monkeypatch.context() as broken:
            broken.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "away")))
            with pytest.raises(NameResolveUnavailable):
                resolver.add("a", 100 * "long ")
        resolver.add("a", "short")
        assert resolver.get("a") == "short"


def test_an_outage_lasts_from_the_first_failure_until_a_call_works_or_none_is_made() -> None:
    now = 100.0
    outages = Outages("root", 60.0, lambda: now)
    assert outages.outage_s == 0.0
    assert not outages.in_trouble
    outages.failed("get", OSError(), 1)
    assert outages.in_trouble, "leases may have run out"
    now = 112.0
    outages.failed("get", OSError(), 2)
    assert outages.outage_s == 12.0
    outages.worked("get")
    assert outages.outage_s == 0.0
    outages.failed("add", OSError(), 1)
    now += RECENT_S
    assert outages.outage_s == 0.0
