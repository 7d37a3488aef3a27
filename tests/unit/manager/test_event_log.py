"""Events of the manager are on the disk before any process learns of them, complete but for a line that the death cut
off.
"""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from asyncrl.comm.files import retry_write
from asyncrl.manager import event_log
from asyncrl.manager import messages as m
from asyncrl.manager.service import ManagerService
from asyncrl.plugins.datasets.queue.order import DataOrder

WORKER = "rollout_worker/0"


def manager(file: Path) -> ManagerService:
    return ManagerService(
        batch_size=2,
        max_staleness=1,
        routing="least_requests",
        lease_s=1e9,
        order=DataOrder(100, 0),
        clock=lambda: 0.0,
        log_file=file,
    )


async def call(service: ManagerService, path: str, **fields: Any) -> Any:
    kind, handler = service.verbs()[path]
    return await handler(kind(**fields))


async def admit(service: ManagerService, *names: str) -> None:
    await call(service, "/allocate_rollout", worker=WORKER, rollouts=list(names))


async def some_life(service: ManagerService) -> None:
    service.begin(0)
    await admit(service, "0", "1", "2")
    finished = [m.FinishedRollout("0", accepted=True), m.FinishedRollout("1", False, "failed", return_prompt=True)]
    await call(service, "/finish_rollout", worker=WORKER, finished=finished)


async def test_a_manager_that_is_started_again_stands_where_the_one_before_it_stood(tmp_path: Path) -> None:
    first = manager(tmp_path / "log")
    assert not first.begin_again()
    await some_life(first)
    second = manager(tmp_path / "log")
    assert second.begin_again()
    assert second.rollouts.remember() == first.rollouts.remember()
    await admit(second, "3")
    third = manager(tmp_path / "log")
    assert third.begin_again()
    assert third.gate.books() == second.gate.books()
    assert third.gate.books().running == 2


async def test_a_line_that_was_cut_off_is_left_out_and_one_that_is_damaged_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "log"
    first = manager(file)
    await some_life(first)
    before = first.rollouts.remember()
    await admit(first, "3")
    os.truncate(file, file.stat().st_size - 3)
    second = manager(file)
    assert second.begin_again()
    assert second.rollouts.remember() == before
    await admit(second, "4")
    assert manager(file).begin_again(), "what follows a line that was cut off begins a line of its own"
    file.write_bytes(b"}" + file.read_bytes())
    with pytest.raises(ValueError, match="is damaged"):
        manager(file).begin_again()


async def test_every_flipped_bit_is_refused_and_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "log"
    await some_life(manager(file))
    whole, lines = file.read_bytes(), file.read_bytes().splitlines(keepends=True)
    places = range(0, len(whole), 7)
    for at in [*places, len(whole) - 1]:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"log:\d is damaged: .*; start the run again"):
            manager(file).begin_again()
    for changed in ([*lines[:1], *lines[2:]], [*lines[:2], *lines[1:]], [lines[0], lines[2], lines[1], *lines[3:]]):
        file.write_bytes(b"".join(changed))
        with pytest.raises(ValueError, match="is damaged: its checksum does not fit"):
            manager(file).begin_again()


async def test_a_kill_within_any_byte_of_the_last_line_costs_that_line_alone(tmp_path: Path) -> None:
    file = tmp_path / "log"
    first = manager(file)
    await some_life(first)
    before, whole = first.rollouts.remember(), file.stat().st_size
    await admit(first, "3")
    data = file.read_bytes()
    for end in range(whole + 1, len(data)):
        file.write_bytes(data[:end])
        second = manager(file)
        assert second.begin_again()
        assert second.rollouts.remember() == before
        assert file.stat().st_size == whole


async def test_a_long_log_is_replaced_by_what_it_comes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "GROWTH_BYTES", 2_000)
    service = manager(tmp_path / "log")
    service.begin(0)
    for number in range(200):
        await admit(service, str(number))
        report = {"version": 0, "trained": [], "dropped": [m.DroppedRollout(str(number), "stale", False)]}
        await call(service, "/report_consumed", **report)
    assert b"Remembered" in (tmp_path / "log").read_bytes()
    again = manager(tmp_path / "log")
    assert again.begin_again()
    assert again.gate.books() == service.gate.books()
    assert again.gate.books().dropped == {"stale": 200}


async def test_a_full_disk_holds_the_reply_back_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a line is written before the disk is full."""
    service = manager(tmp_path / "log")
    service.begin(0)
    await admit(service, "0")
    write, full = os.write, [True]

    def short_of_room(descriptor: int, data: Any) -> int:
        if not full:
            return write(descriptor, data)
        if len(data) > 40:
            return write(descriptor, bytes(data[:40]))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(retry_write, "_BACKOFF", retry_write.Backoff(0.01, 0.01))
    monkeypatch.setattr(event_log.os, "write", short_of_room)
    asking = asyncio.create_task(admit(service, "1", "2"))
    async with asyncio.timeout(60):
        while "waiting to write the manager's inputs" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not asking.done()
    full.clear()
    await asking
    again = manager(tmp_path / "log")
    assert again.begin_again()
    assert again.gate.books().running == 3
