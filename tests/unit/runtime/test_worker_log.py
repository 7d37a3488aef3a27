"""What of the log of a worker process is kept."""

from __future__ import annotations

import logging
from pathlib import Path

import aiohttp
import pytest

from asyncrl.runtime.main import is_wanted

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
    assert is_wanted(logging.LogRecord(name, level, file, 1, "a line", None, None)) is wanted
