"""The client of one server, against each pitfall of the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.api.generation import FinishReason, SamplingParams
from asyncrl.comm.http_client import HttpRefused, HttpTimeout, HttpUnreachable, JsonHttp
from asyncrl.inference import client as client_module
from asyncrl.inference.client import GenerateItem, GenerationServerClient, UpdateFailed, wire_rid
from asyncrl.inference.messages import MalformedReply, parse_completion, parse_version
from asyncrl.manager.fleet.fleet_runner import ServerUpdater
from asyncrl.manager.fleet.servers import BeginUpdate, Target
from asyncrl.weights.transports.base import ManagerEnd

SAMPLING = SamplingParams(max_new_tokens=8)
LIMIT_S = 300.0


@pytest.fixture
async def http() -> AsyncIterator[JsonHttp]:
    http = JsonHttp(None)
    yield http
    await http.close()


def item(rid: str, tokens: int = 4) -> GenerateItem:
    return GenerateItem(rid, [1, 2, 3], tokens, seed=5)


async def test_a_batch_comes_back_in_order_with_versions_and_log_probabilities(
    start_fake_server: Any, http: JsonHttp
) -> None:
    server = await start_fake_server()
    server.version = "7"
    client = GenerationServerClient(http, server.url)
    first, second = await client.generate(
        [item("a;0;0;", 3), GenerateItem("a;1;0;", [9], 2)],
        SamplingParams(temperature=0.5, stop_token_ids=(96,)),
        timeout_s=LIMIT_S,
    )
    assert (len(first.token_ids), len(second.token_ids)) == (3, 2)
    assert first.versions == [7, 7, 7]
    assert first.logprobs == [-(token + 1) / 100 for token in first.token_ids]
    assert server.requests[0]["sampling_params"] == [
        {"temperature": 0.5, "stop_token_ids": [96], "max_new_tokens": 3, "sampling_seed": 5},
        {"temperature": 0.5, "stop_token_ids": [96], "max_new_tokens": 2},
    ]


async def test_aborting_a_request_leaves_those_whose_id_begins_alike(start_fake_server: Any, http: JsonHttp) -> None:
    """SGLang aborts by prefix: "a-1" would take "a-10" with it."""
    server = await start_fake_server()
    server.hold_after = 1
    client = GenerationServerClient(http, server.url)
    calls = [
        asyncio.create_task(client.generate([item(wire_rid(name, 0))], SAMPLING, timeout_s=LIMIT_S))
        for name in ("a-1", "a-10")
    ]
    await server.until(lambda: server.generated_tokens == 2)
    await client.abort(wire_rid("a-1"))
    assert (await calls[0])[0].finish_reason == "abort"
    await server.release()
    assert (await calls[1])[0].finish_reason == "length"


async def test_aborting_one_sample_leaves_the_tenth(start_fake_server: Any, http: JsonHttp) -> None:
    server = await start_fake_server()
    server.hold_after = 1
    client = GenerationServerClient(http, server.url)
    batch = [item(wire_rid("a", sample)) for sample in (1, 10)]
    call = asyncio.create_task(client.generate(batch, SAMPLING, timeout_s=LIMIT_S))
    await server.until(lambda: server.generated_tokens == 2)
    await client.abort(wire_rid("a", 1))
    await server.release()
    assert [completion.finish_reason for completion in await call] == ["abort", "length"]


async def test_an_id_that_would_abort_others_is_refused(http: JsonHttp) -> None:
    client = GenerationServerClient(http, "http://127.0.0.1:1")
    with pytest.raises(ValueError, match="would abort other requests too"):
        await client.abort("a-1")
    with pytest.raises(ValueError, match="non-empty id"):
        wire_rid("")
    with pytest.raises(ValueError, match="without ';'"):
        wire_rid("a;b")


async def test_readiness_answers_at_once_while_health_would_block(start_fake_server: Any, http: JsonHttp) -> None:
    server = await start_fake_server()
    client = GenerationServerClient(http, server.url)
    await client.ready(timeout_s=LIMIT_S)
    await client.pause()
    blocked = asyncio.create_task(http.call("GET", f"{server.url}/health", timeout_s=LIMIT_S))
    await server.until(lambda: "health" in server.calls)
    with pytest.raises(HttpRefused, match="503"):
        await client.ready(timeout_s=LIMIT_S)
    assert not blocked.done()
    assert server.calls.count("health") == 1
    await client.resume()
    await blocked


async def test_readiness_of_a_version_without_ready_is_asked_elsewhere(start_fake_server: Any, http: JsonHttp) -> None:
    server = await start_fake_server()
    server.has_ready = False
    await GenerationServerClient(http, server.url).ready(timeout_s=LIMIT_S)
    assert server.calls == ["ready", "model_info"]


async def test_a_running_and_a_queued_abort_are_both_understood(start_fake_server: Any, http: JsonHttp) -> None:
    server = await start_fake_server()
    client = GenerationServerClient(http, server.url)
    server.hold_after = 2
    running = asyncio.create_task(client.generate([item("a;0;0;")], SAMPLING, timeout_s=LIMIT_S))
    await server.until(lambda: server.generated_tokens == 2)
    server.busy = True
    queued = asyncio.create_task(client.generate([item("b;0;0;")], SAMPLING, timeout_s=LIMIT_S))
    await server.until(lambda: len(server.running) == 2)
    await client.pause("abort")
    (partial,), (nothing,) = await running, await queued
    assert (partial.finish_reason, len(partial.token_ids), len(partial.versions)) == ("abort", 2, 2)
    assert (nothing.finish_reason, nothing.token_ids, nothing.logprobs, nothing.versions) == ("abort", [], [], [])


async def test_a_reply_without_spans_takes_the_version_of_the_whole_reply(
    start_fake_server: Any, http: JsonHttp
) -> None:
    server = await start_fake_server()
    server.version, server.spans = "3", False
    (completion,) = await GenerationServerClient(http, server.url).generate(
        [item("a;0;0;")], SAMPLING, timeout_s=LIMIT_S
    )
    assert completion.versions == [3, 3, 3, 3]


async def test_an_update_is_believed_once_the_server_names_the_version(start_fake_server: Any, http: JsonHttp) -> None:
    server = await start_fake_server()
    client = GenerationServerClient(http, server.url)
    await client.update_weights("/w/v4", 4, timeout_s=LIMIT_S)
    assert await client.served_version() == 4
    server.update = "lie"
    with pytest.raises(UpdateFailed, match="took version 5 but names 4"):
        await client.update_weights("/w/v5", 5, timeout_s=LIMIT_S)


async def test_a_refused_update_is_a_failure_although_the_weights_may_be_replaced(
    start_fake_server: Any, http: JsonHttp
) -> None:
    server = await start_fake_server()
    server.update = "refuse"
    with pytest.raises(UpdateFailed, match="400"):
        await GenerationServerClient(http, server.url).update_weights("/w/v1", 1, timeout_s=LIMIT_S)
    assert server.version == "1"


async def test_failures_are_typed(start_fake_server: Any, http: JsonHttp) -> None:
    server = await start_fake_server(token="secret")
    client = GenerationServerClient(http, server.url)
    with pytest.raises(HttpRefused, match="401"):
        await client.pause()
    server.hang = True
    with pytest.raises(HttpTimeout, match=r"within 0.1 s"):
        await client.ready(timeout_s=0.1)
    await server.kill()
    with pytest.raises(HttpUnreachable):
        await client.ready(timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_ids": [1]}, "1 tokens, 2 log-probabilities"),
        ({"output_ids": None}, "lacks"),
        ({"meta_info": {}}, "lacks 'finish_reason'"),
    ],
)
def test_a_reply_that_breaks_the_contract_says_how(change: dict[str, Any], message: str) -> None:
    reply = {
        "output_ids": [1, 2],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 2},
            "weight_version": "0",
            "output_token_logprobs": [[-1.0, 1, None], [-1.0, 2, None]],
        },
    }
    with pytest.raises(MalformedReply, match=message):
        parse_completion(reply | change)


def test_versions_are_the_numbers_of_this_system() -> None:
    assert parse_version("12") == 12
    assert parse_version("default") == 0
    with pytest.raises(MalformedReply, match="another system updates this server"):
        parse_version("v1")


async def test_a_server_that_fails_a_check_after_its_update_has_failed_the_update(
    start_fake_server: Any, http: JsonHttp
) -> None:
    server = await start_fake_server()
    seen: list[int] = []

    async def check(index: int, client: GenerationServerClient, target: Target) -> None:
        assert (index, client.url, server.paused) == (0, server.url, False)
        seen.append(target.version)
        if target.version == 2:
            raise UpdateFailed("log-probabilities differ")

    updater = ServerUpdater(http, ManagerEnd(), timeout_s=LIMIT_S, check=check)
    order = BeginUpdate(0, server.url, 1, Target(1, "/w/v1"), pause="abort")
    await updater.update(order)
    with pytest.raises(UpdateFailed, match="log-probabilities differ"):
        await updater.update(replace(order, target=Target(2, "/w/v2")))
    assert seen == [1, 2]
    assert server.paused


@pytest.mark.parametrize(
    ("settings", "ended"),
    [({}, True), ({"has_loads": False}, False), ({"loads": {"num_reqs": 1}}, False), ({"deaf": True}, False)],
    ids=["", "does not report its requests", "reports them in another form", "stays busy"],
)
async def test_running_requests_have_ended_before_sglang_is_paused(
    settings: dict[str, Any],
    ended: bool,
    start_fake_server: Any,
    http: JsonHttp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pause looks once a second whether they have ended; meanwhile a server would stand idle."""
    monkeypatch.setattr(client_module, "IDLE_LIMIT_S", 0.1)
    server = await start_fake_server()
    server.hold_after = 2
    for name, value in settings.items():
        setattr(server, name, value)
    client = GenerationServerClient(http, server.url)
    running = asyncio.create_task(client.generate([item("a;0;0;")], SAMPLING, timeout_s=LIMIT_S))
    await server.until(lambda: server.generated_tokens == 2)
    updater = ServerUpdater(http, ManagerEnd(), timeout_s=LIMIT_S, pause_ends_requests=False)
    await updater.update(BeginUpdate(0, server.url, 1, Target(1, "/w/v1"), pause="abort"))
    (answer,) = await running
    assert (answer.finish_reason, answer.versions) == (FinishReason.abort, [0, 0])
    called = [call for call in server.calls if call not in ("generate", "v1/loads")]
    update = ["update_weights_from_disk", "model_info", "continue_generation"]
    assert called == ["abort_request", "pause_generation", *(["abort_request"] if ended else []), *update]
    if ended:
        assert server.at_pause == [("retract", 0)]
    else:
        assert [mode for mode, _ in server.at_pause] == ["abort"]


async def test_a_server_whose_update_failed_generates_nothing(start_fake_server: Any, http: JsonHttp) -> None:
    """Its weights are unknown: it stays paused, and what it was sent is held."""
    server = await start_fake_server()
    server.update = "refuse"
    client = GenerationServerClient(http, server.url)
    with pytest.raises(UpdateFailed):
        await ServerUpdater(http, ManagerEnd(), timeout_s=LIMIT_S).update(
            BeginUpdate(0, server.url, 1, Target(1, "/w/v1"), pause="abort")
        )
    held = asyncio.create_task(client.generate([item("a;0;0;")], SAMPLING, timeout_s=LIMIT_S))
    await server.until(lambda: bool(server.requests))
    with pytest.raises(HttpRefused, match="503"):
        await client.ready(timeout_s=LIMIT_S)
    assert (held.done(), server.generated_tokens) == (False, 0)
    held.cancel()
    await asyncio.wait({held})
