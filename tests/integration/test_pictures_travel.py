"""Pictures on their way to generation servers: by hash with each request, the bytes once to a server without them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from transformers import AutoModelForImageTextToText

from asyncrl.api.generation import FinishReason, GenerationRequest, SamplingParams
from asyncrl.api.picture import Picture, PictureError, PictureRef, PlacedPicture
from asyncrl.comm.http_client import HttpRefused, JsonHttp
from asyncrl.inference.client import GenerateItem, GenerationServerClient, PictureSender
from asyncrl.inference.embedded import server as serving
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import EngineStats, Job
from asyncrl.inference.embedded.pictures import PictureCache
from asyncrl.inference.engine_io import Finish, GenerationInput, GenerationOutput, VersionSpan
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.messages import LostServersReply, Route, RouteRequest
from asyncrl.models.pictures import Pictures
from asyncrl.rollout.generation_servers import ServerCapabilities
from asyncrl.rollout.rollout_client import GenerationFailed, RolloutClient
from tests.tiny_vlm import picture, render

PICTURES = [
    Picture.from_array(np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8)) for seed in range(4)
]
LIMIT_S = 300.0


class StubEngine:
    """Answers each sample at once with its seed's number of tokens so far; the first `interrupted` calls are aborted
    after two tokens."""

    takes_pictures = True
    model_path = "stub"
    eos_token_ids = (0,)

    def __init__(self, interrupted: int = 0) -> None:
        self.interrupted = interrupted
        self.inputs: list[GenerationInput] = []

    def submit(self, job: Job) -> Future[list[GenerationOutput]]:
        self.inputs += job.inputs
        self.interrupted, interrupt = self.interrupted - 1, self.interrupted > 0
        outputs = []
        for given in job.inputs:
            count = 2 if interrupt else given.sampling.max_new_tokens
            finish = Finish(FinishReason.abort if interrupt else FinishReason.length)
            spans = (VersionSpan("0", 0, count),)
            outputs.append(
                GenerationOutput(given.rid, [5] * count, [-0.5] * count, len(given.input_ids), 0, "0", spans, 0, finish)
            )
        job.future.set_result(outputs)
        return job.future

    def prepare(self, job: Job) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(max_total_tokens=1)


class Server:
    """A real server over a stub engine; `bodies` are those it received at `/pictures`."""

    version = "0"

    def __init__(self, engine: StubEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.app = serving.GenerationApp(engine, None, None, None)  # type: ignore[arg-type]
        self.url = ""

    @property
    def received(self) -> int:
        cache = self.app._pictures
        return cache.received if cache is not None else 0


class InTurn:
    """A manager that routes to the servers one after the other."""

    def __init__(self, *servers: Server) -> None:
        self.servers, self.asked = servers, 0

    async def schedule(self, request: RouteRequest, timeout_s: float) -> Route | None:
        self.asked += 1
        return Route(self.servers[(self.asked - 1) % len(self.servers)].url, 0)

    def release(self, request_id: str) -> None: ...

    async def lost_servers(self, after: int, timeout_s: float) -> LostServersReply:
        if after >= 0:
            await asyncio.Event().wait()
        return LostServersReply(0, [])


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    class Model:
        class config:
            model_type = "stub"

    monkeypatch.setattr(StubEngine, "model", Model, raising=False)
    servers: list[Server] = []

    async def started(**settings: Any) -> Server:
        server = Server(StubEngine(**settings), monkeypatch)
        server.url = await server.app.http.start("127.0.0.1")
        servers.append(server)
        return server

    yield started
    for server in servers:
        await server.app.http.close()


@asynccontextmanager
async def client_of(manager: InTurn, *, pictures: bool = True) -> AsyncIterator[RolloutClient]:
    settings: Any = {"security": None, "max_concurrent": 32, "request_timeout_s": LIMIT_S}
    async with RolloutClient(cast(ManagerClient, manager), ServerCapabilities(pictures=pictures), **settings) as client:
        yield client


def request_of(*numbers: int, n: int = 2) -> GenerationRequest:
    placed = tuple(PlacedPicture(1 + 4 * place, 3, PICTURES[number]) for place, number in enumerate(numbers))
    ids = (1, *(9, 9, 9, 2) * len(numbers), 3)
    return GenerationRequest("q", ids, n, SamplingParams(max_new_tokens=6, seed=11), placed)


async def test_concurrent_groups_over_one_picture_send_it_once(start: Any) -> None:
    server = await start()
    async with client_of(InTurn(server)) as client:
        await asyncio.gather(*(client.generate(request_of(0, n=16)) for _ in range(8)))
        assert client._servers.pictures.sent == server.received == 1
        await client.generate(request_of(0, 1, 0))
        assert client._servers.pictures.sent == server.received == 2
        assert not client._servers.pictures._under_way
    last = server.engine.inputs[-1]
    assert last.pictures == request_of(0, 1, 0).pictures
    assert [placed.picture.data for placed in last.pictures] == [PICTURES[i].data for i in (0, 1, 0)]
    assert len(server.engine.inputs) == 8 * 16 + 2
    assert all(given.pictures for given in server.engine.inputs)


async def test_a_group_of_16_over_one_picture_sends_it_once_and_encodes_it_once(
    vlm_folder: Callable[[str], Path],
) -> None:
    folder, shown = vlm_folder("qwen2_vl"), picture(1)
    prompt = render(folder, "<u>how ", shown, "?<end><a>")
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    engine = GenerationEngine(model, model_path=str(folder), max_model_len=64, pictures=Pictures.of(model, folder))
    engine.start()
    served = await serving.serve(engine)
    server = Server.__new__(Server)
    server.url = served.url
    asked = GenerationRequest("q", tuple(prompt.ids), 16, SamplingParams(max_new_tokens=3, seed=1), prompt.placed)
    async with client_of(InTurn(server)) as client:
        for _ in range(2):
            result = await client.generate(asked)
            assert len(result.completions) == 16
        assert client._servers.pictures.sent == 1
        http = JsonHttp(None)
        pieces = [piece async for piece in http.pieces(f"{server.url}/metrics", silence_s=LIMIT_S)]
        reported = b"".join(pieces).decode()
        await http.close()
    for name, count in {
        "received_pictures_total": 1,
        "encoded_pictures_total": 1,
        "kept_picture_bytes": len(shown.data),
    }.items():
        assert re.search(rf"^sglang:{name}{{.*}} {float(count)}$", reported, re.MULTILINE), reported
    await served.close()
    engine.close()


async def test_another_worker_sends_nothing_that_the_server_has(start: Any) -> None:
    server = await start()
    for sent in (1, 0):
        async with client_of(InTurn(server)) as client:
            await client.generate(request_of(0))
            assert client._servers.pictures.sent == sent


async def test_an_interrupted_answer_goes_on_at_a_server_that_lacks_the_picture(start: Any) -> None:
    first, second = await start(interrupted=1), await start()
    async with client_of(InTurn(first, second)) as client:
        result = await client.generate(request_of(2))
    assert [completion.token_ids for completion in result.completions] == [[5] * 6] * 2
    assert first.received == second.received == 1
    later = second.engine.inputs[0]
    assert later.input_ids == (*request_of(2).input_ids, 5, 5)
    assert later.pictures == request_of(2).pictures


async def test_a_text_request_has_nothing_of_pictures_on_the_wire(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, bodies = await start(), []
    parse = serving.parse_generate
    monkeypatch.setattr(serving, "parse_generate", lambda body, *rest: bodies.append(bytes(body)) or parse(body, *rest))
    async with client_of(InTurn(server)) as client:
        await client.generate(GenerationRequest("q", (1, 2), 2, SamplingParams(max_new_tokens=6)))
        await client.generate(request_of(0))
    assert [b"pictures" in body for body in bodies] == [False, True, True]  # the picture was asked for in between
    assert not any(PICTURES[0].data[:64] in body for body in bodies)


async def test_pictures_pushed_out_meanwhile_are_sent_again(start: Any) -> None:
    server = await start()
    server.app._pictures = PictureCache(max_bytes=len(PICTURES[0].data) * 2 + 100)
    async with client_of(InTurn(server)) as client:
        for number in (0, 1, 2, 0):
            await client.generate(request_of(number))
        assert client._servers.pictures.sent == 4
        assert len(server.app._pictures) == 2
        with pytest.raises(GenerationFailed, match="409"):  # three at a time never fit
            await client.generate(request_of(0, 1, 2))


def test_the_cache_drops_what_was_used_longest_ago_and_never_the_newest() -> None:
    cache = PictureCache(max_bytes=2 * len(PICTURES[0].data))
    cache.add(PICTURES[0])
    cache.add(PICTURES[1])
    cache.placed([[PlacedPicture(0, 1, PICTURES[0]).ref]])
    cache.add(PICTURES[2])
    assert cache.placed([[PlacedPicture(0, 1, PICTURES[i]).ref for i in (0, 2)]])
    with pytest.raises(LookupError, match="1 pictures"):
        cache.placed([[PlacedPicture(0, 1, PICTURES[i]).ref for i in (0, 1)]])
    small = PictureCache(max_bytes=1)
    small.add(PICTURES[0])
    assert len(small) == 1
    assert small.nbytes == len(PICTURES[0].data)


def test_ten_thousand_pictures_leave_no_more_than_the_limit() -> None:
    cache = PictureCache(max_bytes=1 << 20)
    for number in range(10_000):
        data = number.to_bytes(4, "little") * 1000
        cache.add(Picture(data, f"{number:064x}"))
        assert cache.nbytes <= 1 << 20
    assert (cache.received, len(cache)) == (10_000, (1 << 20) // 4000)
    assert cache.placed([[PictureRef(0, 1, f"{9_999:064x}")]])


async def test_a_model_without_pictures_refuses_them_by_name(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StubEngine, "takes_pictures", False)
    server = await start()
    async with client_of(InTurn(server)) as client:
        with pytest.raises(GenerationFailed, match="the model takes none"):
            await client.generate(request_of(0))
    async with client_of(InTurn(server), pictures=False) as client:
        with pytest.raises(PictureError, match="this run's generation servers take none"):
            await client.generate(request_of(0))
    assert not server.engine.inputs


@pytest.mark.parametrize(
    ("pictures", "why"),
    [
        ([[{"position": 0, "length": 9, "sha256": "0" * 64}]], "ends at position"),
        ([[{"position": 0, "length": 1, "sha256": "0" * 64}] * 2], "begins before"),
        ([[{"position": 0, "length": 0, "sha256": "0" * 64}]], "expected at least 0 and 1"),
        ([[{"position": 0, "length": 1, "sha256": "../../etc"}]], "64 hexadecimal"),
        ([[{"position": 0, "length": 1, "sha256": "0" * 64}], []], "has 2 lists"),
        ([{"position": 0, "length": 1, "sha256": "0" * 64}], "Expected `array`"),
    ],
)
async def test_a_malformed_reference_is_refused_by_name(start: Any, pictures: Any, why: str) -> None:
    server, http = await start(), JsonHttp(None)
    body = {"input_ids": [[1, 2, 3]], "pictures": pictures}
    with pytest.raises(HttpRefused) as refused:
        await http.call("POST", f"{server.url}/generate", body, timeout_s=LIMIT_S)
    await http.close()
    assert refused.value.status == 400
    assert why in refused.value.body.decode()


@pytest.mark.parametrize(
    ("data", "status", "why"),
    [
        (PICTURES[0].data[:20], 400, "damaged"),
        (b"GIF89a", 400, "is GIF"),
        (b"\x89PNG\r\n\x1a\n" + bytes(17 << 20), 413, ""),
    ],
)
async def test_bad_bytes_are_refused_by_the_server(start: Any, data: bytes, status: int, why: str) -> None:
    server, http = await start(), JsonHttp(None)
    with pytest.raises(HttpRefused) as refused:
        await http.call("POST", f"{server.url}/pictures", {"data": msgspec.to_builtins(data)}, timeout_s=LIMIT_S)
    await http.close()
    assert refused.value.status == status
    assert why in refused.value.body.decode()
    assert server.received == 0


async def test_a_call_that_is_cancelled_leaves_the_journey_to_the_others(start: Any) -> None:
    server, http = await start(), JsonHttp(None)
    sender = PictureSender(http)
    wanted = {PICTURES[0].sha256: PICTURES[0]}
    first = asyncio.create_task(sender.send(server.url, wanted, timeout_s=LIMIT_S))
    second = asyncio.create_task(sender.send(server.url, wanted, timeout_s=LIMIT_S))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert sender.sent == server.received == 1
    items = [GenerateItem("a", [9, 9, 3], 1, pictures=[PlacedPicture(0, 2, PICTURES[0])])]
    await GenerationServerClient(http, server.url).generate(items, SamplingParams(), timeout_s=LIMIT_S)
    assert server.received == 1
    await http.close()
