"""The limits of a start: time without progress."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl.comm import names
from asyncrl.comm.name_files import FileResolver
from asyncrl.comm.names import GSERVER_MANAGER, MASTER_WORKER, MODEL_WORKER, WorkerStatus, status_key
from asyncrl.runtime.process import starting
from asyncrl.runtime.process.starting import (
    BEFORE_BEGIN,
    LONGEST_STARTS,
    Effort,
    NotStarted,
    ReportedStatus,
    StartLimit,
    StartWait,
    await_start,
)

LIMIT_S = 300.0


class Clock:
    """Seconds; every call is one later, as of looks that are a second apart."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def looks_until_over(limit: StartLimit, *, progress_every: int = 0, begun: bool = True) -> tuple[int, str]:
    for look in range(1, 10_000):
        progressed = bool(progress_every) and look % progress_every == 0
        if (fault := limit.fault(progressed=progressed, begun=begun)) is not None:
            return look, fault
    raise AssertionError("it never ends")


def test_a_start_without_progress_is_over_after_its_limit_and_names_it() -> None:
    looks, fault = looks_until_over(StartLimit("system.start_timeout_s", 20.0, Clock()))
    assert looks == 20
    assert "20 s (system.start_timeout_s" in fault


def test_a_start_with_progress_may_be_long_but_not_for_ever() -> None:
    looks, fault = looks_until_over(StartLimit("system.start_timeout_s", 20.0, Clock()), progress_every=19)
    assert looks == 20 * LONGEST_STARTS
    assert f"({LONGEST_STARTS} times system.start_timeout_s=20)" in fault


def test_what_has_not_shown_itself_has_more_time() -> None:
    looks, fault = looks_until_over(StartLimit("system.start_timeout_s", 20.0, Clock()), begun=False)
    assert looks == 20 * BEFORE_BEGIN
    assert "not begun within 100 s" in fault


def test_time_in_which_this_process_stood_still_does_not_count() -> None:
    clock = Clock()
    limit = StartLimit("system.start_timeout_s", 20.0, clock)
    clock.now += 3600.0
    assert looks_until_over(limit)[0] == 20


def waits(resolver: FileResolver, kind: str, clock: Clock) -> StartWait:
    return StartWait(resolver, kind, "a name", StartLimit("system.start_timeout_s", 20.0, clock))


def look_often(wait: StartWait) -> None:
    for _ in range(1000):
        wait.look()


class Names(FileResolver):
    """A resolver whose followed entries change at once, as the test puts them."""

    def say(self, kind: str, index: int, status: WorkerStatus) -> None:
        followed = self.follow(f"{names.STATUSES}/{kind}")
        followed.replace(followed.entries() | {status_key(kind, index): status.encode()})

    def _snapshots(self) -> Iterator[dict[str, dict[str, str]]]:
        while not self._closing.wait(0.01):
            yield {subtree.root: {} for subtree in self._subtrees() if not subtree.await_first(0.0)}


@pytest.fixture
def resolver(tmp_path: Path) -> Names:
    return Names(tmp_path)


def test_who_waits_for_a_process_waits_as_long_as_any_of_its_kind_makes_progress(resolver: Names) -> None:
    with resolver:
        wait = waits(resolver, MODEL_WORKER, Clock())
        resolver.say(MODEL_WORKER, 0, WorkerStatus("ready", 10))
        for progress in range(100):
            resolver.say(MODEL_WORKER, 1, WorkerStatus("starting", 11, progress=progress // 10))
            wait.look()
        late = "a name: model_worker: no progress for 20 s .*; model_worker/1 is starting .pid 11.; see their logs"
        with pytest.raises(NotStarted, match=late):
            look_often(wait)


def test_what_has_ended_is_waited_for_as_if_it_had_not_begun(resolver: Names) -> None:
    with resolver:
        wait = waits(resolver, MASTER_WORKER, Clock())
        resolver.say(MASTER_WORKER, 0, WorkerStatus("starting", 10))
        wait.look()
        resolver.follow(f"{names.STATUSES}/{MASTER_WORKER}").replace({})
        with pytest.raises(NotStarted, match=r"not begun within 100 s.*no master_worker is starting"):
            look_often(wait)


def test_work_of_a_process_and_of_its_children_counts_and_waiting_does_not() -> None:
    clock = Clock()
    effort, idle = Effort(clock=clock), Effort(1 << 22, clock)
    assert not effort.grew(), "it is measured over a while"
    clock.now += starting.ASK_S
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    with Path("/dev/zero").open("rb", buffering=0) as zeros:
        for _ in range(64):
            zeros.read(1 << 20)
    assert effort.grew()
    clock.now += starting.ASK_S
    assert not idle.grew(), "there is no such process"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as waiting:
        child = Effort(waiting.pid, clock)
        clock.now += 1e6
        assert not child.grew()
        waiting.kill()


async def test_what_hangs_as_it_starts_is_given_up_and_what_works_is_awaited() -> None:
    class Works(Effort):
        def grew(self) -> bool:
            return True

    class Hangs(Effort):
        def grew(self) -> bool:
            return False

    clock, begun = Clock(), asyncio.Event()

    async def start() -> str:
        await begun.wait()
        return "started"

    limit = StartLimit("generation.start_timeout_s", 0.01, clock)
    with pytest.raises(NotStarted, match=r"generation\.start_timeout_s"):
        await await_start(start(), Hangs(), limit)
    loading = asyncio.create_task(await_start(start(), Works(), StartLimit("x", 1e6)))
    begun.set()
    assert await loading == "started"


def test_a_process_counts_its_progress_in_its_status_until_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting.Effort, "grew", lambda self: True)
    key = status_key(GSERVER_MANAGER, 0)
    with FileResolver(tmp_path) as resolver, ThreadPoolExecutor(1) as pool:
        reported = ReportedStatus(resolver, key, 0, 0.5, always=False)
        reported.set("starting")
        counting = pool.submit(reported.count_progress)
        while (status := WorkerStatus.decode(resolver.get(key))).progress < 2:
            resolver.watch(key, LIMIT_S, status.encode())
        assert status.state == "starting"
        reported.set("ready")
        counting.result(LIMIT_S)
        assert WorkerStatus.decode(resolver.get(key)).state == "ready"


def test_the_progress_of_awaited_processes_counts_and_may_count_after_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting.Effort, "grew", lambda self: False)
    key = status_key(GSERVER_MANAGER, 0)
    with FileResolver(tmp_path) as resolver, ThreadPoolExecutor(1) as pool:
        reported = ReportedStatus(resolver, key, 3, 0.1, always=True)
        reported.set("ready")
        reported.others_progressed()
        counting = pool.submit(reported.count_progress)
        while (status := WorkerStatus.decode(resolver.get(key))).progress < 1:
            resolver.watch(key, LIMIT_S, status.encode())
        assert (status.state, status.incarnation) == ("ready", 3)
        reported.stop()
        counting.result(LIMIT_S)
