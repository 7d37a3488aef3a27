"""The embedded server over real sockets: SGLang's request and reply forms, control, weight updates."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.scheduler import DecodeBatch
from asyncrl.inference.embedded.server import Server, serve
from asyncrl.inference.random_streams import derive_seed

from ..held_engine import HELD_AT, held_step

VOCAB, EOS, CONTEXT = 40, 2, 1200
TOKEN = "secret"
LIMIT_S = 300.0


def make_model(seed: int, hidden: int = 16) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=hidden,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            eos_token_id=EOS,
        )
    ).eval()


class Letters:
    """One letter a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 48 for letter in text]

    def decode(self, token_ids: Any) -> str:
        return "".join(chr(48 + token) for token in token_ids)


class Client:
    def __init__(self, session: aiohttp.ClientSession, server: Server, engine: GenerationEngine) -> None:
        self.session, self.server, self.engine = session, server, engine
        self.held = threading.Event()
        """While it is set the engine generates no more than `HELD_AT` tokens of an answer."""

    async def post(self, path: str, body: Any = None, raw: bytes | None = None) -> tuple[int, Any]:
        data = json.dumps(body) if raw is None else raw
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.server.url + path, data=data, headers=headers) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.server.url + path) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def generate(self, **body: Any) -> Any:
        status, reply = await self.post("/generate", body)
        assert status == 200, reply
        return reply

    def start(self, rid: str, tokens: int = 1100, **params: Any) -> asyncio.Task[Any]:
        """A request that is under way until something ends it, or until `held` is cleared."""
        assert tokens > HELD_AT
        self.held.set()
        params = {"max_new_tokens": tokens, "ignore_eos": True, **params}
        return asyncio.create_task(
            self.generate(input_ids=[5, 6, 7], rid=rid, sampling_params=params, return_logprob=True)
        )

    async def until_running(self, count: int) -> None:
        """Wait for the server to report `count` running samples."""
        await self.until("num_running_reqs", count)

    async def until(self, name: str, count: int) -> None:
        """Ask for the load until its field `name` says `count`."""
        async with asyncio.timeout(LIMIT_S):
            while (await self.get("/server_info"))[1]["internal_states"][0][name] != count:
                continue


@pytest_asyncio.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    engine = GenerationEngine(make_model(0), max_running_requests=8, detokenize=Letters().decode)
    server = await serve(engine, token=TOKEN, tokenizer=Letters())
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        client = Client(session, server, engine)
        monkeypatch.setattr(DecodeBatch, "step", held_step(client.held.is_set))
        engine.start()
        yield client
    await server.close()
    engine.close(LIMIT_S)


async def test_reply_has_sglangs_form(client: Client) -> None:
    reply = await client.generate(
        input_ids=[10, 11, 12, 13],
        rid="req-1",
        sampling_params={"max_new_tokens": 3, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
    )
    assert set(reply) == {"text", "output_ids", "meta_info"}
    meta = reply["meta_info"]
    assert meta["id"] == "req-1"
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["num_retractions"]) == (4, 3, 0)
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [10, 11, 12, 13]
    assert meta["input_token_logprobs"][0] == [None, 10, None]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    assert meta["output_token_logprobs_length"] == 3
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
    assert reply["text"] == Letters().decode(reply["output_ids"])


async def test_batch_and_n_give_a_list_in_order_with_streams_split_from_one_seed(client: Client) -> None:
    params = {"max_new_tokens": 6, "ignore_eos": True, "n": 2, "sampling_seed": 9}
    replies = await client.generate(input_ids=[[3, 4], [5]], rid="b", sampling_params=params)
    assert [reply["meta_info"]["id"] for reply in replies] == ["b_0", "b_1", "b_2", "b_3"]
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [2, 2, 1, 1]
    alone = {"max_new_tokens": 6, "ignore_eos": True, "sampling_seed": derive_seed(9, 1)}
    reply = await client.generate(input_ids=[3, 4], sampling_params=alone)
    assert reply["output_ids"] == replies[1]["output_ids"]
    assert replies[0]["output_ids"] != replies[1]["output_ids"]


async def test_stop_token_is_included_and_named(client: Client) -> None:
    everything = list(range(VOCAB))
    reply = await client.generate(input_ids=[3], sampling_params={"stop_token_ids": everything}, return_logprob=True)
    assert len(reply["output_ids"]) == 1
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": reply["output_ids"][0]}
    assert reply["meta_info"]["input_token_logprobs"] == []


async def test_stop_string_ends_the_sample_and_is_cut_from_the_text(client: Client) -> None:
    params = {"max_new_tokens": 500, "ignore_eos": True, "sampling_seed": 4}
    full = await client.generate(text="345", sampling_params={**params, "max_new_tokens": 40})
    stop = full["text"][20:22]
    reply = await client.generate(text="345", sampling_params={**params, "stop": stop})
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert reply["text"] == full["text"].partition(stop)[0]
    assert len(reply["output_ids"]) == len(reply["text"]) + 2


async def test_streaming_is_cumulative_and_ends_with_done(client: Client) -> None:
    body = {"input_ids": [3, 4], "stream": True, "sampling_params": {"max_new_tokens": 12, "ignore_eos": True}}
    chunks = []
    async with client.session.post(client.server.url + "/generate", json=body) as reply:
        assert reply.content_type == "text/event-stream"
        async for line in reply.content:
            if line.startswith(b"data: "):
                chunks.append(line[6:].strip())
    assert chunks.pop() == b"[DONE]"
    outputs = [json.loads(chunk) for chunk in chunks]
    for before, after in itertools.pairwise(outputs):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    assert outputs[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ({"input_ids": [1], "sampling_params": {"bogus": 1}}, "contract"),
        ({"input_ids": "no"}, "schema"),
        ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "schema"),
        ({"input_ids": []}, "handler"),
        ({}, "handler"),
        ({"input_ids": [VOCAB]}, "handler"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": CONTEXT}}, "handler"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "handler"),
        ({"input_ids": [1], "sampling_params": {"regex": "a*"}}, "handler"),
        ({"input_ids": [1], "top_logprobs_num": 3}, "handler"),
        ({"input_ids": [1, [2]]}, "schema"),
        ({"text": []}, "schema"),
        ({"input_ids": [1], "rid": ["a", ""]}, "schema"),
        ({"input_ids": [1], "sampling_params": [{}, {}]}, "handler"),
    ],
)
async def test_refusals_have_sglangs_three_shapes(client: Client, body: Any, shape: str) -> None:
    status, reply = await client.post("/generate", body)
    assert status == 400
    if shape == "contract":
        assert reply["error"].startswith("unknown field `bogus`, expected one of `max_new_tokens`")
    elif shape == "schema":
        assert reply["object"] == "error"
        assert (reply["type"], reply["param"], reply["code"]) == ("Bad Request", None, 400)
    else:
        assert set(reply["error"]) == {"message"}


async def test_empty_and_broken_bodies_are_schema_errors(client: Client) -> None:
    for raw in (b"", b"{", b"[1]"):
        status, reply = await client.post("/continue_generation", raw=raw)
        assert (status, reply["object"]) == (400, "error")


async def test_a_wrong_field_is_refused_with_its_path_and_what_was_expected(client: Client) -> None:
    _, reply = await client.post("/update_weights_from_disk", {"model_path": "/m", "flush_cache": "no"})
    assert "Expected `bool`, got `str` - at `$.flush_cache`" in reply["message"]
    _, reply = await client.post("/generate", {"input_ids": [[1], [2, "x"]]})
    assert "at `$.input_ids[" in reply["message"]


async def test_null_means_the_default(client: Client) -> None:
    params = {"max_new_tokens": 2, "ignore_eos": True, "stop": None, "top_p": None, "regex": None}
    reply = await client.generate(input_ids=[1], sampling_params=params, rid=None, return_logprob=None)
    assert len(reply["output_ids"]) == 2


async def test_a_stranger_gets_nothing_but_health(client: Client) -> None:
    async with aiohttp.ClientSession() as stranger:
        for path in ("/generate", "/pause_generation"):
            async with stranger.post(client.server.url + path, json={}) as reply:
                assert reply.status == 401
        async with stranger.get(client.server.url + "/model_info") as reply:
            assert reply.status == 401
        for path in ("/health", "/ready", "/metrics"):
            async with stranger.get(client.server.url + path) as reply:
                assert reply.status == 200


async def test_duplicate_rid_is_refused_while_in_use(client: Client) -> None:
    task = client.start("same")
    await client.until_running(1)
    status, reply = await client.post("/generate", {"input_ids": [1], "rid": "same"})
    assert (status, reply["error"]["message"]) == (400, "Duplicate request ID detected: same")
    await client.post("/abort_request", {"rid": "same"})
    assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
    await client.generate(input_ids=[1], rid="same", sampling_params={"max_new_tokens": 1})


async def test_abort_matches_by_prefix_and_keeps_partial_output(client: Client) -> None:
    tasks = [client.start(rid) for rid in ("a-1", "a-10", "b-1")]
    await client.until_running(3)
    assert await client.post("/abort_request", {"rid": "a-1"}) == (200, "")
    first, second = await tasks[0], await tasks[1]
    for reply in (first, second):
        meta = reply["meta_info"]
        assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        assert meta["completion_tokens"] == len(reply["output_ids"]) > 0
        assert len(meta["output_token_logprobs"]) == len(reply["output_ids"])
    assert not tasks[2].done()
    assert await client.post("/abort_request", {"abort_all": True}) == (200, "")
    await tasks[2]
    assert await client.post("/abort_request", {"rid": "unknown"}) == (200, "")
    assert (await client.post("/abort_request", {}))[0] == 400


async def test_a_queued_abort_has_its_own_shape(client: Client) -> None:
    await client.post("/pause_generation", {})
    task = client.start("queued")
    await client.until("num_waiting_reqs", 1)
    await client.post("/abort_request", {"rid": "queued"})
    reply = await task
    assert reply["output_ids"] == []
    assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert reply["meta_info"]["completion_tokens"] == 0
    assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & set(reply["meta_info"])


async def test_pause_abort_returns_partial_output_and_holds_new_requests(client: Client) -> None:
    task = client.start("running")
    await client.until_running(1)
    status, reply = await client.post("/pause_generation", {})
    assert (status, reply) == (200, {"message": "Generation paused successfully.", "status": "ok"})
    assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
    held = client.start("held", tokens=20)
    await client.until("num_waiting_reqs", 1)
    assert (await client.get("/ready"))[0] == 503
    assert (await client.get("/health"))[0] == 200
    assert not held.done()
    status, reply = await client.post("/continue_generation", {})
    assert (status, reply) == (200, {"message": "Generation continued successfully.", "status": "ok"})
    client.held.clear()
    assert len((await held)["output_ids"]) == 20
    assert (await client.post("/pause_generation", {"mode": "nap"}))[0] == 400


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_paused_requests_go_on_with_mixed_versions(client: Client, tmp_path: Path, mode: str) -> None:
    make_model(1).save_pretrained(tmp_path)
    task = client.start("mixed")
    await client.until_running(1)
    await client.post("/pause_generation", {"mode": mode})
    update = {"model_path": str(tmp_path), "weight_version": "v1", "flush_cache": mode == "retract"}
    status, reply = await client.post("/update_weights_from_disk", update)
    assert status == 200, reply
    assert reply["success"]
    await client.post("/continue_generation", {})
    client.held.clear()
    meta = (await task)["meta_info"]
    old, new = meta["weight_versions"]
    assert (old["version"], old["start"], new["version"], new["end"]) == ("default", 0, "v1", 1100)
    assert old["end"] == new["start"] > 0
    assert meta["num_retractions"] == (mode == "retract")
    assert meta["weight_version"] == "v1"


async def test_an_update_with_flush_is_refused_over_frozen_requests_and_changes_nothing(
    client: Client, tmp_path: Path
) -> None:
    make_model(1).save_pretrained(tmp_path)
    before = await score(client)
    task = client.start("frozen")
    await client.until_running(1)
    await client.post("/pause_generation", {"mode": "in_place"})
    status, reply = await client.post(
        "/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "v1"}
    )
    assert (status, reply["success"]) == (400, False)
    await client.post("/continue_generation", {})
    await client.post("/abort_request", {"rid": "frozen"})
    await task
    assert (await client.get("/model_info"))[1]["weight_version"] == "default"
    assert await score(client) == before


async def score(client: Client) -> list[float]:
    reply = await client.generate(
        input_ids=[4, 5, 6, 7],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    return [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]


async def test_an_update_serves_the_new_weights_exactly(client: Client, tmp_path: Path) -> None:
    model = make_model(7)
    model.save_pretrained(tmp_path, max_shard_size="3KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    before = await score(client)
    status, reply = await client.post("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "7"})
    assert (status, reply["success"]) == (200, True)
    assert reply["message"] == "Succeeded to update model weights. Weight version updated to 7."
    after = await score(client)
    with torch.no_grad():
        logprobs = model(torch.tensor([[4, 5, 6, 7]])).logits[0].log_softmax(-1)
    expected = [logprobs[i, t].item() for i, t in enumerate((5, 6, 7))]
    assert after == pytest.approx(expected, abs=1e-6)
    assert after != pytest.approx(before, abs=1e-3)
    info = (await client.get("/model_info"))[1]
    assert (info["weight_version"], info["model_path"]) == ("7", str(tmp_path))


async def test_a_bad_checkpoint_is_refused_and_the_old_weights_keep_serving(client: Client, tmp_path: Path) -> None:
    before = await score(client)
    make_model(1, hidden=32).save_pretrained(tmp_path / "shape")
    make_model(1).save_pretrained(tmp_path / "torn")
    shard = tmp_path / "torn" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    for folder in ("shape", "torn", "absent"):
        body = {"model_path": str(tmp_path / folder), "weight_version": "bad"}
        status, reply = await client.post("/update_weights_from_disk", body)
        assert (status, reply["success"], reply["num_paused_requests"]) == (400, False, 0)
        assert folder in reply["message"] or "shape" in reply["message"]
    assert await score(client) == before
    assert (await client.get("/model_info"))[1]["weight_version"] == "default"


async def test_an_unpaused_update_waits_for_what_is_in_flight(client: Client, tmp_path: Path) -> None:
    make_model(1).save_pretrained(tmp_path)
    running = client.start("before", tokens=300)
    await client.until_running(1)
    update = asyncio.create_task(
        client.post("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "v1"})
    )
    async with asyncio.timeout(LIMIT_S):
        while not client.engine._updates.waiting:  # noqa: ASYNC110 - the engine's thread sets no event of this loop
            await asyncio.sleep(0)
    assert (await client.get("/model_info"))[1]["weight_version"] == "default"
    client.held.clear()
    assert (await update)[0] == 200
    after = await client.generate(
        input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 3, "ignore_eos": True}, return_logprob=True
    )
    assert (await running)["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 300}]
    assert after["meta_info"]["weight_versions"] == [{"version": "v1", "start": 0, "end": 3}]


async def test_abort_all_requests_makes_an_update_immediate(client: Client, tmp_path: Path) -> None:
    make_model(1).save_pretrained(tmp_path)
    running = client.start("long")
    await client.until_running(1)
    body = {"model_path": str(tmp_path), "abort_all_requests": True}
    assert (await client.post("/update_weights_from_disk", body))[0] == 200
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await client.get("/model_info"))[1]["weight_version"] == "default"


async def test_a_client_that_leaves_frees_its_samples(client: Client) -> None:
    task = client.start("gone")
    await client.until_running(1)
    task.cancel()
    await client.until_running(0)
    stats = client.engine.stats()
    assert (stats.aborted_requests, stats.waiting) == (1, 0)


async def test_an_interrupted_sample_continues_the_same_stream(client: Client) -> None:
    params = {"max_new_tokens": 30, "ignore_eos": True, "sampling_seed": 77}
    whole = (await client.generate(input_ids=[3, 4, 5], sampling_params=params))["output_ids"]
    rest = {"max_new_tokens": 18, "ignore_eos": True, "sampling_seed": 77, "custom_params": {"seed_offset": 12}}
    continued = await client.generate(input_ids=[3, 4, 5, *whole[:12]], sampling_params=rest)
    assert continued["output_ids"] == whole[12:]


async def test_only_allowed_tokens_are_drawn_also_beside_others_and_where_a_sample_continues(client: Client) -> None:
    allowed = [4, 9, 30]

    def params(tokens: int, offset: int = 0) -> dict[str, Any]:
        custom = {"allowed_token_ids": allowed, "seed_offset": offset}
        return {"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": 77, "custom_params": custom}

    free = {"max_new_tokens": 30, "ignore_eos": True, "sampling_seed": 77}
    both = await client.generate(input_ids=[[3, 4, 5], [3, 4, 5]], sampling_params=[params(30), free])
    whole, other = (reply["output_ids"] for reply in both)
    assert set(whole) == set(allowed)
    assert set(other) - set(allowed)
    rest = await client.generate(input_ids=[3, 4, 5, *whole[:12]], sampling_params=params(18, offset=12))
    assert rest["output_ids"] == whole[12:]
    status, reply = await client.post(
        "/generate", {"input_ids": [3], "sampling_params": {"custom_params": {"allowed_token_ids": [VOCAB]}}}
    )
    assert (status, "outside the vocabulary" in str(reply)) == (400, True)


async def test_state_endpoints_have_the_fields_that_clients_read(client: Client) -> None:
    info = (await client.get("/server_info"))[1]
    assert (info["status"], info["max_running_requests"], info["context_length"]) == ("ready", 8, CONTEXT)
    assert info["disable_radix_cache"] is False, "prompts in common are computed once"
    assert info["prefix_cache_by_version"] is True  # what the check of a server with `in_place` looks at
    await client.generate(input_ids=[1], sampling_params={"max_new_tokens": 4, "ignore_eos": True})
    metrics = (await client.get("/metrics"))[1]
    assert 'sglang:generation_tokens_total{model_name="qwen2"} 4.0' in metrics
    assert "sglang:e2e_request_latency_seconds_count 1.0" in metrics
