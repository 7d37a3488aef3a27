"""The part of a worker process's log that is kept."""

from __future__ import annotations

import logging
import runpy
from pathlib import Path

import aiohttp
import pytest
import uvloop

from asyncrl.comm.waits import REPEAT_S
from asyncrl.runtime.main import MOST, MOST_ALIKE, WorkerLogFilter

SITE = Path(aiohttp.__file__).parent.parent


@pytest.mark.parametrize(
    ("name", "file", "level", "wanted"),
    [
        ("httpx", aiohttp.__file__, logging.INFO, False),
        ("httpx", aiohttp.__file__, logging.WARNING, True),
        ("asyncio", logging.__file__, logging.INFO, False),
        ("my_agent", "/home/me/my_agent.py", logging.INFO, True),
        (
            "asyncrl.rollout.loop",
            f"{SITE}/asyncrl/loop.py",
            logging.INFO,
            True,
        ),
    ],
)
def test_a_log_has_the_lines_of_the_user_and_of_asyncrl_and_the_warnings_of_libraries(
    name: str, file: str, level: int, wanted: bool
) -> None:
    assert WorkerLogFilter().filter(logging.LogRecord(name, level, file, 1, "a line", None, None)) is wanted


BROKEN = "Fatal error on SSL protocol\nprotocol: <uvloop.loop.SSLProtocol object at {}>\ntransport: <TCPTransport>"
"""As uvloop has it: all in the message."""


def written(log: WorkerLogFilter, message: str, times: int, name: str = "asyncio") -> int:
    """Log `times` messages, each with another number in it, and return how many of them are written."""
    of_caller = "/home/me/my_agent.py"
    records = [
        logging.LogRecord(name, logging.ERROR, of_caller, 1, message.format(number), None, None)
        for number in range(times)
    ]
    return sum(map(log.filter, records))


def test_no_peer_fills_the_log_by_connections_that_break(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = WorkerLogFilter(lambda: now)
    assert written(log, BROKEN, 2000) == MOST_ALIKE
    assert written(log, "Task was destroyed", 1) == 1
    assert caplog.messages == [
        "messages as 'asyncio: Fatal error on SSL protocol' are left out for up to 60 s: there are too many"
    ]
    now = REPEAT_S + 1
    assert written(log, BROKEN, 2000) == MOST_ALIKE
    assert caplog.messages[1] == f"{2000 - MOST_ALIKE} messages of libraries were left out of this log"


def test_messages_that_differ_have_a_limit_too() -> None:
    log = WorkerLogFilter(lambda: 0.0)
    assert written(log, "{} is no HTTP method", 2000) == MOST


def test_what_asyncrl_and_the_user_log_has_no_limit() -> None:
    log = WorkerLogFilter(lambda: 0.0)
    assert written(log, "a line", 2000, "my_agent") == written(log, "a line", 2000, "asyncrl.rollout") == 2000


def test_connections_that_break_beneath_uvloop_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever file its messages seem to come from."""
    caplog.handler.addFilter(WorkerLogFilter())
    loop = uvloop.new_event_loop()
    for _ in range(50):
        loop.call_exception_handler({"message": "Fatal error on SSL protocol", "exception": RuntimeError("closed")})
    loop.close()
    assert sum("Fatal error" in record.message for record in caplog.records if record.name == "asyncio") == MOST_ALIKE


def test_what_the_filter_itself_says_is_never_a_librarys_also_where_asyncrl_is_installed_among_them() -> None:
    """The program's own name is `__main__`; the filter would filter its own lines, and those lines' lines."""
    assert runpy.run_module("asyncrl.runtime.main", run_name="a program")["_log"].name.startswith("asyncrl.")
