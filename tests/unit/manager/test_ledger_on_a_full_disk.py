"""The ledger waits for a disk that takes nothing for a while, and the manager's event loop does not."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.comm import files
from asyncrl.comm.ended_rollouts import RolloutCounts, RunSettings
from asyncrl.comm.waits import Backoff
from asyncrl.manager.messages import GateCheckpoint, TrainedRollout
from asyncrl.manager.rollouts.rollout_state import Ledger

STEPS = 4
"""Each of more than a page: so none fits into the last page of a file."""


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BACKOFF", Backoff(0.001, 0.001))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.getuid() != 0 or not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def new_ledger(folder: Path, file_bytes: int = 1 << 20) -> Ledger:
    return Ledger(folder, RunSettings(1, 1, "drop", 1, 1), now=lambda: 1000.0, file_bytes=file_bytes)


async def write_steps(ledger: Ledger, before: Callable[[int], None] = lambda step: None) -> None:
    ledger.begin(0, GateCheckpoint())
    for step in range(STEPS):
        before(step)
        rollout = TrainedRollout(f"r{step:05000}", f"e0-{step}", step, {step: 1}, 1, 1, 1.0)
        ledger.step(step + 1, [rollout], RolloutCounts())
        await ledger.written()
    ledger.close()


def content(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.glob("*.jsonl")))


@pytest.fixture
async def undisturbed(tmp_path: Path) -> bytes:
    """Return the ledger of the same steps on a disk with room."""
    await write_steps(new_ledger(tmp_path / "undisturbed"))
    return content(tmp_path / "undisturbed")


@pytest.mark.parametrize("file_bytes", [1 << 20, 6000])
async def test_on_a_full_disk_it_waits_and_loses_nothing(
    small_disk: Path, undisturbed: bytes, file_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = new_ledger(small_disk / "ledger", file_bytes)
    ballast = small_disk / "ballast"
    room_again: list[asyncio.Task[None]] = []
    loop, waits = asyncio.get_running_loop(), asyncio.Event()

    def hear(text: str, *args: object) -> None:
        if text.startswith("waiting to write"):
            loop.call_soon_threadsafe(waits.set)

    monkeypatch.setattr(logging.getLogger("asyncrl.comm.files"), "warning", hear)

    async def make_room() -> None:
        """In the manager's event loop, which goes on while the ledger waits."""
        await waits.wait()
        ballast.unlink()

    def fill(step: int) -> None:
        if step == 1:
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            room_again.append(asyncio.create_task(make_room()))

    await write_steps(ledger, fill)
    await room_again[0]
    assert content(small_disk / "ledger") == undisturbed


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
async def test_what_could_not_be_synced_is_written_again(
    tmp_path: Path, undisturbed: bytes, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed sync the kernel may have dropped what was written and call the next sync a success."""
    sync, left = os.fdatasync, [number] * 3

    def forgetful(descriptor: int) -> None:
        if left:
            place = os.fstat(descriptor).st_size
            os.pwrite(descriptor, bytes(min(place, 50)), place - min(place, 50))
            raise OSError(code := left.pop(), os.strerror(code))
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", forgetful)
    await write_steps(new_ledger(tmp_path / "ledger"))
    assert not left
    assert content(tmp_path / "ledger") == undisturbed


def test_a_disk_that_stays_full_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", 0.01)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdatasync", full)
    ledger = new_ledger(tmp_path / "ledger")
    with pytest.raises(OSError, match="No space"):
        ledger.begin(0, GateCheckpoint())
