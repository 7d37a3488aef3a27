"""Whole answers from servers that are interrupted, updated, killed or hang."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from asyncrl.api.generation import Completion, FinishReason, GenerationRequest, SamplingParams
from asyncrl.inference.client import GenerateItem, GenerationServerClient
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.server import serve
from asyncrl.inference.random_streams import derive_seed
from asyncrl.manager.messages import LostServersReply, Route, RouteRequest
from asyncrl.models.model_config import RoutingShape
from asyncrl.models.routing import Routers
from asyncrl.rollout import generation_servers
from asyncrl.rollout.generation_servers import GenerationServers, ServerCapabilities, prefix_request
from asyncrl.rollout.rollout_client import STOP_CHUNK, GenerationFailed, PartialAnswer, RolloutClient

LIMIT_S = 600.0
"""Time limit of a request in seconds: longer than any test, unless the test sets the clock forward."""


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborts that nobody waits for arrive, however slow the machine is."""
    monkeypatch.setattr(GenerationServers._abort, "__defaults__", (LIMIT_S,))


class FixedManager:
    """Routes to the servers in turn; remembers what it was asked."""

    def __init__(self, *servers: Any) -> None:
        self.servers = list(servers)
        self.scheduled: list[RouteRequest] = []
        self.released: list[str] = []
        self.losses: asyncio.Queue[str] = asyncio.Queue()

    async def schedule(self, request: RouteRequest, timeout_s: float) -> Route | None:
        self.scheduled.append(request)
        server = self.servers[(len(self.scheduled) - 1) % len(self.servers)]
        return Route(server.url, int(server.version))

    def release(self, request_id: str) -> None:
        self.released.append(request_id)

    async def lost_servers(self, after: int, timeout_s: float) -> LostServersReply:
        if after < 0:
            return LostServersReply(0, [])
        return LostServersReply(after + 1, [await self.losses.get()])


@asynccontextmanager
async def client_of(manager: FixedManager, **settings: Any) -> AsyncIterator[RolloutClient]:
    """A client; `settings` are its own and those of `ServerCapabilities`."""
    named = {field.name for field in fields(ServerCapabilities)} & settings.keys()
    can = ServerCapabilities(**{name: settings.pop(name) for name in named})
    settings = {"security": None, "max_concurrent": 8, "request_timeout_s": LIMIT_S, **settings}
    async with RolloutClient(manager, can, **settings) as client:
        yield client


def request_of(n: int = 2, tokens: int = 6, stop: tuple[int, ...] = (), name: str = "q") -> GenerationRequest:
    return GenerationRequest(name, (1, 2, 3), n, SamplingParams(max_new_tokens=tokens, stop_token_ids=stop, seed=11))


async def answers(server: Any, request: GenerationRequest) -> list[list[int]]:
    """Return the answer of an uninterrupted server to `request`."""
    async with client_of(FixedManager(server)) as client:
        result = await client.generate(request)
    return [completion.token_ids for completion in result.completions]


async def test_a_group_is_one_call_with_a_stream_for_each_sample(start_fake_server: Any) -> None:
    server = await start_fake_server()
    manager = FixedManager(server)
    async with client_of(manager) as client:
        result = await client.generate(request_of(n=3), "r1", min_version=2)
    assert result.request_id == "q"
    assert len(server.requests) == 1
    seeds = [params["sampling_seed"] for params in server.requests[0]["sampling_params"]]
    assert seeds == [derive_seed(11, index) for index in range(3)]
    assert len({tuple(completion.token_ids) for completion in result.completions}) == 3
    assert all(completion.finish_reason == "length" for completion in result.completions)
    (wanted,) = manager.scheduled
    assert (wanted.rollout_id, wanted.affinity, wanted.min_version) == ("r1", "r1", 2)
    assert (wanted.n, wanted.prompt_tokens, wanted.max_new_tokens) == (3, 3, 6)
    assert manager.released == [wanted.request_id]


async def test_an_interrupted_group_goes_on_with_the_same_tokens_and_mixed_versions(start_fake_server: Any) -> None:
    server = await start_fake_server()
    expected = await answers(server, request_of())
    server.requests.clear()
    server.generated_tokens, server.hold_after = 0, 2
    manager = FixedManager(server)
    async with client_of(manager) as client:
        call = asyncio.create_task(client.generate(request_of()))
        await server.until(lambda: server.generated_tokens == 4)
        await server.interrupt()
        await server.until(lambda: not server.running)
        await server.resume("1")
        result = await call
    assert [completion.token_ids for completion in result.completions] == expected
    assert [completion.versions for completion in result.completions] == [[0, 0, 1, 1, 1, 1]] * 2
    assert all(completion.finish_reason == "length" for completion in result.completions)
    again = server.requests[1]
    assert again["input_ids"] == [[1, 2, 3, *tokens[:2]] for tokens in expected]
    assert [params["custom_params"] for params in again["sampling_params"]] == [{"seed_offset": 2}] * 2
    assert [params["max_new_tokens"] for params in again["sampling_params"]] == [4, 4]
    assert not set(again["rid"]) & set(server.requests[0]["rid"])
    assert manager.scheduled[0].request_id == manager.scheduled[1].request_id


@pytest.fixture
def forks_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 6 tokens on, which is 2 prompts of `request_of`."""
    monkeypatch.setattr(generation_servers, "FORK_SAVES", 6)


async def test_what_a_group_shares_is_sent_before_it_where_servers_cache(
    start_fake_server: Any, forks_pay: None
) -> None:
    server = await start_fake_server()
    expected = await answers(server, request_of(n=3))
    server.requests.clear()
    server.generated_tokens, server.hold_after = 0, 2
    manager = FixedManager(server)
    async with client_of(manager, cache=True) as client:
        call = asyncio.create_task(client.generate(request_of(n=3)))
        await server.until(lambda: server.generated_tokens == 1 + 6)
        await server.interrupt()
        await server.until(lambda: not server.running)
        await server.resume("1")
        result = await call
    assert [completion.token_ids for completion in result.completions] == expected
    first, group, again, rest = server.requests
    assert first["input_ids"] == again["input_ids"] == [[1, 2, 3]]
    assert [params["max_new_tokens"] for body in (first, again) for params in body["sampling_params"]] == [1, 1]
    assert group["input_ids"] == [[1, 2, 3]] * 3
    assert rest["input_ids"] == [[1, 2, 3, *tokens[:2]] for tokens in expected]
    rids = [rid for body in server.requests for rid in body["rid"]]
    assert len(set(rids)) == len(rids) == 8
    assert len(manager.scheduled) == 2, "the samples are routed with what they share"


def test_what_samples_have_answered_alike_is_shared_too(forks_pay: None) -> None:
    items = [GenerateItem(str(i), tokens, 9) for i, tokens in enumerate([(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3)])]
    assert prefix_request(items, "f") == GenerateItem("f", [1, 2, 3], 1)


@pytest.mark.parametrize(("n", "caches"), [(1, True), (2, True), (3, False)])
async def test_nothing_is_sent_before_a_group_where_it_does_not_pay(
    start_fake_server: Any, forks_pay: None, n: int, caches: bool
) -> None:
    server = await start_fake_server()
    async with client_of(FixedManager(server), cache=caches) as client:
        await client.generate(request_of(n=n))
    assert [len(body["rid"]) for body in server.requests] == [n]


async def test_what_is_sent_before_a_group_ends_with_it(start_fake_server: Any, forks_pay: None) -> None:
    server = await start_fake_server()
    server.hold_after = 0
    async with client_of(FixedManager(server), cache=True) as client:
        call = asyncio.create_task(client.generate(request_of(n=3)))
        await server.until(lambda: len(server.running) == 1)
        (rid,) = server.running
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await server.until(lambda: server.calls.count("abort_request") == 4 and not server.running)
    assert server.requests[0]["rid"] == [rid]


async def test_a_route_that_came_with_the_admission_is_taken_once(start_fake_server: Any) -> None:
    server, other = await start_fake_server(), await start_fake_server()
    server.hold_after = 2
    manager = FixedManager(other)
    async with client_of(manager) as client:
        call = asyncio.create_task(client.generate(request_of(), "r1", route=Route(server.url, 0)))
        await server.until(lambda: server.generated_tokens == 4)
        assert manager.scheduled == []
        await server.interrupt()
        await call
    assert [(wanted.request_id, wanted.rollout_id) for wanted in manager.scheduled] == [("r1", "r1")]
    assert len(other.requests) == 1
    assert manager.released == ["r1"]


async def test_a_route_that_has_expired_is_asked_for_again_under_the_same_id(start_fake_server: Any) -> None:
    server = await start_fake_server()
    manager = FixedManager(server)
    late = Route("http://127.0.0.1:1", 0, expires_at=asyncio.get_running_loop().time() - 0.1)
    async with client_of(manager) as client:
        await client.generate(request_of(), "r1", route=late)
    assert len(server.requests) == 1
    assert [wanted.request_id for wanted in manager.scheduled] == ["r1"]


async def test_a_route_to_a_server_that_has_gone_is_given_up(start_fake_server: Any) -> None:
    server = await start_fake_server()
    manager = FixedManager(server)
    async with client_of(manager) as client:
        result = await client.generate(request_of(), "r1", route=Route("http://127.0.0.1:1", 0))
    assert len(manager.scheduled) == 1
    assert len(result.completions) == 2


async def test_a_sample_that_stopped_before_the_interruption_is_not_sent_again(start_fake_server: Any) -> None:
    server = await start_fake_server()
    expected = await answers(server, request_of())
    stop = next(token for token in expected[0][:2] if token not in expected[1])
    server.requests.clear()
    server.generated_tokens, server.hold_after = 0, 3
    async with client_of(FixedManager(server)) as client:
        call = asyncio.create_task(client.generate(request_of(stop=(stop,))))
        await server.until(lambda: len(server.running) == 1 and server.generated_tokens >= 4)
        await server.abort_running()
        await server.release()
        result = await call
    cut = expected[0][: expected[0].index(stop) + 1]
    assert [completion.token_ids for completion in result.completions] == [cut, expected[1]]
    assert [completion.finish_reason for completion in result.completions] == ["stop", "length"]
    assert len(server.requests[1]["input_ids"]) == 1


async def test_a_stop_token_after_the_interruption_ends_the_sample(start_fake_server: Any) -> None:
    server = await start_fake_server()
    (expected,) = await answers(server, request_of(n=1))
    stop = expected[4]
    assert stop not in expected[:4]
    server.generated_tokens, server.hold_after = 0, 2
    async with client_of(FixedManager(server)) as client:
        call = asyncio.create_task(client.generate(request_of(n=1, stop=(stop,))))
        await server.until(lambda: server.generated_tokens == 2)
        await server.abort_running()
        await server.release()
        (completion,) = (await call).completions
    assert completion.token_ids == expected[:5]
    assert completion.finish_reason == "stop"


def letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(33 + token) for token in token_ids)


async def test_a_stop_string_is_found_across_rounds_and_interruptions(start_fake_server: Any) -> None:
    """The same token ends the answer however it is cut into rounds, and whoever looks."""
    server = await start_fake_server()
    (expected,) = await answers(server, request_of(n=1, tokens=20))
    text = letters(expected)
    stop = text[7:10]
    assert text.find(stop) == 7
    request = request_of(n=1, tokens=20)
    request = replace(request, sampling=replace(request.sampling, stop=("not this", stop)))
    for settings in ({}, {"new_tokens_per_chunk": 1}, {"new_tokens_per_chunk": 8}, {"find_stops": True}):
        server.requests.clear()
        async with client_of(FixedManager(server), decode=letters, **settings) as client:
            (completion,) = (await client.generate(request)).completions
        assert completion.token_ids == expected[:10]
        assert len(completion.logprobs) == len(completion.versions) == 10
        assert completion.finish_reason == "stop"
        reported = [params.get("stop") for sent in server.requests for params in sent["sampling_params"]]
        assert set(map(str, reported)) == {str(["not this", stop] if settings.get("find_stops") else None)}
    server.generated_tokens, server.hold_after = 0, 9  # within the string
    async with client_of(FixedManager(server), decode=letters) as client:
        call = asyncio.create_task(client.generate(request))
        await server.until(lambda: server.generated_tokens == 9)
        await server.abort_running()
        await server.release()
        (completion,) = (await call).completions
    assert (completion.token_ids, completion.finish_reason) == (expected[:10], "stop")


async def test_where_a_server_ends_at_a_stop_string_the_client_looks_itself(start_fake_server: Any) -> None:
    """A server that ends too early, by another rule, is asked on; one that cannot look generates little in vain."""
    server = await start_fake_server()
    (expected,) = await answers(server, request_of(n=1, tokens=200))
    text = letters(expected)
    server.requests.clear()
    server.early_stop_after = 5
    request = request_of(n=1, tokens=200)
    stop = text[20:23]
    request = replace(request, sampling=replace(request.sampling, stop=(stop,)))
    kept = text.find(stop) + 3
    async with client_of(FixedManager(server), decode=letters, find_stops=True) as client:
        (completion,) = (await client.generate(request)).completions
    assert (completion.token_ids, completion.finish_reason) == (expected[:kept], "stop")
    assert len(server.requests) == -(-kept // 5)
    server.early_stop_after = None
    server.requests.clear()
    async with client_of(FixedManager(server), decode=letters) as client:
        (completion,) = (await client.generate(request)).completions
    assert completion.token_ids == expected[:kept]
    assert [params["max_new_tokens"] for params in server.requests[0]["sampling_params"]] == [STOP_CHUNK]
    assert len(server.requests) == 1


async def test_stop_strings_without_a_tokenizer_are_refused_by_name(start_fake_server: Any) -> None:
    server = await start_fake_server()
    request = request_of(n=1)
    for stop, settings, message in ((("x",), {}, "tokenizer"), (("",), {"decode": letters}, "stop string ''")):
        async with client_of(FixedManager(server), **settings) as client:
            with pytest.raises(ValueError, match=message):
                await client.generate(replace(request, sampling=replace(request.sampling, stop=stop)))
    assert server.requests == []


async def test_a_request_aborted_in_the_queue_is_sent_again_whole(start_fake_server: Any) -> None:
    server = await start_fake_server()
    expected = await answers(server, request_of())
    server.busy = True
    async with client_of(FixedManager(server)) as client:
        call = asyncio.create_task(client.generate(request_of()))
        await server.until(lambda: len(server.running) == 2)
        await server.abort_running()
        await server.until(lambda: len(server.requests) == 3)
        server.busy = False
        await server.release()
        result = await call
    assert [completion.token_ids for completion in result.completions] == expected


async def test_chunks_give_the_same_answer(start_fake_server: Any) -> None:
    server = await start_fake_server()
    expected = await answers(server, request_of(tokens=7))
    server.requests.clear()
    async with client_of(FixedManager(server), new_tokens_per_chunk=3) as client:
        result = await client.generate(request_of(tokens=7))
    assert [completion.token_ids for completion in result.completions] == expected
    asked = [[params["max_new_tokens"] for params in sent["sampling_params"]] for sent in server.requests]
    assert asked == [[3, 3], [3, 3], [1, 1]]
    assert all(completion.finish_reason == "length" for completion in result.completions)


async def test_the_answer_survives_the_death_of_its_server(start_fake_server: Any) -> None:
    dying, healthy = await start_fake_server(), await start_fake_server()
    expected = await answers(healthy, request_of())
    dying.hold_after = 1
    manager = FixedManager(dying, healthy)
    async with client_of(manager) as client:
        call = asyncio.create_task(client.generate(request_of()))
        await dying.until(lambda: dying.generated_tokens == 2)
        await dying.kill()
        result = await call
    assert len(manager.scheduled) == 2
    assert [completion.token_ids for completion in result.completions] == expected


async def test_a_hanging_server_is_left_when_the_manager_says_so(start_fake_server: Any) -> None:
    hanging, healthy = await start_fake_server(), await start_fake_server()
    hanging.hang = True
    manager = FixedManager(hanging, healthy)
    async with client_of(manager) as client:
        call = asyncio.create_task(client.generate(request_of()))
        await hanging.until(lambda: "generate" in hanging.calls)
        manager.losses.put_nowait(hanging.url)
        result = await call
    assert len(result.completions) == 2


async def test_a_hanging_server_is_left_at_the_time_limit(start_fake_server: Any, clock: Any) -> None:
    hanging, healthy = await start_fake_server(), await start_fake_server()
    hanging.hang = True
    async with client_of(FixedManager(hanging, healthy, healthy)) as client:  # the first is asked for less
        call = asyncio.create_task(client.generate(request_of()))
        await hanging.until(lambda: "generate" in hanging.calls)
        await clock.forward_until(call.done, LIMIT_S / 8)
        result = await call
    assert len(result.completions) == 2
    assert LIMIT_S <= clock.ahead < 2 * LIMIT_S


@pytest.mark.parametrize("then", [False, None], ids=["stands still", "tells nothing"])
async def test_a_call_lasts_as_long_as_its_server_computes(
    start_fake_server: Any, clock: Any, then: bool | None
) -> None:
    """More answers than fit wait for one another: an abort would give its place to the next."""
    server = await start_fake_server()
    server.hold_after, server.computes = 2, True
    async with client_of(FixedManager(server), max_failures=1) as client:
        call = asyncio.create_task(client.generate(request_of(tokens=6)))
        await server.until(lambda: server.generated_tokens == 4)
        await clock.forward_until(lambda: server.calls.count("metrics") >= 30, LIMIT_S / 8)
        assert "abort_request" not in server.calls
        server.computes, since = then, clock.ahead
        await clock.forward_until(lambda: server.generated_tokens >= 8, LIMIT_S / 8)
        assert clock.ahead - since <= 2 * LIMIT_S
        assert "abort_request" in server.calls, "its figures stand still, but for those of its queue"
        await server.release()
        result = await call
    assert [len(completion.token_ids) for completion in result.completions] == [6, 6]


async def test_a_call_that_its_server_has_forgotten_is_repeated(start_fake_server: Any, clock: Any) -> None:
    server = await start_fake_server()
    server.hold_after, server.computes, server.deaf = 2, True, True
    async with client_of(FixedManager(server), max_failures=3) as client:
        call = asyncio.create_task(client.generate(request_of(n=1, tokens=6)))
        await clock.forward_until(lambda: len(server.requests) == 2, LIMIT_S)
        server.deaf = False
        await server.release()
        await call
    assert clock.ahead > 30 * LIMIT_S


async def test_a_request_that_fails_everywhere_says_so_at_last(start_fake_server: Any) -> None:
    server = await start_fake_server()
    await server.kill()
    manager = FixedManager(server)
    async with client_of(manager, max_failures=3) as client:
        with pytest.raises(GenerationFailed, match=r"failed 3 times in a row, last: .* cannot be reached"):
            await client.generate(request_of())
    assert len(manager.scheduled) == 3
    assert len(manager.released) == 1


async def test_a_refused_request_is_not_repeated(start_fake_server: Any) -> None:
    server = await start_fake_server(token="secret")
    manager = FixedManager(server)
    async with client_of(manager) as client:
        with pytest.raises(GenerationFailed, match="401"):
            await client.generate(request_of())
    assert len(manager.scheduled) == 1


async def test_a_request_that_is_given_up_is_aborted_and_released(start_fake_server: Any) -> None:
    server = await start_fake_server()
    server.hold_after = 1
    manager = FixedManager(server)
    async with client_of(manager) as client:
        call = asyncio.create_task(client.generate(request_of()))
        await server.until(lambda: server.generated_tokens == 2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await server.until(lambda: "abort_request" in server.calls)
    assert len(manager.released) == 1


async def test_many_requests_that_are_given_up_are_aborted_few_at_a_time(start_fake_server: Any) -> None:
    server = await start_fake_server()
    server.hold_after = 1
    aborting, most = 0, 0
    abort = GenerationServerClient.abort

    async def counted(self: GenerationServerClient, rid: str) -> None:
        nonlocal aborting, most
        aborting += 1
        most = max(most, aborting)
        await abort(self, rid)
        aborting -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationServerClient, "abort", counted)
        async with client_of(FixedManager(server), max_concurrent=40) as client:
            calls = [asyncio.create_task(client.generate(request_of(n=1, name=str(i)))) for i in range(40)]
            await server.until(lambda: server.generated_tokens == 40)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await server.until(lambda: server.calls.count("abort_request") == 40)
    assert 1 <= most <= 8


async def test_no_more_requests_than_allowed_are_under_way(start_fake_server: Any) -> None:
    server = await start_fake_server()
    server.hold_after = 1
    async with client_of(FixedManager(server), max_concurrent=2) as client:
        calls = [asyncio.create_task(client.generate(request_of(n=1, name=str(i)))) for i in range(5)]
        await server.until(lambda: server.generated_tokens == 2)
        assert len(server.requests) == 2
        await server.release()
        results = await asyncio.gather(*calls)
    assert [result.request_id for result in results] == ["0", "1", "2", "3", "4"]


async def test_evaluation_belongs_to_no_rollout(start_fake_server: Any) -> None:
    server = await start_fake_server()
    manager = FixedManager(server)
    async with client_of(manager) as client:
        await client.generate(request_of(), min_version=3)
    assert (manager.scheduled[0].rollout_id, manager.scheduled[0].min_version) == (None, 3)


async def test_an_answer_of_a_server_that_does_not_tell_that_it_computes_goes_on_from_what_there_is(
    start_fake_server: Any, clock: Any
) -> None:
    """The server generates two tokens a call and then holds the rest back, for ever: six calls make an answer of 12."""
    server = await start_fake_server()
    expected = await answers(server, request_of(tokens=12))
    server.requests.clear()
    server.hold_after = 2
    server.generated_tokens = 0
    async with client_of(FixedManager(server), max_failures=1) as client:
        call = asyncio.create_task(client.generate(request_of(tokens=12)))
        for generated in (4, 8, 12, 16, 20):  # by both samples
            await server.until(lambda generated=generated: server.generated_tokens == generated)
            clock.forward(LIMIT_S / 2)
        result = await call
    assert [completion.token_ids for completion in result.completions] == expected
    assert [completion.logprobs for completion in result.completions] == [
        [-(token + 1) / 100 for token in tokens] for tokens in expected
    ]
    assert all(completion.finish_reason == "length" for completion in result.completions)
    offsets = [[params.get("custom_params") for params in sent["sampling_params"]] for sent in server.requests]
    assert offsets == [[None] * 2, *([{"seed_offset": offset}] * 2 for offset in (2, 4, 6, 8, 10))]


async def test_a_long_answer_has_the_version_of_each_of_its_tokens(start_fake_server: Any, clock: Any) -> None:
    server = await start_fake_server()
    server.hold_after = 2
    async with client_of(FixedManager(server), max_failures=1) as client:
        call = asyncio.create_task(client.generate(request_of(n=1, tokens=6)))
        await server.until(lambda: server.generated_tokens == 2)
        clock.forward(LIMIT_S / 2)
        await server.until(lambda: server.generated_tokens == 4)
        server.version = "3"
        clock.forward(LIMIT_S / 2)
        (completion,) = (await call).completions
    assert completion.versions == [0, 0, 0, 0, 3, 3]


async def test_a_request_that_waits_in_the_queue_for_longer_than_the_limit_does_not_fail(
    start_fake_server: Any, clock: Any
) -> None:
    """The server says that it lives; it is only busy."""
    server = await start_fake_server()
    expected = await answers(server, request_of())
    server.requests.clear()
    server.busy = True
    async with client_of(FixedManager(server), max_failures=1) as client:
        call = asyncio.create_task(client.generate(request_of()))
        for count in (1, 2, 3):
            await server.until(lambda count=count: len(server.requests) == count and len(server.running) == 2)
            clock.forward(LIMIT_S / 2)
        await server.until(lambda: len(server.requests) == 4)
        server.busy = False
        await server.release()
        result = await call
    assert [completion.token_ids for completion in result.completions] == expected


async def test_less_is_asked_of_a_server_that_cannot_be_asked_for_what_it_has(
    start_fake_server: Any, clock: Any
) -> None:
    """As behind a proxy that knows no aborts: it answers nothing before it has all that was asked for."""
    server = await start_fake_server()
    expected = await answers(server, request_of(tokens=16))
    server.requests.clear()
    server.generated_tokens, server.hold_after, server.deaf = 0, 5, True
    async with client_of(FixedManager(server), max_failures=4) as client:
        call = asyncio.create_task(client.generate(request_of(tokens=16)))
        for calls, generated in ((1, 10), (2, 20), (4, 38), (6, 56)):  # those that are held; by both samples
            await server.until(lambda now=(calls, generated): (len(server.requests), server.generated_tokens) == now)
            await clock.forward_until(lambda calls=calls: len(server.requests) > calls, LIMIT_S / 8)
        result = await call
    assert [completion.token_ids for completion in result.completions] == expected
    asked = [sent["sampling_params"][0]["max_new_tokens"] for sent in server.requests]
    assert asked == [16, 8, 4, 8, 4, 8, 4, 4], "more again after each that was answered quickly"


class TiedServer:
    """The part of a real server that `FixedManager` needs."""

    def __init__(self, url: str) -> None:
        self.url, self.version = url, "0"


class SecondRound(FixedManager):
    """Notes when a rollout asks for its second round."""

    def __init__(self, server: TiedServer) -> None:
        super().__init__(server)
        self.second_round = asyncio.Event()

    async def schedule(self, request: RouteRequest, timeout_s: float) -> Route | None:
        if request.rollout_id is not None and request.rollout_id in {each.rollout_id for each in self.scheduled}:
            self.second_round.set()
        return await super().schedule(request, timeout_s)


def test_a_draft_that_is_ahead_of_others_takes_of_a_round_what_it_does_not_have() -> None:
    """A round tells all samples from where the one with the least has to be told."""
    partial = PartialAnswer(seed=1)
    for reported, start in (([1, 2, 3], 0), ([9, 9, 9, 4, 5], 0), ([8, 6], 4)):
        partial.extend_routing(np.array(reported, np.uint8)[:, None, None], start)
    partial.token_ids, partial.finish = [7, 7, 7, 7], FinishReason.length
    partial.logprobs, partial.versions = [0.0] * 4, [0] * 4
    routing = partial.completion(prompt_tokens=3).routing
    assert routing is not None
    assert routing[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_cached_tokens_of_an_answer_are_those_of_its_request() -> None:
    """A later round finds what the first one has computed."""
    partial = PartialAnswer(seed=1)
    parts = [
        Completion([], [], [], FinishReason.abort),
        Completion([7], [0.0], [0], FinishReason.abort, cached_tokens=2),
        Completion([8], [0.0], [0], FinishReason.stop, cached_tokens=4),
    ]
    for part in parts:
        partial.extend(part, 9, (), None)
    answer = partial.completion(prompt_tokens=4)
    assert (answer.token_ids, answer.cached_tokens) == ([7, 8], 2)


async def test_scores_of_an_answer_are_the_log_probabilities_that_it_came_with(start_fake_server: Any) -> None:
    """The first server ends the request without them, as one does that is updated."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 64}
    engine = GenerationEngine(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, vocab_size=32)).eval())
    engine.start()
    server = await serve(engine)
    updated = await start_fake_server()
    updated.busy = True
    manager = FixedManager(TiedServer(server.url), updated, TiedServer(server.url))
    try:
        async with client_of(manager) as client:
            (answer,) = (await client.generate(request_of(n=1))).completions
            asked = GenerationRequest("s", (1, 2, 3, *answer.token_ids), 1, SamplingParams(), score_from=3)
            result = await client.generate(asked)
            with pytest.raises(ValueError, match="score_from=0"):
                await client.generate(replace(asked, score_from=0))
    finally:
        await server.close()
        engine.close()
    assert result.completions == ()
    assert result.scores == pytest.approx(answer.logprobs, abs=1e-5)
    assert len(manager.scheduled) == 3
    assert len(manager.released) == 2


async def test_experts_are_told_once_for_every_token_of_an_answer_in_rounds(tmp_path: Path) -> None:
    """The weights change between rounds: each token has the experts by which the one after it was drawn."""
    torch.manual_seed(0)
    settings = {"num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 32, "initializer_range": 0.4}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 64}
    config = MixtralConfig(**settings, **sizes, num_attention_heads=2, num_key_value_heads=2)
    old, new = (MixtralForCausalLM(config).eval() for _ in range(2))
    new.save_pretrained(str(tmp_path))
    engine = GenerationEngine(copy.deepcopy(old), record_routing=True)
    engine.start()
    server = await serve(engine)
    manager = SecondRound(TiedServer(server.url))
    shape = RoutingShape(layers=2, per_token=2, experts=4)
    request = GenerationRequest("q", (1, 2, 3), 2, SamplingParams(max_new_tokens=10, seed=11))
    try:
        async with client_of(manager, new_tokens_per_chunk=4, routing=shape) as client:
            evaluated = await client.generate(request)
            call = asyncio.create_task(client.generate(request, "rollout"))
            await manager.second_round.wait()
            await asyncio.wrap_future(engine.update_weights(str(tmp_path), "1"))
            rollout = await call
    finally:
        await server.close()
        engine.close()
    assert all(completion.routing is None for completion in evaluated.completions)
    for completion in rollout.completions:
        tokens = [1, 2, 3, *completion.token_ids]
        assert completion.routing is not None
        assert completion.routing.shape == (len(tokens) - 1, 2, 2)
        drawn_by = [0, 0, *completion.versions]  # of each token but the last, what the next one was drawn by
        assert set(drawn_by) == {0, 1}
        by_version = [experts_of(model, tokens) for model in (old, new)]
        expected = np.stack([by_version[version][position] for position, version in enumerate(drawn_by)])
        np.testing.assert_array_equal(np.sort(completion.routing, -1), expected)


def experts_of(model: MixtralForCausalLM, tokens: list[int]) -> NDArray[Any]:
    """[T, layers, per_token], in ascending order, by transformers' own forward."""
    model = copy.deepcopy(model)
    routers = Routers(model, "mixtral")
    with torch.no_grad(), routers.recording() as recorded:
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    return torch.stack([recorded[layer] for layer in sorted(recorded)], 1).sort(-1).values.numpy()
