"""Generate complete answers for a group, across weight updates, slow servers and server failures.

How it works
------------
`RolloutClient.generate` keeps one `PartialAnswer` per sample and repeats *rounds* until every one is complete. A round
asks the manager for a server and sends all incomplete answers there in one HTTP call. Each is sent as the prompt plus
the exact token ids that it has so far. The result is appended, with the version and log-probability of every token:

- `stop`: the sample is complete.
- `length`: complete if its budget is used up; else a chunk (`new_tokens_per_chunk`) is over, and the next round
  continues.
- `abort`: a weight update interrupted it, and the next round continues under the new weights, so its versions are
  mixed. Or this client aborted a round of a silent server.

An answer may take any time, but a server must not be silent. If it computes nothing for half of `request_timeout_s`,
the round is aborted (`GenerationServers`), and the next one continues from the tokens that there are. The abort itself
may be lost, and a proxy may end a call that takes long. So after a long round that failed the next one asks for half as
many tokens, and later rounds ask for more again.

Stop strings are searched here, in an answer's token ids after each round (`asyncrl.data.stop_strings`). So they
may span rounds, and both engines end at the same token. A server with a tokenizer receives them too, so that it
generates no more than needed. A server without one generates in rounds of `STOP_CHUNK` tokens, and the excess is cut
off.

SGLang serves common prefixes from its cache, but computes them once for every sample of a batch that finds the cache
empty: for a new prompt, and for all after a weight update. So if the common prefix is long, a round first sends it as a
request for one token, and then the samples (`asyncrl.rollout.generation_servers`).

An answer's random stream is `derive_seed(seed, i)` from the first token to the last. A later round skips the numbers
already used (`seed_offset`). So with unchanged weights an interrupted answer equals the uninterrupted one.

Failures
--------
- The server dies or hangs: the call fails after that silence, or as soon as the manager reports that the server left
  service. The round is repeated on another server; only its tokens are lost. Retries back off. After `max_failures`
  rounds in a row without a token the request fails.
- The server refuses the request (400): it would refuse it again, so the request fails at once.
- The caller is cancelled: the server is asked to abort, and the manager is informed that the request is over.

At most `max_concurrent` requests are in flight; further ones wait (back-pressure).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from asyncrl.api.generation import Completion, FinishReason, GenerationRequest, GenerationResult
from asyncrl.comm.http_client import HttpError, HttpRefused, HttpTimeout, HttpUnreachable
from asyncrl.comm.security import HttpSecurity
from asyncrl.comm.waits import HOLD_S, Backoff
from asyncrl.data.stop_strings import Decode, kept_tokens
from asyncrl.inference.client import GenerateItem, RoutingWanted, derive_seed, wire_rid
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.messages import Route, RouteRequest
from asyncrl.rollout.generation_servers import GenerationServers, ServerCapabilities, ServerLost
from asyncrl.rollout.user_code_pool.call_records import Activity, current_meter, timed

if TYPE_CHECKING:  # optional, see `asyncrl.runtime.plan`
    from asyncrl.rollout.policy_answers import PolicyAnswers

_log = logging.getLogger(__name__)

STOP_CHUNK = 64
"""Tokens of a round in which only the client searches for stop strings: the most tokens that are generated in vain."""
_BACKOFF = Backoff(0.1, 5.0)


@dataclass(slots=True)
class PartialAnswer:
    """One sample so far: three lists of one length."""

    seed: int | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    routing: list[NDArray[Any]] = field(default_factory=list)
    """Reported experts of the request's and the sample's tokens, in consecutive parts."""
    cached_tokens: int = 0
    """Tokens of the request that the first round did not compute. Later rounds also send generated tokens and do not
    count.
    """

    @property
    def routed(self) -> int:
        """Number of tokens whose experts are recorded."""
        return sum(map(len, self.routing))

    def extend(self, part: Completion, budget: int, stop: Sequence[str], decode: Decode | None) -> None:
        """Append the result of a round; `budget` is the sample's `max_new_tokens`, `stop` its stop strings."""
        if not self.token_ids:
            self.cached_tokens = part.cached_tokens
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.versions += part.versions
        kept = kept_tokens(self.token_ids, stop, decode) if stop and decode else None
        if kept is not None:
            for column in (self.token_ids, self.logprobs, self.versions):
                del column[kept:]
            self.finish = FinishReason.stop
        elif part.finish_reason == FinishReason.stop:
            self.finish = FinishReason.stop
        elif len(self.token_ids) >= budget:
            self.finish = FinishReason.length

    def extend_routing(self, rows: NDArray[Any] | None, start: int) -> None:
        """Record the expert choices of tokens that have none yet; `rows` are those of the tokens from position `start`
        on.

        A recorded choice is never overwritten. So each token keeps the experts of the round that sampled the next
        token, even if a later round recomputes it under newer weights.
        """
        if rows is not None:
            self.routing.append(rows[self.routed - start :])

    def completion(self, prompt_tokens: int) -> Completion:
        """Return the whole answer, once it is complete."""
        assert self.finish is not None, "a partial was left open"
        routing = None
        if self.routing:  # without the experts of tokens cut off after a stop string
            routing = np.concatenate(self.routing)[: prompt_tokens + len(self.token_ids) - 1]
        return Completion(
            self.token_ids, self.logprobs, self.versions, self.finish, routing, cached_tokens=self.cached_tokens
        )


@dataclass(slots=True)
class OpenRequest:
    """A request in progress: its id at the manager, its content, a partial answer per sample, and the largest number of
    tokens per round, now and without failures.
    """

    own_id: str
    request: GenerationRequest
    rollout_id: str | None
    min_version: int | None
    partials: list[PartialAnswer]
    round_tokens: int
    most_round_tokens: int
    scores: tuple[float, ...] = ()
    """Log-probabilities of the request's own tokens, if it asks for them, once they have arrived."""

    @property
    def open_partials(self) -> dict[int, PartialAnswer]:
        """The partials that are not complete yet, by sample."""
        if self.scores:
            return {}
        return {index: partial for index, partial in enumerate(self.partials) if partial.finish is None}

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(partial.token_ids) for partial in self.partials)

    def wanted(self, partial: PartialAnswer) -> int:
        """Return the number of tokens that the next round requests for `partial`."""
        return min(self.request.sampling.max_new_tokens - len(partial.token_ids), self.round_tokens)


class GenerationFailed(RuntimeError):
    """No server completed the request; the message has the last reason."""


class RolloutClient:
    """Generates the answers of groups. An asynchronous context manager; use it in one event loop.

    Args:
        can: what the servers can do; None: answer plain requests.
        security: token and certificate of the servers; None if the run has no secret.
        request_timeout_s: longest silence of a server; an answer may take longer.
        new_tokens_per_chunk: tokens to request per round; 0 for all.
        max_failures: failed rounds in a row, without a token in between, after which a request fails.
    """

    def __init__(
        self,
        manager: ManagerClient,
        can: ServerCapabilities | None = None,
        *,
        security: HttpSecurity | None,
        max_concurrent: int,
        request_timeout_s: float,
        new_tokens_per_chunk: int = 0,
        max_failures: int = 8,
    ) -> None:
        self._manager = manager
        self._servers = GenerationServers(can or ServerCapabilities(), security, manager, request_timeout_s)
        self._slots = asyncio.Semaphore(max_concurrent)
        self._timeout_s, self._answers = request_timeout_s, 0
        self._chunk = new_tokens_per_chunk
        self._max_failures = max_failures
        self._ids = (f"{uuid.uuid4().hex}-{number}" for number in itertools.count())

    async def __aenter__(self) -> Self:
        self._servers.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the pending aborts and reports, then close the connections."""
        await self._servers.close()

    async def generate(
        self,
        request: GenerationRequest,
        rollout_id: str | None = None,
        *,
        min_version: int | None = None,
        route: Route | None = None,
    ) -> GenerationResult:
        """Return `request.n` complete continuations, in the order of their seeds.

        Args:
            rollout_id: the rollout it belongs to; None for evaluation, which the staleness count does not include.
            min_version: oldest policy version of a token; a rollout's admission version is a bound in any case. Answers
                of a policy that is not trained (`request.policy`) may have any version.
            route: server that the manager chose at admission for the rollout's first request, which this is; if it has
                expired, the manager is asked for another.

        Raises:
            GenerationFailed: the request was refused, or failed too often.
            ManagerGone: the manager does not answer.
            ValueError: the servers cannot answer such a request (`ServerCapabilities.check`).
        """
        self._servers.can.check(request)
        if request.score_from is not None:
            request = replace(request, n=1, sampling=replace(request.sampling, max_new_tokens=1, stop=()))
        seed = request.sampling.seed
        partials = [PartialAnswer(None if seed is None else derive_seed(seed, index)) for index in range(request.n)]
        own_id = next(self._ids) if route is None or rollout_id is None else rollout_id
        most = self._chunk or request.sampling.max_new_tokens
        if request.sampling.stop and not self._servers.can.find_stops_of(request):
            most = min(most, STOP_CHUNK)
        work = OpenRequest(own_id, request, rollout_id, min_version, partials, most, most)
        with current_meter().limited():  # the wait for a slot is not the rollout's time: servers work on others
            await self._slots.acquire()
        try:
            await self._complete(work, route)
        finally:
            self._slots.release()
            self._manager.release(own_id)
        if request.score_from is not None:
            return GenerationResult(request.request_id, (), work.scores)
        prompt_tokens = len(request.input_ids)
        answers = (partial.completion(prompt_tokens) for partial in partials)
        if request.policy:
            answers = (replace(answer, policy=request.policy) for answer in answers)
        return GenerationResult(request.request_id, tuple(answers))

    def figures(self) -> dict[str, float]:
        """Figures for `observed/`: complete answers so far."""
        return {"answers_total": self._answers}

    async def _complete(self, work: OpenRequest, route: Route | None) -> None:
        """Run rounds until every answer is complete; the first goes to `route` if given."""
        failures = idle = 0
        name, now = work.request.request_id, asyncio.get_running_loop().time
        for attempt in itertools.count():
            if not work.open_partials:
                return
            if route is None or now() > route.expires_at:
                route = await self._route(work)
            server, route = route, None
            before, begun = work.tokens, now()
            try:
                open_before = len(work.open_partials)
                with current_meter().limited():  # by the server's silence
                    await self._round(work, attempt, server)
                self._answers += open_before - len(work.open_partials)
            except HttpError as error:
                failures += 1
                if not _may_pass(error):
                    raise GenerationFailed(f"request {name!r}: {error}") from error
                if failures >= self._max_failures:
                    raise GenerationFailed(
                        f"request {name!r} failed {failures} times in a row, last: {error}"
                    ) from error
                _log.warning("request %s: %s; trying again", name, error)
                if now() - begun >= self._timeout_s / 4:
                    work.round_tokens = max(1, max(map(work.wanted, work.open_partials.values())) // 2)
                await asyncio.sleep(_BACKOFF.delay(failures))
                continue
            failures = 0
            if work.tokens > before:
                idle = 0
                work.round_tokens = min(2 * work.round_tokens, work.most_round_tokens)
            else:
                idle += 1
            if idle > 1:  # repeatedly aborted in the queue: the servers are busy with other work
                await asyncio.sleep(_BACKOFF.delay(idle - 1))

    async def _route(self, work: OpenRequest) -> Route:
        """Get a server for the next round; wait until one is in service."""
        request = work.request
        partials = work.open_partials.values()
        wanted = RouteRequest(
            prompt_tokens=len(request.input_ids) + max(len(partial.token_ids) for partial in partials),
            max_new_tokens=max(map(work.wanted, partials)),
            n=len(partials),
            request_id=work.own_id,
            rollout_id=work.rollout_id,
            affinity=work.rollout_id or "",
            min_version=work.min_version,
            policy=request.policy,
        )
        while (route := await self._manager.schedule(wanted, HOLD_S)) is None:
            pass
        return route

    async def _round(self, work: OpenRequest, attempt: int, route: Route) -> None:
        """Send the incomplete answers to one server and append the result, or have it score the request's tokens."""
        request, open_partials, can = work.request, work.open_partials, self._servers.can
        if request.score_from is not None:
            work.scores = await self._servers.scores(route.url, request)
            return
        items = [
            GenerateItem(
                rid=wire_rid(work.own_id, index, attempt),
                input_ids=[*request.input_ids, *partial.token_ids],
                max_new_tokens=work.wanted(partial),
                seed=partial.seed,
                seed_offset=len(partial.token_ids),
                pictures=request.pictures,
            )
            for index, partial in open_partials.items()
        ]
        routing = None
        if can.routing is not None and work.rollout_id is not None and not request.policy:
            routing = RoutingWanted(can.routing, min(partial.routed for partial in open_partials.values()))
        prefix_rid = wire_rid(work.own_id, request.n, attempt)
        parts = await self._servers.answers(route.url, request, items, routing, prefix_rid)
        for partial, part in zip(open_partials.values(), parts, strict=True):
            if routing is not None:
                partial.extend_routing(part.routing, routing.start)
            partial.extend(part, request.sampling.max_new_tokens, request.sampling.stop, can.decode)


def _may_pass(error: HttpError) -> bool:
    """True if the same request may succeed later."""
    if isinstance(error, HttpRefused):
        return error.status >= 500
    return isinstance(error, HttpUnreachable | HttpTimeout | ServerLost)


@dataclass(slots=True)
class RolloutPolicy:
    """The run's own policy and the others of `policies`, for one rollout.

    Attributes:
        route: server chosen at admission; the first request goes there.
        answers: records the answers of each policy; None if the run has one policy.
    """

    client: RolloutClient
    rollout_id: str
    route: Route | None
    answers: PolicyAnswers | None = None
    failures: list[Exception] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Generate answers of the policy that `request` names."""
        route = None
        if not request.policy:
            route, self.route = self.route, None
        try:
            with timed(Activity.generate):
                result = await self.client.generate(request, self.rollout_id, route=route)
        except Exception as error:
            self.failures.append(error)
            raise
        if self.answers is not None:
            self.answers.add(request.policy, result.completions)
        return result
