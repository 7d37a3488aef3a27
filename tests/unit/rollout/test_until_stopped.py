"""A RolloutWorker ends with a sentence if all rollouts fail in users' code, and with the error itself otherwise."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncrl.rollout.process import RolloutWorker
from asyncrl.rollout.user_code_pool.call_records import UserCodeError
from asyncrl.runtime.process.worker import CannotContinue


async def until_stopped(error: Exception) -> None:
    async def run() -> None:
        raise ExceptionGroup("unhandled errors in a TaskGroup", [error])

    async def follow(_: Any) -> None:
        await asyncio.Event().wait()

    worker = SimpleNamespace(stop=asyncio.Event(), _follow_pullers=follow)
    await RolloutWorker.until_stopped(cast(Any, worker), run(), cast(Any, None))


async def test_users_code_by_which_all_rollouts_fail_is_told_in_a_sentence() -> None:
    reported = r"^all rollouts fail, the last one as reward my.py:score raised ValueError: no column 'answer'$"
    with pytest.raises(CannotContinue, match=reported):
        await until_stopped(UserCodeError("reward my.py:score", "raised ValueError: no column 'answer'"))


async def test_any_other_failure_is_raised_as_it_is() -> None:
    with pytest.raises(ExceptionGroup):
        await until_stopped(KeyError("a defect"))
