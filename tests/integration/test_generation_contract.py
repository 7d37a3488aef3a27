"""The contract that both engines keep: one suite over the embedded engine and a real SGLang server.

The servers are started as a run starts them, by the GenerationServer process; the embedded engine can be held
(`held_engine`), SGLang is too slow on a CPU to get far ahead of a test. It is left out where ASYNCRL_SGLANG_PYTHON does
not name an interpreter that has it (`launchers/install_sglang_cpu.sh`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import pytest_asyncio
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.api.generation import Completion, GenerationRequest, SamplingParams
from asyncrl.comm import names
from asyncrl.comm.http_client import JsonHttp
from asyncrl.comm.name_resolve import make_resolver
from asyncrl.comm.security import HttpSecurity, RunSecret
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import SECRET_FILE, write_run_config
from asyncrl.inference import client as inference_client
from asyncrl.inference.client import GenerateItem, GenerationServerClient, MemoryTag, PauseMode, UpdateFailed, wire_rid
from asyncrl.inference.messages import parse_completion
from asyncrl.inference.settings import BACKENDS
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.fleet.fleet_runner import ServerUpdater
from asyncrl.manager.fleet.servers import BeginUpdate, Sleep, Target
from asyncrl.manager.messages import LostServersReply, Route, RouteRequest
from asyncrl.rollout.generation_servers import FORK_SAVES, ServerCapabilities
from asyncrl.rollout.rollout_client import RolloutClient
from asyncrl.runtime.supervisor import STOP_SIGNAL, supervised
from asyncrl.weights.transports.base import ManagerEnd
from asyncrl.weights.transports.distributed import ProcessGroupConnection
from asyncrl.weights.transports.from_memory import ServerConnection, SharedMemoryConnection

from .. import held_engine
from ..conftest import SGLANG_ENV

VOCAB, EOS, CONTEXT, RUNNING = 40, 2, 4096, 4
START_S, LIMIT_S = 600.0, 600.0
TOLERANCE = 1e-5
ENDLESS = 3500
"""Tokens of an answer that nobody waits for."""
PROMPT = (5, 6, 7, 8)
REPOSITORY = Path(__file__).parents[2]

SGLANG_PYTHON = os.environ.get("ASYNCRL_SGLANG_PYTHON", "")
needs_sglang = pytest.mark.skipif(
    not SGLANG_PYTHON, reason="ASYNCRL_SGLANG_PYTHON names no interpreter with SGLang; see launchers/"
)
pytestmark = [pytest.mark.timeout(1800)]

Json = dict[str, Any]
PLAIN = SamplingParams()


@dataclass(frozen=True)
class Kind:
    """How the servers of a back end differ, within the contract.

    Attributes:
        load: where it reports its load, and under which key.
        can_be_held: `held_engine` starts it, so that an answer goes on when a test lets it. Else it must be too slow to
            get far ahead of a test.
        own_random_numbers: the seed of a request does not determine its tokens.
        late: for a moment it holds a request that it has answered, and refuses its id, or an update, because of it.
        keeps_stale_prefixes: cached prefixes outlive an update that does not ask for the flush.
        shares_within_a_call: the samples of one call share their prefix without an earlier request.
        refuses_asleep: a call that needs the memory that it gave back is refused. Else its process may end.
    """

    load: tuple[str, str]
    can_be_held: bool = False
    own_random_numbers: bool = False
    late: bool = False
    keeps_stale_prefixes: bool = False
    shares_within_a_call: bool = False
    refuses_asleep: bool = False

    @property
    def long(self) -> int:
        """Tokens of an answer that is still being written when the test does something to it (see `Server.end`)."""
        return 200 if self.can_be_held else ENDLESS


KINDS = {
    "embedded": Kind(
        ("/server_info", "internal_states"), can_be_held=True, shares_within_a_call=True, refuses_asleep=True
    ),
    "sglang": Kind(("/v1/loads?include=core", "loads"), own_random_numbers=True, late=True, keeps_stale_prefixes=True),
}


@dataclass(frozen=True)
class Backend:
    """A running server, and the folders of models that it can serve.

    Attributes:
        name: in `BACKENDS` and `KINDS`.
        hold: while this file exists, a server that can be held lets no answer go on beyond a few tokens.
    """

    name: str
    url: str
    security: HttpSecurity
    models: Mapping[str, Path]
    hold: Path

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]


def make_model(folder: Path, seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model.double()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, Qwen2ForCausalLM]]:
    """Two models of the same shapes; the first is the initial one."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    seeds = {"base": 1, "next": 2}
    return {name: (root / name, make_model(root / name, seed)) for name, seed in seeds.items()}


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=[needs_sglang, pytest.mark.sglang])])
def backend(
    request: pytest.FixtureRequest,
    models: Mapping[str, tuple[Path, Qwen2ForCausalLM]],
    tmp_path_factory: pytest.TempPathFactory,
    warm_python: str,
) -> Iterator[Backend]:
    """A GenerationServer process with the engine under test."""
    folder = tmp_path_factory.mktemp(request.param)
    config = ExperimentConfig()
    config.model.path = str(models["base"][0])
    config.generation.backend = request.param
    config.generation.device = "cpu"
    config.generation.context_length = CONTEXT
    config.generation.colocated = "all"
    config.generation.max_running_requests = RUNNING
    config.generation.max_total_tokens = 4 * RUNNING * CONTEXT
    config.generation.start_timeout_s = START_S
    config.generation.sglang.python = SGLANG_PYTHON
    config.generation.sglang.env = dict(SGLANG_ENV)
    write_run_config(config, folder)
    secret = RunSecret.create(folder / SECRET_FILE)
    hold = folder / "hold"
    held = KINDS[request.param].can_be_held
    program = [held_engine.__file__, str(hold)] if held else ["-m", "asyncrl.runtime.main"]
    argv = [warm_python, *program, "generation_server", "0", "--run-dir", str(folder)]
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(supervised(argv), stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
    resolver = make_resolver("file", str(folder / "name_resolve"))
    try:
        resolver.add(names.TRAINER_TURN_KEY, names.TrainerTurn(1, training=False, version=0).encode())
        registration = names.GenerationServerEntry.decode(resolver.wait(names.gen_server_key(0), START_S))
        paths = {name: path for name, (path, _) in models.items()}
        yield Backend(request.param, registration.url, secret.http(), paths, hold)
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
    finally:
        process.send_signal(STOP_SIGNAL)
        process.wait(LIMIT_S)
        resolver.close()


class Server:
    """Raw calls of the server under test; every request gets an id that no other begins with."""

    _ids = itertools.count()

    def __init__(self, backend: Backend, session: aiohttp.ClientSession) -> None:
        self.backend, self.session = backend, session
        self.long = backend.kind.long

    def rid(self) -> str:
        return f"test-{next(self._ids):06d};"

    async def post(self, path: str, body: Any = None, raw: bytes | None = None) -> tuple[int, Any]:
        data = json.dumps({} if body is None else body).encode() if raw is None else raw
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.backend.url + path, data=data, headers=headers) as reply:
            return reply.status, _parsed(await reply.text())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.backend.url + path) as reply:
            return reply.status, _parsed(await reply.text())

    async def ok(self, path: str, body: Any = None) -> Any:
        status, reply = await self.post(path, body)
        assert status == 200, (path, status, reply)
        return reply

    async def generate(self, **body: Any) -> Any:
        return await self.ok("/generate", {"input_ids": list(PROMPT), "return_logprob": True} | body)

    def hold(self) -> None:
        """Until `release`, what is under way does not end by itself."""
        self.backend.hold.touch()

    def release(self) -> None:
        """Let the running requests continue to their end."""
        self.backend.hold.unlink(missing_ok=True)

    async def start(self, tokens: int = ENDLESS, rid: str | None = None) -> Stream:
        """A request of `tokens` tokens that has begun to run when this returns, and is held."""
        self.hold()
        stream = Stream(self, rid or self.rid(), tokens)
        await stream.first_chunk()
        return stream

    async def end(self, stream: Stream) -> Json:
        """Let an answer go on, and return it whole. One that cannot be held has more to write than any test takes:
        it is told to end after another answer, beside which it wrote on."""
        self.release()
        if not self.backend.kind.can_be_held:
            await self.generate(sampling_params={"max_new_tokens": 5, "ignore_eos": True})
            await self.ok("/abort_request", {"rid": stream.rid})
        return await stream.result()

    async def update(self, model: str, version: str, **more: Any) -> tuple[int, Json]:
        body = {"model_path": str(self.backend.models[model]), "weight_version": version} | more
        return await self.post("/update_weights_from_disk", body)

    async def until_updated(self, model: str, version: str) -> None:
        """Update the weights. SGLang refuses while it holds a request that it has answered and no longer reports."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                status, reply = await self.update(model, version)
                if status == 200:
                    return
                assert self.backend.kind.late, reply
                assert "requests are still running or queued" in reply["message"], reply
                await asyncio.sleep(0.02)

    async def label(self) -> str:
        _, info = await self.get("/model_info")
        label: str = info["weight_version"]
        return label


def _parsed(text: str) -> Any:
    return json.loads(text) if text.startswith(("{", "[", "null")) else text


class Stream:
    """A streaming request in the background. `result` is its last chunk."""

    def __init__(self, server: Server, rid: str, tokens: int) -> None:
        self.rid = rid
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._longer = asyncio.Event()
        params = {"max_new_tokens": tokens, "ignore_eos": True}
        body = {
            "input_ids": list(PROMPT),
            "rid": rid,
            "stream": True,
            "return_logprob": True,
            "sampling_params": params,
        }
        self._task = asyncio.create_task(self._read(server, body))
        self._task.add_done_callback(lambda _: self._longer.set())
        self.done_marks = 0
        self.chunks: list[Json] = []

    async def _read(self, server: Server, body: Json) -> Json:
        async with server.session.post(server.backend.url + "/generate", json=body) as reply:
            assert reply.status == 200
            assert reply.content_type == "text/event-stream"
            async for line in reply.content:
                if not line.startswith(b"data: "):
                    assert not line.strip()
                elif line.strip() == b"data: [DONE]":
                    self.done_marks += 1
                else:
                    self.chunks.append(json.loads(line[len(b"data: ") :]))
                    self._longer.set()
                    if not self._first.done():
                        self._first.set_result(None)
        return self.chunks[-1]

    async def first_chunk(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait({self._first, self._task}, return_when=asyncio.FIRST_COMPLETED)
        assert self._first.done(), await self._task

    async def grows(self, tokens: int) -> None:
        """Wait until it is longer by so many tokens than it is now, or has ended."""
        enough = len(self.chunks[-1]["output_ids"]) + tokens
        async with asyncio.timeout(LIMIT_S):
            while not self._task.done() and len(self.chunks[-1]["output_ids"]) < enough:
                self._longer.clear()
                await self._longer.wait()

    async def result(self) -> Json:
        async with asyncio.timeout(LIMIT_S):
            return await self._task


@pytest_asyncio.fixture
async def server(backend: Backend) -> AsyncIterator[Server]:
    """The server, serving the initial model as version 0 with nothing running."""
    headers = {"Authorization": f"Bearer {backend.security.token}"}
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0, ssl=backend.security.client_context())
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector, read_bufsize=1 << 20
    ) as session:
        server = Server(backend, session)
        yield server
        server.release()
        await server.ok("/pause_generation", {"mode": "abort"})
        await server.until_updated("base", "0")
        await server.ok("/continue_generation")


@pytest_asyncio.fixture
async def client(backend: Backend, server: Server) -> AsyncIterator[GenerationServerClient]:
    http = JsonHttp(backend.security)
    yield GenerationServerClient(http, backend.url)
    await http.close()


@pytest_asyncio.fixture
async def updater(backend: Backend) -> AsyncIterator[ServerUpdater]:
    http = JsonHttp(backend.security)
    can = BACKENDS[backend.name]
    yield ServerUpdater(
        http,
        ManagerEnd(),
        timeout_s=LIMIT_S,
        keeps_pictures=can.keeps_pictures,
        pause_ends_requests=can.pause_ends_requests,
    )
    await http.close()


@torch.no_grad()
def reference(
    models: Mapping[str, tuple[Path, Qwen2ForCausalLM]],
    model: str,
    output: Sequence[int],
    sampling: SamplingParams = PLAIN,
    prompt: Sequence[int] = PROMPT,
) -> list[float]:
    """Log-probabilities of `output` by a plain forward in float64, before the cut, which must have left each token but
    for rounding: the engines compute in float32."""
    logits = models[model][1](torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    probabilities = (logits / (sampling.temperature or 1.0)).softmax(-1)
    if sampling.temperature == 0:
        return [math.log(row[token]) for row, token in zip(probabilities, output, strict=True)]
    values = []
    for row, token in zip(probabilities, output, strict=True):
        ordered, order = row.sort(descending=True)
        keep = (ordered.cumsum(0) - ordered) <= sampling.top_p + TOLERANCE
        keep &= ordered >= sampling.min_p * ordered[0] - TOLERANCE
        if sampling.top_k > 0:
            keep &= ordered >= ordered[sampling.top_k - 1] - TOLERANCE
        assert token in order[keep].tolist(), "drawn from beyond the cut"
        values.append(math.log(row[token]))
    return values


def logprobs_of(reply: Json) -> list[float]:
    return [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]


def assert_close(actual: Sequence[float], expected: Sequence[float]) -> None:
    assert len(actual) == len(expected)
    assert max(abs(a - b) for a, b in zip(actual, expected, strict=True)) <= TOLERANCE


# ---- request and reply shapes


async def test_a_reply_holds_ids_logprobs_lengths_and_versions(server: Server) -> None:
    rid = server.rid()
    reply = await server.generate(rid=rid, sampling_params={"max_new_tokens": 3, "ignore_eos": True})
    assert set(reply) == {"output_ids", "meta_info"}
    meta, output = reply["meta_info"], reply["output_ids"]
    assert len(output) == 3
    assert meta["id"] == rid
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 3)
    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in output]
    assert meta["input_token_logprobs"] == []
    assert {"num_retractions", "cached_tokens", "e2e_latency"} <= set(meta)


async def test_ids_are_made_up_where_none_is_given(server: Server) -> None:
    params = {"max_new_tokens": 1}
    first, second = await server.generate(sampling_params=params), await server.generate(sampling_params=params)
    assert first["meta_info"]["id"] != second["meta_info"]["id"]


async def test_a_batch_is_answered_in_order_with_parameters_of_its_own(server: Server) -> None:
    lengths = [5, 1, 7]
    reply = await server.generate(
        input_ids=[[5], [6, 7], [8, 9, 10]],
        rid=[server.rid() for _ in lengths],
        sampling_params=[{"max_new_tokens": length, "ignore_eos": True} for length in lengths],
    )
    assert [len(item["output_ids"]) for item in reply] == lengths
    assert [item["meta_info"]["prompt_tokens"] for item in reply] == [1, 2, 3]


async def test_n_samples_of_one_prompt_come_as_a_list(server: Server) -> None:
    reply = await server.generate(sampling_params={"max_new_tokens": 8, "n": 3, "ignore_eos": True})
    assert [len(item["output_ids"]) for item in reply] == [8, 8, 8]
    assert len({tuple(item["output_ids"]) for item in reply}) > 1


async def test_more_requests_than_run_together_are_queued_and_answered(server: Server) -> None:
    params = {"max_new_tokens": 20, "ignore_eos": True}
    reply = await server.generate(input_ids=[list(PROMPT)] * (3 * RUNNING), sampling_params=params)
    assert [len(item["output_ids"]) for item in reply] == [20] * (3 * RUNNING)


async def test_a_stop_token_ends_the_answer_and_is_part_of_it(server: Server) -> None:
    reply = await server.generate(sampling_params={"max_new_tokens": 500, "stop_token_ids": list(range(10, VOCAB))})
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": reply["output_ids"][-1]}
    assert reply["output_ids"][-1] >= 10 or reply["output_ids"][-1] == EOS
    assert not any(token >= 10 for token in reply["output_ids"][:-1])
    assert len(logprobs_of(reply)) == len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"]


async def test_the_models_own_end_token_ends_the_answer_unless_ignored(server: Server) -> None:
    """So hot, each token is the end with a chance of about 0.024: there is none in 600 once in 10^6 times."""
    params = {"max_new_tokens": 150, "n": RUNNING, "temperature": 8.0}
    replies = await server.generate(sampling_params=params)
    ended = [reply for reply in replies if reply["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended
    assert all(reply["output_ids"].index(EOS) == len(reply["output_ids"]) - 1 for reply in ended)
    ignoring = await server.generate(sampling_params=params | {"ignore_eos": True})
    assert [len(reply["output_ids"]) for reply in ignoring] == [150] * RUNNING
    assert any(EOS in reply["output_ids"][:-1] for reply in ignoring)


async def test_a_stream_grows_chunk_by_chunk_and_ends_with_a_mark(server: Server) -> None:
    stream = await server.start(tokens=40)
    server.release()
    last = await stream.result()
    outputs = [chunk["output_ids"] for chunk in stream.chunks]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(outputs))
    assert len(last["output_ids"]) == len(logprobs_of(last)) == 40
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in stream.chunks[:-1])
    assert stream.done_marks == 1


# ---- errors


async def test_what_a_request_must_not_hold_is_refused_in_the_shape_of_its_origin(server: Server) -> None:
    body = {"input_ids": list(PROMPT), "sampling_params": {"max_new_tokens": 1}}
    unknown = await server.post("/generate", body | {"sampling_params": {"bogus": 1}})
    assert unknown[0] == 400
    assert "bogus" in unknown[1]["error"]
    for wrong in ({"input_ids": []}, {"input_ids": [5] * CONTEXT, "sampling_params": {"max_new_tokens": 1}}):
        status, reply = await server.post("/generate", wrong)
        assert (status, set(reply)) == (400, {"error"})
        assert reply["error"]["message"]
    for status, reply in (
        await server.post("/pause_generation", {"mode": "sideways"}),
        await server.post("/update_weights_from_disk", {}),
        await server.post("/continue_generation", raw=b"{"),
    ):
        assert status == 400
        assert (reply["object"], reply["type"], reply["code"]) == ("error", "Bad Request", 400)


async def test_a_prompt_and_answer_that_fill_the_context_are_served_and_one_token_more_is_refused(
    server: Server,
) -> None:
    prompt = [5] * (CONTEXT - 11)
    status, _ = await server.post("/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 10}})
    assert status == 200
    status, reply = await server.post("/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 12}})
    assert (status, set(reply)) == (400, {"error"})


async def test_an_id_in_use_is_refused(server: Server) -> None:
    stream = await server.start()
    status, reply = await server.post("/generate", {"input_ids": list(PROMPT), "rid": stream.rid})
    assert status == 400
    assert reply == {"error": {"message": f"Duplicate request ID detected: {stream.rid}"}}


async def test_everything_but_health_wants_the_token(backend: Backend) -> None:
    trusting = aiohttp.TCPConnector(ssl=backend.security.client_context())
    async with aiohttp.ClientSession(connector=trusting) as stranger:
        for path in ("/health", "/ready"):
            async with stranger.get(backend.url + path) as reply:
                assert reply.status == 200
        for path in ("/generate", "/pause_generation", "/update_weights_from_disk", "/abort_request"):
            async with stranger.post(backend.url + path, json={}) as reply:
                assert reply.status == 401
        async with stranger.get(backend.url + "/model_info", headers={"Authorization": "Bearer no"}) as reply:
            assert reply.status == 401


# ---- log-probabilities: at the sampling temperature, before top-k, top-p and min-p cut the distribution


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7),
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.6),
        SamplingParams(top_k=5),
        SamplingParams(top_k=1),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=0.7, top_k=9, top_p=0.8),
        SamplingParams(temperature=1.3, top_p=0.9, min_p=0.05),
        SamplingParams(temperature=0.0, top_p=0.5),
    ],
    ids=str,
)
async def test_logprobs_are_at_the_sampling_temperature_and_tokens_are_of_the_kept_ones(
    sampling: SamplingParams,
    client: GenerationServerClient,
    server: Server,
    models: Mapping[str, tuple[Path, Qwen2ForCausalLM]],
) -> None:
    items = [GenerateItem(wire_rid(f"r{next(Server._ids)}", i), PROMPT, 60) for i in range(3)]
    for completion in await client.generate(items, sampling, timeout_s=LIMIT_S):
        assert completion.versions == [0] * len(completion.token_ids)
        assert_close(completion.logprobs, reference(models, "base", completion.token_ids, sampling))


async def test_prompt_logprobs_are_at_temperature_1(
    server: Server, models: Mapping[str, tuple[Path, Qwen2ForCausalLM]]
) -> None:
    reply = await server.generate(
        logprob_start_len=0, sampling_params={"max_new_tokens": 1, "temperature": 0.5, "ignore_eos": True}
    )
    first, *others = reply["meta_info"]["input_token_logprobs"]
    assert first == [None, PROMPT[0], None]
    assert [entry[1] for entry in others] == list(PROMPT[1:])
    assert_close([entry[0] for entry in others], reference(models, "base", PROMPT[1:], prompt=PROMPT[:1]))


async def test_prompt_logprobs_after_an_update_owe_nothing_to_what_was_cached_before_it(
    server: Server, client: GenerationServerClient, models: Mapping[str, tuple[Path, Qwen2ForCausalLM]]
) -> None:
    prompt = [*PROMPT, *range(3, 13), VOCAB - 1, VOCAB - 2]
    for version, name in enumerate(("base", "next"), start=1):
        await server.until_updated(name, str(version))
        for _ in range(2):  # the second finds the first one's prefix in the cache
            served = await client.prompt_logprobs(prompt, 6, timeout_s=LIMIT_S)
            assert_close(served, reference(models, name, prompt[7:], prompt=prompt[:7]))


async def test_prompt_logprobs_show_a_cache_that_is_stale(
    server: Server, client: GenerationServerClient, models: Mapping[str, tuple[Path, Qwen2ForCausalLM]]
) -> None:
    """SGLang keeps its cached prefixes through an update that does not ask for the flush; the embedded engine never."""
    prompt = [*PROMPT, *range(3, 13), VOCAB - 1, VOCAB - 2]
    await client.prompt_logprobs(prompt, 6, timeout_s=LIMIT_S)
    status, _ = await server.update("next", "1", flush_cache=False)
    assert status == 200
    served = await client.prompt_logprobs(prompt, 6, timeout_s=LIMIT_S)
    expected = reference(models, "next", prompt[7:], prompt=prompt[:7])
    if not server.backend.kind.keeps_stale_prefixes:
        assert_close(served, expected)
    else:
        assert max(abs(a - b) for a, b in zip(served, expected, strict=True)) > 1e-2


async def test_a_prefix_in_the_cache_changes_no_logprob(
    server: Server, models: Mapping[str, tuple[Path, Qwen2ForCausalLM]]
) -> None:
    params = {"max_new_tokens": 30, "ignore_eos": True}
    first = await server.generate(sampling_params=params)
    longer = [*PROMPT, *first["output_ids"]]
    again = await server.generate(input_ids=longer, sampling_params=params)
    assert_close(logprobs_of(again), reference(models, "base", again["output_ids"], prompt=longer))


# ---- answers longer than a request


class OneServer:
    """The manager of a run with one server, as a `RolloutClient` asks it."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def schedule(self, request: RouteRequest, timeout_s: float) -> Route:
        return Route(self._url, 0)

    def release(self, request_id: str) -> None:
        """Nothing is kept."""

    async def lost_servers(self, after: int, timeout_s: float) -> LostServersReply:
        return await asyncio.get_running_loop().create_future()


async def test_what_a_group_shares_and_sends_first_is_not_computed_again(
    server: Server, models: Mapping[str, tuple[Path, Qwen2ForCausalLM]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, cached = parse_completion, []

    def noted(reply: Mapping[str, Any], *args: Any, **options: Any) -> Completion:
        cached.append(reply["meta_info"]["cached_tokens"])
        return parse(reply, *args, **options)

    monkeypatch.setattr(inference_client, "parse_completion", noted)
    prompt = tuple(3 + number * number % (VOCAB - 3) for number in range(FORK_SAVES // (RUNNING - 1) + 1))
    sampling = SamplingParams(max_new_tokens=5)
    manager = cast("ManagerClient", OneServer(server.backend.url))
    settings: Json = {"security": server.backend.security, "max_concurrent": 1, "request_timeout_s": 600.0}
    async with RolloutClient(manager, ServerCapabilities(cache=True), **settings) as client:
        result = await client.generate(GenerationRequest("q", prompt, RUNNING, sampling))
    first, *group = cached
    assert first < len(prompt) // 2
    assert len(group) == RUNNING
    assert [each.cached_tokens for each in result.completions] == [min(first, group[0]), *group[1:]]
    if not server.backend.kind.shares_within_a_call:  # else it is not asked so
        assert min(group) >= len(prompt) - 1
    for completion in result.completions:
        expected = reference(models, "base", completion.token_ids, sampling, prompt=list(prompt))
        assert_close(completion.logprobs, expected)


async def test_an_answer_of_a_server_that_was_silent_is_whole_and_the_same(
    server: Server, models: Mapping[str, tuple[Path, Qwen2ForCausalLM]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, whole_s, short_s = 400, 600.0, 0.0
    sampling = SamplingParams(max_new_tokens=tokens, top_p=0.9, seed=5)
    generate, calls = GenerationServerClient.generate, Counter[float]()

    async def counted(self: GenerationServerClient, *args: Any, **named: Any) -> list[Completion]:
        calls[limit_s] += 1
        if calls[short_s] == 2:  # the first is held for longer than its server may be silent
            server.release()
        return await generate(self, *args, **named)

    monkeypatch.setattr(GenerationServerClient, "generate", counted)
    whole: dict[float, tuple[Completion, ...]] = {}

    async def asked() -> None:
        manager = cast("ManagerClient", OneServer(server.backend.url))
        settings: Json = {"security": server.backend.security, "max_concurrent": 1, "max_failures": 100}
        async with RolloutClient(manager, request_timeout_s=limit_s, **settings) as client:
            whole[limit_s] = (await client.generate(GenerationRequest("q", PROMPT, RUNNING, sampling))).completions

    began, limit_s = time.monotonic(), whole_s
    await asked()
    limit_s = short_s = max(0.5, (time.monotonic() - began) / 2)  # a slow machine gets nowhere in half a second
    server.hold()
    await asked()
    server.hold()
    assert calls[whole_s] == 1
    if server.backend.kind.can_be_held:  # else it computes, and the call lasts
        assert calls[short_s] >= 2
    for completion in whole[short_s]:
        stopped = EOS in completion.token_ids
        assert len(completion.token_ids) == (completion.token_ids.index(EOS) + 1 if stopped else tokens)
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert completion.versions == [0] * len(completion.token_ids)
        assert_close(completion.logprobs, reference(models, "base", completion.token_ids, sampling))
    if not server.backend.kind.own_random_numbers:
        assert [made.token_ids for made in whole[short_s]] == [made.token_ids for made in whole[whole_s]]


async def test_a_stop_string_ends_an_answer_with_the_token_that_completes_it(
    server: Server, models: Mapping[str, tuple[Path, Qwen2ForCausalLM]]
) -> None:
    """By the client, in rounds: these servers have no tokenizer. The string lies across tokens."""

    def letters(token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)

    stop = tuple(letters([one, other]) for one in range(3, VOCAB, 4) for other in range(3, VOCAB, 3))
    sampling = SamplingParams(max_new_tokens=400, seed=5, stop=stop)
    made: dict[int, tuple[Completion, ...]] = {}
    for chunk in (0, 3):
        manager = cast("ManagerClient", OneServer(server.backend.url))
        settings: Json = {"security": server.backend.security, "max_concurrent": 1, "request_timeout_s": 600.0}
        can = ServerCapabilities(decode=letters)
        async with RolloutClient(manager, can, new_tokens_per_chunk=chunk, **settings) as client:
            made[chunk] = (await client.generate(GenerationRequest("q", PROMPT, RUNNING, sampling))).completions
        for completion in made[chunk]:
            ids = completion.token_ids
            assert completion.finish_reason == "stop"
            assert letters(ids[-2:]) in stop or ids[-1] == EOS
            assert not any(each in letters(ids[:-1]) for each in stop)
            assert_close(completion.logprobs, reference(models, "base", ids, sampling))
    if not server.backend.kind.own_random_numbers:
        assert [one.token_ids for one in made[0]] == [one.token_ids for one in made[3]]


# ---- aborts


async def test_an_abort_keeps_what_was_generated_so_far(
    server: Server, models: Mapping[str, tuple[Path, Qwen2ForCausalLM]]
) -> None:
    stream = await server.start()
    assert await server.ok("/abort_request", {"rid": stream.rid}) == ""
    reply = await stream.result()
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(reply["output_ids"]) < ENDLESS
    assert reply["meta_info"]["completion_tokens"] == len(reply["output_ids"])
    assert_close(logprobs_of(reply), reference(models, "base", reply["output_ids"]))


async def test_an_abort_hits_ids_that_begin_alike_but_none_of_the_clients(
    server: Server, client: GenerationServerClient
) -> None:
    base = server.rid().strip(";")
    first, longer = await asyncio.gather(server.start(rid=f"{base}-1"), server.start(rid=f"{base}-10"))
    await server.ok("/abort_request", {"rid": f"{base}-1"})
    assert (await first.result())["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await longer.result())["meta_info"]["finish_reason"]["type"] == "abort"

    one, ten = wire_rid(base, 1), wire_rid(base, 10)
    ended, kept = await asyncio.gather(server.start(rid=one), server.start(tokens=150, rid=ten))
    await client.abort(one)
    assert (await ended.result())["meta_info"]["finish_reason"]["type"] == "abort"
    server.release()
    assert (await kept.result())["meta_info"]["finish_reason"] == {"type": "length", "length": 150}


async def test_an_abort_in_the_queue_has_no_output_and_is_understood(
    server: Server, client: GenerationServerClient
) -> None:
    running = await asyncio.gather(*[server.start() for _ in range(RUNNING)])
    rid = wire_rid(server.rid().strip(";"), 0)
    queued = asyncio.create_task(client.generate([GenerateItem(rid, PROMPT, 50)], PLAIN, timeout_s=LIMIT_S))
    await until_load(server, lambda load: load["num_waiting_reqs"] > 0)
    await client.abort(rid)
    (completion,) = await queued
    assert (completion.finish_reason, completion.token_ids, completion.logprobs) == ("abort", [], [])
    await server.ok("/abort_request", {"abort_all": True})
    for stream in running:
        assert (await stream.result())["meta_info"]["finish_reason"]["type"] == "abort"


async def load_of(server: Server) -> Json:
    """Return the number of running and waiting requests, from where each engine reports it."""
    path, key = server.backend.kind.load
    _, reply = await server.get(path)
    load: Json = reply[key][0]
    return load


async def until_load(server: Server, condition: Callable[[Json], bool]) -> None:
    """Wait until the server's load is as `condition` wants it."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            if condition(await load_of(server)):
                return
            await asyncio.sleep(0.02)


async def test_aborting_an_unknown_id_is_no_error(server: Server) -> None:
    assert await server.ok("/abort_request", {"rid": "nobody;"}) == ""


async def test_a_client_that_goes_away_ends_its_request(server: Server) -> None:
    rid = server.rid()
    params = {"max_new_tokens": ENDLESS, "ignore_eos": True}
    server.hold()
    call = asyncio.create_task(server.generate(rid=rid, sampling_params=params))
    await until_load(server, lambda load: load["num_running_reqs"] > 0)
    call.cancel()
    await until_load(server, lambda load: load["num_running_reqs"] == 0)
    again = {"rid": rid, "input_ids": list(PROMPT), "sampling_params": {"max_new_tokens": 1}}
    async with asyncio.timeout(LIMIT_S):
        while True:  # SGLang knows the id for a moment after the request has ended
            status, reported = await server.post("/generate", again)
            if status == 200:
                return
            assert server.backend.kind.late, reported
            assert "Duplicate request ID" in str(reported), reported
            await asyncio.sleep(0.02)


# ---- pausing


async def test_a_pause_that_aborts_returns_partial_answers_and_holds_new_requests(server: Server) -> None:
    stream = await server.start()
    reply = await server.ok("/pause_generation", {"mode": "abort"})
    assert reply == {"message": "Generation paused successfully.", "status": "ok"}
    assert (await stream.result())["meta_info"]["finish_reason"]["type"] == "abort"
    held = asyncio.create_task(server.generate(sampling_params={"max_new_tokens": 2, "ignore_eos": True}))
    done, _ = await asyncio.wait({held}, timeout=0.5)
    assert not done
    assert (await server.ok("/continue_generation"))["status"] == "ok"
    assert len((await held)["output_ids"]) == 2


@pytest.mark.parametrize(("mode", "retractions"), [("retract", 1), ("in_place", 0)])
async def test_a_pause_that_keeps_requests_lets_them_finish_afterwards(
    mode: str, retractions: int, server: Server, models: Mapping[str, tuple[Path, Qwen2ForCausalLM]]
) -> None:
    stream = await server.start(server.long)
    await server.ok("/pause_generation", {"mode": mode})
    await server.ok("/continue_generation")
    server.release()
    await stream.grows(64)
    reply = await server.end(stream)
    if server.backend.kind.can_be_held:
        assert len(reply["output_ids"]) == server.long
    assert reply["meta_info"]["num_retractions"] == retractions
    assert_close(logprobs_of(reply), reference(models, "base", reply["output_ids"]))


async def test_a_paused_server_is_not_ready_and_says_so_at_once(server: Server, client: GenerationServerClient) -> None:
    await client.ready(timeout_s=LIMIT_S)
    await server.ok("/pause_generation", {"mode": "abort"})
    async with asyncio.timeout(15):  # /health_generate would take 20 s
        status, _ = await server.get("/ready")
    assert status == 503
    await server.ok("/continue_generation")
    assert (await server.get("/ready"))[0] == 200


async def test_continuing_what_is_not_paused_is_harmless(server: Server) -> None:
    assert (await server.ok("/continue_generation", {"torch_empty_cache": True}))["status"] == "ok"


# ---- weights


async def test_an_update_replaces_weights_label_and_path(
    server: Server, models: Mapping[str, tuple[Path, Qwen2ForCausalLM]]
) -> None:
    status, reply = await server.update("next", "1")
    assert status == 200
    assert reply["success"] is True
    assert reply["num_paused_requests"] == 0
    _, info = await server.get("/model_info")
    assert (info["weight_version"], info["model_path"]) == ("1", str(server.backend.models["next"]))
    output = await server.generate(sampling_params={"max_new_tokens": 40, "ignore_eos": True})
    assert output["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 40}]
    assert_close(logprobs_of(output), reference(models, "next", output["output_ids"]))


async def test_no_cached_prefix_of_the_old_weights_is_used(
    server: Server, models: Mapping[str, tuple[Path, Qwen2ForCausalLM]]
) -> None:
    prompt = [5 + i % 30 for i in range(200)]
    params = {"max_new_tokens": 20, "ignore_eos": True}
    for model, version in (("base", "0"), ("next", "1"), ("base", "2")):
        await server.until_updated(model, version)
        reply = await server.generate(input_ids=prompt, sampling_params=params)
        assert_close(logprobs_of(reply), reference(models, model, reply["output_ids"], prompt=prompt))


async def test_an_interrupting_update_aborts_what_runs_and_the_answer_goes_on_with_the_new_weights(
    server: Server, client: GenerationServerClient, models: Mapping[str, tuple[Path, Qwen2ForCausalLM]]
) -> None:
    stream = await server.start()
    await client.pause(PauseMode.abort)
    await client.update_weights(str(server.backend.models["next"]), 1, timeout_s=LIMIT_S)
    await client.resume()
    server.release()
    partial = await stream.result()
    done = partial["output_ids"]
    assert partial["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": len(done)}]
    prefix = [*PROMPT, *done]
    (rest,) = await client.generate(
        [GenerateItem(wire_rid(server.rid().strip(";"), 0, 1), prefix, 30)], PLAIN, timeout_s=LIMIT_S
    )
    assert rest.versions == [1] * len(rest.token_ids)
    assert_close(rest.logprobs, reference(models, "next", rest.token_ids, prompt=prefix))


async def test_an_update_can_abort_what_runs_by_itself(server: Server) -> None:
    """SGLang's race is that of the test below."""
    stream = await server.start()
    status, reported = await server.update("next", "1", abort_all_requests=True)
    assert status == 200 or (server.backend.kind.late and "Weights were updated, but" in reported["message"]), reported
    reply = await stream.result()
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert {span["version"] for span in reply["meta_info"]["weight_versions"]} == {"0"}


async def test_an_update_waits_for_what_runs_unless_told_otherwise(server: Server) -> None:
    """SGLang now and then finds the last request not quite gone and answers 400, weights replaced: once more."""
    stream = await server.start(tokens=300)
    server.release()
    status, reply = await server.update("next", "1")
    assert status == 200 or (server.backend.kind.late and "Weights were updated, but" in reply["message"]), reply
    assert (await stream.result())["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 300}]
    await server.until_updated("next", "1")


async def test_updates_of_a_paused_server_never_fail_however_much_runs_and_waits(server: Server) -> None:
    """Twice as many as run together: half of them are of version 0 at first, the others of the versions they met."""
    running = await asyncio.gather(*(server.start(server.long) for _ in range(RUNNING)))
    params = {"max_new_tokens": 5, "ignore_eos": True}
    waiting = asyncio.create_task(server.generate(input_ids=[list(PROMPT)] * RUNNING, sampling_params=params))
    await until_load(server, lambda load: load["num_waiting_reqs"] > 0)
    for version in range(1, 5):
        await until_load(server, lambda load: load["num_running_reqs"] > 0)
        await server.ok("/pause_generation", {"mode": "retract"})
        status, reply = await server.update(("base", "next")[version % 2], str(version))
        assert status == 200, reply
        await server.ok("/continue_generation")
    server.release()
    first, *others = running
    if not server.backend.kind.can_be_held:
        await server.ok("/abort_request", {"rid": first.rid})
    for answer in await waiting:
        assert {span["version"] for span in answer["meta_info"]["weight_versions"]} <= set("1234")
    for stream in others:  # which went on beside them
        spans = [span["version"] for span in (await server.end(stream))["meta_info"]["weight_versions"]]
        assert spans == sorted(spans)
        assert (spans[0], spans[-1]) == ("0", "4")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_versions_are_told_token_by_token_across_an_update(
    mode: str,
    server: Server,
    client: GenerationServerClient,
    models: Mapping[str, tuple[Path, Qwen2ForCausalLM]],
) -> None:
    assert await client.tells_token_versions(timeout_s=LIMIT_S)
    stream = await server.start(server.long)
    await server.ok("/pause_generation", {"mode": mode})
    status, reply = await server.update("next", "1", flush_cache=mode == "retract")
    assert status == 200, reply
    await server.ok("/continue_generation")
    result = await server.end(stream)
    old, new = result["meta_info"]["weight_versions"]
    output, boundary = result["output_ids"], old["end"]
    assert (old["version"], old["start"], new["version"], new["end"]) == ("0", 0, "1", len(output))
    assert old["end"] == new["start"]
    assert_close(logprobs_of(result)[:boundary], reference(models, "base", output[:boundary]))
    if mode == "retract":  # in place, the cache of the old weights is kept
        expected = reference(models, "next", output[boundary:], prompt=[*PROMPT, *output[:boundary]])
        assert_close(logprobs_of(result)[boundary:], expected)


@pytest.mark.parametrize("mode", [PauseMode.retract, PauseMode.in_place])
async def test_an_update_that_keeps_requests_keeps_those_in_the_queue_too_in_their_order(
    mode: PauseMode, server: Server, updater: ServerUpdater
) -> None:
    """Twice as many as run together: the first half spans both versions, the second is of the new one alone."""
    running = await asyncio.gather(*(server.start(server.long) for _ in range(RUNNING)))
    queued = [
        asyncio.create_task(
            server.generate(rid=server.rid(), sampling_params={"max_new_tokens": 5, "ignore_eos": True})
        )
        for _ in range(RUNNING)
    ]
    order = BeginUpdate(0, server.backend.url, 1, Target(1, str(server.backend.models["next"])), pause=mode)
    await updater.update(order)
    server.release()
    first, *others = running
    if not server.backend.kind.can_be_held:
        await server.ok("/abort_request", {"rid": first.rid})  # perhaps before it wrote on
    answers = await asyncio.gather(*queued)
    for stream in others:
        spans = (await server.end(stream))["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["0", "1"]
    for answer in answers:
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "length"
        assert [span["version"] for span in meta["weight_versions"]] == ["1"]


async def test_a_colocated_server_sleeps_and_goes_on_with_the_same_tokens(
    server: Server, updater: ServerUpdater, models: Mapping[str, tuple[Path, Qwen2ForCausalLM]]
) -> None:
    greedy = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0}
    expected = (await server.generate(sampling_params=greedy))["output_ids"]
    stream = await server.start()
    await updater.put_to_sleep(Sleep(0, server.backend.url, 1))
    begun = await stream.result()
    assert begun["meta_info"]["finish_reason"]["type"] == "abort"
    assert_close(logprobs_of(begun), reference(models, "base", begun["output_ids"]))
    held = asyncio.create_task(server.generate(sampling_params=greedy))
    if server.backend.kind.refuses_asleep:
        assert (await server.post("/continue_generation"))[0] == 400
        assert (await server.update("next", "1"))[0] == 400
    server.release()
    order = BeginUpdate(
        0,
        server.backend.url,
        1,
        Target(1, str(server.backend.models["base"])),
        PauseMode.abort,
        released=frozenset(MemoryTag),
        slept=True,
    )
    resumed: list[frozenset[MemoryTag]] = []
    await updater.update(order, lambda tags: resumed.append(frozenset(tags)))
    assert resumed == [{MemoryTag.weights}, {MemoryTag.kv_cache, MemoryTag.cuda_graph}]
    assert (await held)["output_ids"] == expected
    output = await server.generate(sampling_params=greedy)
    assert (output["output_ids"], output["meta_info"]["weight_version"]) == (expected, "1")


async def test_a_failed_update_in_place_leaves_no_server_that_cannot_be_updated(
    server: Server, updater: ServerUpdater
) -> None:
    stream = await server.start(server.long)
    url = server.backend.url
    order = BeginUpdate(0, url, 1, Target(1, "/nowhere"), PauseMode.in_place)
    with pytest.raises(UpdateFailed):
        await updater.update(order)
    again = BeginUpdate(0, url, 2, Target(2, str(server.backend.models["next"])), PauseMode.abort, frozen=True)
    await updater.update(again)
    assert (await stream.result())["meta_info"]["finish_reason"]["type"] == "abort"
    server.release()
    output = await server.generate(sampling_params={"max_new_tokens": 5, "ignore_eos": True})
    assert output["meta_info"]["weight_version"] == "2"


async def test_a_missing_folder_is_refused_and_the_old_weights_go_on(
    server: Server, client: GenerationServerClient, models: Mapping[str, tuple[Path, Qwen2ForCausalLM]]
) -> None:
    with pytest.raises(UpdateFailed):
        await client.update_weights(str(server.backend.models["base"] / "nowhere"), 7, timeout_s=LIMIT_S)
    status, reply = await server.post("/update_weights_from_disk", {"model_path": "/nowhere", "weight_version": "7"})
    assert (status, reply["success"]) == (400, False)
    assert await server.label() == "0"
    output = await server.generate(sampling_params={"max_new_tokens": 10, "ignore_eos": True})
    assert_close(logprobs_of(output), reference(models, "base", output["output_ids"]))


async def test_a_refused_update_leaves_the_weights_unknown_until_a_whole_one_succeeds(
    server: Server, client: GenerationServerClient, models: Mapping[str, tuple[Path, Qwen2ForCausalLM]]
) -> None:
    """SGLang answers 400 here and has replaced the weights all the same; the embedded engine has not."""
    stream = await server.start()
    await server.ok("/pause_generation", {"mode": "in_place"})
    with pytest.raises(UpdateFailed):
        await client.update_weights(str(server.backend.models["next"]), 1, timeout_s=LIMIT_S)
    await server.ok("/continue_generation")
    await server.ok("/abort_request", {"rid": stream.rid})
    await stream.result()
    server.release()
    await server.until_updated("next", "2")
    output = await server.generate(sampling_params={"max_new_tokens": 20, "ignore_eos": True})
    assert output["meta_info"]["weight_version"] == "2"
    assert_close(logprobs_of(output), reference(models, "next", output["output_ids"]))


@pytest.fixture(params=["tensor", "distributed"])
def transport(request: pytest.FixtureRequest, backend: Backend) -> Callable[[JsonHttp, int], ServerConnection]:
    """Makes a transport to the server, for buckets of a given size."""
    if request.param not in BACKENDS[backend.name].weight_transports:
        pytest.skip(f"{backend.name} does not take weights by {request.param}")

    def make(http: JsonHttp, bucket_bytes: int) -> ServerConnection:
        if request.param == "tensor":
            return SharedMemoryConnection(backend.url, http, timeout_s=LIMIT_S, bucket_bytes=bucket_bytes)
        group = f"test-{next(Server._ids)}"
        return ProcessGroupConnection(
            backend.url,
            http,
            host="127.0.0.1",
            backend="gloo",
            timeout_s=LIMIT_S,
            group=group,
            bucket_bytes=bucket_bytes,
        )

    return make


async def test_weights_from_memory_are_those_from_disk(
    transport: Callable[[JsonHttp, int], ServerConnection],
    server: Server,
    client: GenerationServerClient,
    models: Mapping[str, tuple[Path, Qwen2ForCausalLM]],
) -> None:
    http = JsonHttp(server.backend.security)
    channel = transport(http, 4096)  # some 20 buckets
    await channel.open()
    stream = await server.start(server.long)
    for version, model in ((1, "next"), (2, "base"), (3, "next")):
        weights = Qwen2ForCausalLM.from_pretrained(server.backend.models[model]).state_dict()
        tensors = [(name, tensor) for name, tensor in weights.items() if name != "lm_head.weight"]
        await client.pause(PauseMode.retract)
        await channel.send(tensors, version)
        await client.resume()
        assert await client.served_version() == version
        (completion,) = await client.generate(
            [GenerateItem(wire_rid(f"m{next(Server._ids)}", 0), PROMPT, 20)], PLAIN, timeout_s=LIMIT_S
        )
        assert completion.versions == [version] * len(completion.token_ids)
        assert_close(completion.logprobs, reference(models, model, completion.token_ids))
    spans = (await server.end(stream))["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "1", "2", "3"]
    await channel.close()
    await http.close()


async def test_weights_from_memory_leave_frozen_requests_their_cache_where_told_so(
    transport: Callable[[JsonHttp, int], ServerConnection], server: Server, client: GenerationServerClient
) -> None:
    http = JsonHttp(server.backend.security)
    channel = transport(http, 4096)
    await channel.open()
    weights = Qwen2ForCausalLM.from_pretrained(server.backend.models["next"]).state_dict()
    tensors = [(name, tensor) for name, tensor in weights.items() if name != "lm_head.weight"]
    stream = await server.start(server.long)
    await client.pause(PauseMode.in_place)
    await channel.send(tensors, 1, keep_cache=True)
    await client.resume()
    meta = (await server.end(stream))["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == ["0", "1"]
    assert meta["num_retractions"] == 0
    await channel.close()
    await http.close()


# ---- state


async def test_state_is_told_in_the_same_words(server: Server) -> None:
    _, info = await server.get("/model_info")
    assert info["model_path"] == str(server.backend.models["base"])
    assert info["is_generation"] is True
    _, details = await server.get("/server_info")
    assert details["status"] == "ready"
    assert details["max_total_num_tokens"] >= RUNNING * CONTEXT
    status, metrics = await server.get("/metrics")
    assert status == 200
    assert "sglang:num_running_reqs" in metrics
    assert "sglang:generation_tokens_total" in metrics
