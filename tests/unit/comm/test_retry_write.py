"""A disk that takes nothing for a while holds writing up, and is told; another failure is raised at once."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable

import pytest

import asyncrl.comm.files as writing
from asyncrl.comm.files import no_retry, retry_write, retry_write_blocking

LOG = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_BACKOFF", writing.Backoff(0.001, 0.001))


def failing(times: int, number: int) -> Callable[[], str]:
    left = [number] * times

    def write() -> str:
        if left:
            raise OSError(code := left.pop(), os.strerror(code))
        return "written"

    return write


def write_async(write: Callable[[], str]) -> str:
    return asyncio.run(retry_write(write, "the file", LOG))


def write_blocking(write: Callable[[], str]) -> str:
    return retry_write_blocking(write, "the file", LOG)


@pytest.mark.parametrize("call", [write_async, write_blocking])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_it_is_written_in_the_end_and_said_once(
    call: Callable[[Callable[[], str]], str], number: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert call(failing(5, number)) == "written"
    assert [record.message.partition(":")[0].partition(" after")[0] for record in caplog.records] == [
        "waiting to write the file",
        "wrote the file",
    ]


@pytest.mark.parametrize("call", [write_async, write_blocking])
def test_what_waiting_does_not_mend_is_raised(call: Callable[[Callable[[], str]], str]) -> None:
    with pytest.raises(PermissionError):
        call(failing(1, errno.EACCES))


def test_what_has_another_place_to_go_is_not_waited_for() -> None:
    with no_retry(), pytest.raises(OSError, match="No space"):
        write_blocking(failing(1, errno.ENOSPC))
    with no_retry(False):
        assert write_blocking(failing(1, errno.ENOSPC)) == "written"


def test_a_disk_that_stays_full_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PATIENCE_S", 0.01)
    with pytest.raises(OSError, match="No space"):
        write_blocking(failing(10_000, errno.ENOSPC))
