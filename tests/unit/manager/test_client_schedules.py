"""Requests for a server that share one call: each caller gets an answer, whatever the manager replies."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from asyncrl.manager import messages as m
from asyncrl.manager.client import ManagerClient


def client(answer: Any) -> ManagerClient:
    """A client whose calls are answered by `answer`."""
    made: Any = ManagerClient.__new__(ManagerClient)  # only what `schedule` uses
    made._to_schedule, made._calls = [], set()
    made._worker, made._call = "rollout_worker/0", answer
    return cast(ManagerClient, made)


def request(name: str) -> m.RouteRequest:
    return m.RouteRequest(1, 1, 1, request_id=name, rollout_id=None)


async def test_a_placed_request_that_nobody_asked_for_leaves_the_others_their_answers() -> None:
    async def answer(*_: Any, **__: Any) -> m.ScheduleReply:
        return m.ScheduleReply({"unknown": m.Route("http://a", 1), "known": m.Route("http://b", 2)})

    asking = client(answer)
    async with asyncio.timeout(60):
        placed, other = await asyncio.gather(*(asking.schedule(request(name), 1.0) for name in ("known", "other")))
    assert placed is not None
    assert placed.url == "http://b"
    assert other is None


async def test_any_error_of_the_shared_call_is_that_of_every_caller() -> None:
    async def fail(*_: Any, **__: Any) -> m.ScheduleReply:
        raise KeyError("a defect")

    asking = client(fail)
    async with asyncio.timeout(60):
        errors = await asyncio.gather(*(asking.schedule(request(n), 1.0) for n in "ab"), return_exceptions=True)
    assert [type(error) for error in errors] == [KeyError, KeyError]
    with pytest.raises(KeyError):
        await client(fail).schedule(request("c"), 1.0)
