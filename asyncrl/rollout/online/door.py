"""The door of a RolloutWorker, where programs outside the run open sessions, and what they say of them.

    POST   <door>/v1/sessions    with the run's key: waits until the gate admits a rollout, for `wait_s` at most; then
                                 429. Returns a session for each episode of a group
    ...    <base_url>/...        with the session's key: the policy, as for the run's own agents
    POST   <base_url>/reward     {"reward": 1.0, "metrics": {"tests": 3}}: ends the session
    DELETE <base_url>            ends it without a reward; it is not trained

Door and policy have one address, the endpoint's (`asyncrl.inference.openai.endpoint`), which refuses and counts here as
there. What a session may do is decided by `asyncrl.rollout.online.sessions`; this module has the calls and the clock.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
from aiohttp import web

from asyncrl.api import Prompt, Sample
from asyncrl.api.agent import play_with_retries
from asyncrl.api.trajectory import MAX_REWARD
from asyncrl.chat.episode_client import EpisodeClient
from asyncrl.comm.ended_rollouts import DropReason
from asyncrl.comm.http_client import HttpError
from asyncrl.comm.http_server import json_response
from asyncrl.comm.waits import ASK_S, LOOK_S, Notifier, RunningClock
from asyncrl.inference.openai.api_call import ApiError, SupportedParameters, invalid
from asyncrl.inference.openai.endpoint import Endpoint, Session, key_of, wrong_key
from asyncrl.manager.client import ManagerClient, ManagerGone
from asyncrl.manager.messages import GrantedRollout, StatusRequest, WaitExpiringRequest
from asyncrl.rollout.episode import Group, RolloutDropped
from asyncrl.rollout.online.sessions import LOST, End, OnlineSession, Sessions
from asyncrl.rollout.rollout_client import RolloutPolicy
from asyncrl.rollout.user_code_pool.call_records import named_failure

_log = logging.getLogger(__name__)
LOOKS: Final = 4
"""Looks at what keeps a step waiting, within `hold_s`."""
_WHY: Final[Mapping[End, str]] = {
    End.rewarded: "its reward has been reported",
    End.rejected: "it was deleted",
    End.silent: "it had no call for lease_s",
    End.over_age: "a train step had waited for it for hold_s",
    End.client_left: "its client was gone before it had the address",
    End.closed: "its time, rollout.rollout_timeout_s, was over, or the run ended",
}


class _Wanted(msgspec.Struct):
    """The parameters of a new session: none."""


class _Rewarded(msgspec.Struct):
    reward: float
    metrics: dict[str, float] = {}


_Opened: TypeAlias = tuple[OnlineSession, EpisodeClient, Session]
"""A session as its client sees it, the records of its answers, and its address."""
_OPEN = SupportedParameters(_Wanted)
_REWARD = SupportedParameters(_Rewarded)


class Door(Endpoint):
    """The endpoint of a RolloutWorker whose sessions programs outside the run open.

    Args:
        sessions: what becomes of them.
        key: opens sessions.
        batch_size: rollouts of a train step, which may wait for a session; 0 if none does (`on_stale`).
        clock: seconds; those in which the process did not run do not count.
    """

    def __init__(
        self,
        *args: Any,
        sessions: Sessions,
        key: str,
        batch_size: int,
        clock: RunningClock | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.lost: Counter[End] = Counter()
        """Sessions that ended without a reward, by how."""
        self._online, self._run_key, self._batch_size = sessions, key, batch_size
        self._clock = clock or RunningClock()
        self._numbers = itertools.count()
        self._clients: dict[int, asyncio.Future[list[dict[str, Any]]]] = {}
        self._versions: dict[str, int] = {}
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._asked = Notifier()

    def figures(self) -> dict[str, float]:
        """Figures for `observed/`: open sessions, waiting clients, sessions that were lost, and calls refused."""
        return {
            "online_sessions": float(len(self._online)),
            "online_clients": float(self._online.waiting),
            "online_lost_total": float(self.lost.total()),
            "online_refused_total": float(self.refused.total()),
        }

    # The loop's side.

    async def clients(self) -> tuple[int, float]:
        """Wait until clients wait for a session; return their number, and for how many seconds the first still does."""
        while not self._online.waiting:
            await self._asked.next()
        return self._online.waiting, self._online.patience_s(self._clock())

    def admit(self, granted: Iterable[GrantedRollout]) -> None:
        """Give admitted rollouts to the clients that have waited longest."""
        for each in granted:
            self._online.admit(each.rollout_id)
            self._versions[each.rollout_id] = each.version

    async def watch(self, gate: ManagerClient) -> None:
        """End sessions whose lease has run out, and those that keep a step waiting. Runs until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._clock.keep())
            tasks.create_task(self._end_silent())
            if self._batch_size:
                tasks.create_task(self._end_over_age(gate))

    async def play(self, prompt: Prompt, group: Group) -> list[Sample]:
        """Have the client play the group for which a rollout was admitted; return the samples of rewarded sessions.

        Raises:
            RolloutDropped: the client was gone.
            Exception: too few episodes are left.
        """
        assert isinstance(group.policy, RolloutPolicy), "an online session has a rollout of the run"
        rollout_id = group.policy.rollout_id
        try:
            if (client := self._online.client_of(rollout_id)) is None:
                raise RolloutDropped(DropReason.client_left)
            members = [prompt.of_member(number) for number in range(prompt.group_size)]
            opened = [await self._open_for(rollout_id, own, group) for own in members]
            self._give(client, opened)
            async with asyncio.TaskGroup() as tasks:
                plays = [partial(self._played, group, *each) for each in opened]
                played = [
                    tasks.create_task(play_with_retries(own, play, group))
                    for own, play in zip(members, plays, strict=True)
                ]
            return [sample for each in played for sample in each.result()]
        finally:
            self._versions.pop(rollout_id, None)
            self._over(self._online.close(rollout_id))

    async def _open_for(self, rollout_id: str, own: Prompt, group: Group) -> _Opened:
        episode: Any = group.episode(own)
        served: Session = await episode.endpoint()
        session = self._online.open(served.id, rollout_id, served.api_key, self._clock())
        self._ends[session.session_id] = asyncio.get_running_loop().create_future()
        return session, episode, served

    def _described(self, session: OnlineSession, served: Session) -> dict[str, Any]:
        return {
            "base_url": served.base_url,
            "root_url": served.root_url,
            "api_key": served.api_key,
            "version": self._versions[session.rollout_id],
            "lease_s": self._online.lease_s,
        }

    def _give(self, client: int, opened: Sequence[_Opened]) -> None:
        """Give the client its sessions; they end if it has left."""
        waiting = self._clients.get(client)
        if waiting is not None and not waiting.done():
            waiting.set_result([self._described(session, served) for session, _, served in opened])
        else:
            for session, _, _ in opened:
                self._online.end(session, End.client_left)

    async def _played(
        self, group: Group, session: OnlineSession, episode: EpisodeClient, served: Session, own: Prompt
    ) -> Sequence[Sample]:
        """Return the samples of a session that its client has rewarded; none of one that ended otherwise, or failed: it
        cannot be played again.
        """
        try:
            if session.end is None:
                await self._ends[session.session_id]
        finally:
            self._online.end(session, End.closed)
            self._ends.pop(session.session_id, None)
            served.close()
        if (end := session.end) is End.rewarded:
            try:
                samples = episode.all_samples(session.reward)
                member = own.member
                return [replace(each, episode=member, metrics={**each.metrics, **session.metrics}) for each in samples]
            except Exception as error:
                name = named_failure(error, group.agent)
                _log.warning("episode %d of prompt %s is lost: %s", own.member, own.prompt_id, name, exc_info=error)
                group.lose(name, error)
                return ()
        if end is not None and (reason := LOST.get(end)) is not None:
            self.lost[end] += 1
            _log.info("episode %d of prompt %s is lost with its session: %s", own.member, own.prompt_id, _WHY[end])
            group.lose(f"online session {end}", RolloutDropped(reason))
        return ()

    def _over(self, ended: Iterable[OnlineSession]) -> None:
        """Go on with the episodes of sessions that have ended."""
        for session in ended:
            end = self._ends.get(session.session_id)
            if end is not None and not end.done():
                end.set_result(None)

    async def _end_silent(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_S, self._online.lease_s / LOOKS))
            self._over(self._online.end_silent(self._clock()))

    async def _end_over_age(self, gate: ManagerClient) -> None:
        while True:
            await asyncio.sleep(min(ASK_S, self._online.hold_s / LOOKS))
            holding: Sequence[str] = ()
            try:
                if len(self._online):
                    holding = await self._holding(gate)
            except (HttpError, ManagerGone) as error:
                _log.info("it is not known which sessions keep a step waiting: %s", error)
            self._over(self._online.end_over_age(holding, self._clock()))

    async def _holding(self, gate: ManagerClient) -> Sequence[str]:
        """Return the rollouts that keep a step waiting, which has a whole batch (`MasterWorker`, `on_stale=wait`)."""
        status = await gate.call(StatusRequest())
        if not status.rebuilt or status.gate.counts.finished_untrained < self._batch_size:
            return ()
        return (await gate.call(WaitExpiringRequest(status.gate.trained_version, 0.0))).running

    # The clients' side.

    async def _answer(self, request: web.BaseRequest, session_id: str, path: str) -> web.StreamResponse:
        if not session_id and path == "/sessions":
            return await self._open_sessions(request)
        session = self._online.get(session_id)
        if session is None:
            return await super()._answer(request, session_id, path)
        rejects = request.method == "DELETE" and path in ("/", "/v1")
        if not hmac.compare_digest(key_of(request).encode(errors="surrogateescape"), session.key.encode()):
            if session.end is None and path != "/reward" and not rejects:
                return await super()._answer(request, session_id, path)
            raise wrong_key()
        if path == "/reward":
            return await self._reward(request, session)
        if rejects:
            return self._reject(session)
        if session.end is not None:
            raise _gone(session.end)
        with self._call_of(session):
            try:
                return await super()._answer(request, session_id, path)
            except ApiError as error:
                if error.status == 404 and session.end is not None:  # it ended meanwhile
                    raise _gone(session.end) from error
                raise

    async def _open_sessions(self, request: web.BaseRequest) -> web.StreamResponse:
        if not hmac.compare_digest(key_of(request).encode(errors="surrogateescape"), self._run_key.encode()):
            raise ApiError(401, "wrong key: use the one in the run's folder, online/key", code="wrong_run_key")
        _method(request, "POST")
        _OPEN.read(await self._body(request) or b"{}")
        client = next(self._numbers)
        waiting = self._clients[client] = asyncio.get_running_loop().create_future()
        self._online.ask(client, self._clock())
        self._asked.notify()
        described: list[dict[str, Any]] | None = None
        try:
            await asyncio.wait({waiting}, timeout=self._online.wait_s)
            described = waiting.result() if waiting.done() else None
        finally:
            del self._clients[client]
            if described is None:
                self._over(self._online.leave(client))
        if described is None:
            self.refused["no_room"] += 1
            why = f"no session within {self._online.wait_s:g} s: the gate has no room, or the worker no free slot"
            answer = json_response(ApiError(429, why, code="no_room").openai(), 429)
            answer.headers["Retry-After"] = "1"
            return answer
        return json_response({"sessions": described})

    async def _reward(self, request: web.BaseRequest, session: OnlineSession) -> web.StreamResponse:
        _method(request, "POST")
        given = _REWARD.read(await self._body(request))
        for name, value in (("reward", given.reward), *given.metrics.items()):
            if not math.isfinite(value) or abs(value) > MAX_REWARD:
                raise invalid(name, f"{value}: a finite number of at most {MAX_REWARD:g}")
        if session.end not in (None, End.rewarded):
            raise _gone(session.end)
        served = self._sessions.get(session.session_id)
        if session.end is None and served is not None and not _was_asked(served):
            raise ApiError(409, "the policy has given no answer here that could be rewarded", code="nothing_to_reward")
        if not self._online.reward(session, given.reward, given.metrics):
            raise ApiError(409, f"another reward was reported before: {session.reward}", code="other_reward")
        self._over([session])
        return json_response({"reward": session.reward})

    def _reject(self, session: OnlineSession) -> web.StreamResponse:
        if session.end not in (None, End.rejected):
            raise _gone(session.end)
        self._online.end(session, End.rejected)
        self._over([session])
        return json_response({"rejected": True})

    @contextmanager
    def _call_of(self, session: OnlineSession) -> Iterator[None]:
        self._online.begin_call(session)
        try:
            yield
        finally:
            self._online.end_call(session, self._clock())


def _was_asked(served: Session) -> bool:
    """True if the policy has given an answer, or failed to, which loses the episode."""
    client: Any = served.client
    try:
        return bool(client.all_samples())
    except Exception:  # of a call, maybe in a side conversation; `_played` meets it again
        return True


def _gone(end: End | None) -> ApiError:
    assert end is not None
    return ApiError(410, f"the session is over: {_WHY[end]}", code=f"session_{end}")


def _method(request: web.BaseRequest, method: str) -> None:
    if request.method != method:
        raise ApiError(405, f"this path takes {method}", code="unknown_path")
