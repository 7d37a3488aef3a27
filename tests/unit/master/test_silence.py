"""Once a stop is asked for, ranks that do not answer are named; until then, and while all answer, nobody is hurried."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import pytest

from asyncrl.comm.request_reply import PeerGone, RequestClient, RequestTimeout
from asyncrl.master import peers
from asyncrl.master.peers import RanksUnresponsive, await_while_responsive
from asyncrl.trainer.messages import AskPulse, RankPulse


class Rank:
    """Answers as it is told, the last answer again and again."""

    def __init__(self, *answers: Exception | None) -> None:
        self.asked = 0
        self.asked_often = asyncio.Event()
        self._answers = answers

    async def call(self, request: AskPulse, *, timeout_s: float) -> RankPulse:
        answer = self._answers[min(self.asked, len(self._answers) - 1)]
        self.asked += 1
        if self.asked == 5:
            self.asked_often.set()
        if answer is not None:
            raise answer
        return RankPulse()


SILENT, GONE = RequestTimeout("no answer"), PeerGone("the connection broke")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LOOK_S", 0.0)


async def watched(running: Any, ranks: Sequence[Rank], stop: asyncio.Event) -> None:
    async with asyncio.timeout(300):
        await await_while_responsive(running, cast(Sequence[RequestClient], ranks), stop, 7.0)


async def forever() -> None:
    await asyncio.Event().wait()


async def test_nobody_is_asked_while_the_run_goes_on() -> None:
    rank = Rank(SILENT)
    await watched(asyncio.sleep(0.01), [rank], asyncio.Event())
    assert rank.asked == 0


async def test_those_who_do_not_answer_after_a_stop_are_named_and_what_waits_for_them_is_ended() -> None:
    stop, ended = asyncio.Event(), []

    async def running() -> None:
        stop.set()
        try:
            await forever()
        finally:
            ended.append("cancelled")

    with pytest.raises(RanksUnresponsive, match="from model_worker/1, model_worker/3 for 7 s"):
        await watched(running(), [Rank(None), Rank(SILENT), Rank(None), Rank(SILENT)], stop)
    assert ended == ["cancelled"]


async def test_a_stop_is_waited_for_while_all_answer() -> None:
    stop = asyncio.Event()
    stop.set()
    rank = Rank(None)

    async def running() -> None:
        await rank.asked_often.wait()

    await watched(running(), [rank], stop)


async def test_a_connection_that_is_made_again_is_no_silence_and_one_that_is_not_is() -> None:
    stop = asyncio.Event()
    stop.set()
    back = Rank(GONE, None, GONE, None)
    with pytest.raises(RanksUnresponsive, match="from model_worker/1 for"):
        await watched(forever(), [back, Rank(None, None, None, GONE)], stop)
    assert back.asked == 5


async def test_what_the_run_fails_with_is_told_as_it_is() -> None:
    stop = asyncio.Event()
    stop.set()

    async def running() -> None:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        await watched(running(), [Rank(None)], stop)


async def test_what_ends_as_a_rank_falls_silent_has_ended() -> None:
    async def silent() -> NoReturn:
        raise RanksUnresponsive("no answer")

    async def ended() -> int:
        return 3

    assert await peers._unless(silent(), ended()) == 3
