"""A real SGLang server: its start, decoding, agreement, and updates of its weights by each transport.

Updates are made by the product's own parts: `Versions` publishes as a ModelWorker does, and `ServerUpdater` pauses,
loads, continues and checks as the GserverManager does. Only the message between the two is left out.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from asyncrl.comm.http_client import JsonHttp
from asyncrl.comm.names import GENERATION_SERVER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.inference.client import GenerationServerClient, PauseMode, wire_rid
from asyncrl.inference.messages import GenerateRequest, parse_completion
from asyncrl.inference.sglang.host import SGLangHost
from asyncrl.manager.fleet.fleet_runner import LogprobCheck, ServerUpdater, logprob_check_tolerance
from asyncrl.manager.fleet.servers import BeginUpdate, Target
from asyncrl.runtime.plan import plan_workers
from asyncrl.trainer.client import PublisherClient
from asyncrl.trainer.messages import CollectWeights, Publish, SendWeights
from asyncrl.trainer.rank.training_rank import TrainingRank, Versions
from asyncrl.weights.transports import TRANSPORTS
from asyncrl.weights.transports.base import TrainerEnd, weight_transport
from gpu_rows.bench import Bench, Calls, Figure, LeftOut, tried
from gpu_rows.generation import Answer, bandwidth_share, distances
from gpu_rows.training import VARIANTS, rank_of
from gpu_rows.weights import step_of

LIMIT_S = 120.0
"""Longest that one call may take; the row's limit ends all of them."""
REQUESTS = 256
MEMORY_SHARE = 0.3
"""Part of a GPU that the server takes: trainer and server share it, also one of 80 GB."""
ROUNDS = 2
"""Updates of each kind; the last one is reported, as the first makes connections and pinned memory."""
POLL_S, BUSY_S = 0.02, 20.0
"""How often a server is asked how many requests run, and for how long."""
BESIDE = VARIANTS[1]
"""The train step beside which weights are sent."""


def sglang(bench: Bench) -> Iterator[Figure]:
    """A real server: start, decoding, agreement with the trainer; updates by each transport, alone and beside steps."""
    if bench.sglang is None:
        raise LeftOut("no SGLang; name an interpreter that has it by --sglang-python or ASYNCRL_SGLANG_PYTHON")
    if bench.log is not None:
        logging.getLogger("sglang").addHandler(logging.FileHandler(bench.log))
        logging.getLogger("sglang").setLevel(logging.INFO)
    with closing(Calls()) as made, served(bench, made, bench.dtype) as server:
        yield Figure("start", "cold", server.started_s, "s")
        yield from tried(bench, "decoding", partial(_decoding, server))
        yield from tried(bench, "trainer", partial(_beside_trainer, server))


@dataclass(frozen=True)
class Server:
    """A running server with its connections; `config` is that of a run with it."""

    bench: Bench
    calls: Calls
    config: ExperimentConfig
    http: JsonHttp
    client: GenerationServerClient
    started_s: float

    def ask(self, rows: int, prompt: int, new: int, *, logprobs: bool = True) -> Request:
        """Prepare `rows` requests of random prompts of `prompt` tokens, answered by exactly `new` tokens each."""
        number = next(_numbers)
        drawn = np.random.default_rng(number).integers(2, self.bench.config.vocab_size, (rows, prompt)).tolist()
        return Request(self, drawn, number, new, logprobs)

    def long(self) -> tuple[Future[list[dict[str, Any]]], float]:
        """Begin as many requests as run at once, with long answers; once they run, return the replies to come, and how
        many run.
        """
        size = self.bench.size
        request = self.ask(size(REQUESTS, 4), size(512, 8), size(1500, 4000))
        self.calls(_until(self.client, lambda running: running == 0), LIMIT_S)  # the gauge is of those before
        replies = self.calls.begin(request())
        return replies, self.calls(_until(self.client, lambda running: running == len(request.prompts)), LIMIT_S)


@dataclass(frozen=True)
class Request:
    """A batch of requests; sent when it is called."""

    server: Server
    prompts: list[list[int]]
    number: int
    new: int
    logprobs: bool

    async def __call__(self) -> list[dict[str, Any]]:
        body = GenerateRequest(
            rid=[wire_rid(f"batch{self.number}", row) for row in range(len(self.prompts))],
            input_ids=self.prompts,
            sampling_params={"temperature": 1.0, "max_new_tokens": self.new, "ignore_eos": True},
            return_logprob=self.logprobs,
        )
        client = self.server.client
        replies: list[dict[str, Any]] = await self.server.http.call(
            "POST", f"{client.url}/generate", body, timeout_s=LIMIT_S
        )
        return replies

    def answers(self) -> list[Answer]:
        """Send it, and return prompts, answers and log-probabilities."""
        replies = [parse_completion(reply) for reply in self.server.calls(self(), LIMIT_S)]
        return [(prompt, each.token_ids, each.logprobs) for prompt, each in zip(self.prompts, replies, strict=True)]

    def seconds(self) -> float:
        """Send it, and return how long all answers took."""
        begun = time.perf_counter()
        self.server.calls(self(), LIMIT_S)
        return time.perf_counter() - begun


_numbers = itertools.count()


def settings(bench: Bench, dtype: Dtype) -> ExperimentConfig:
    """Settings of a run of this trainer and this server."""
    config = ExperimentConfig()
    config.model.path, config.model.dtype = bench.model, dtype
    config.trainer.device = config.generation.device = bench.setting
    generation = config.generation
    generation.backend, generation.dtype = "sglang", dtype
    generation.context_length = bench.size(2048, 4096)
    generation.max_running_requests = bench.size(REQUESTS, 4)
    generation.max_total_tokens = bench.size(REQUESTS * 2048, 4 * 4096)
    assert bench.sglang is not None
    generation.sglang.python = bench.sglang
    if bench.cuda:
        generation.sglang.args = {generation.engine.memory_flag: MEMORY_SHARE}
        server = next(plan for plan in plan_workers(config) if plan.kind == GENERATION_SERVER)
        if server.resources.gpus:
            generation.sglang.env = {"CUDA_VISIBLE_DEVICES": ",".join(server.resources.gpus)}
    return config


@contextmanager
def served(bench: Bench, made: Calls, dtype: Dtype) -> Iterator[Server]:
    """A server of the random model in `dtype`; on the second GPU if there is one, as in a run."""
    config = settings(bench, dtype)
    log = logging.getLogger("sglang")
    host = SGLangHost(config, scratch="sglang0", run_dir=bench.folder, device=bench.setting, security=None, log=log)
    http = JsonHttp(None)
    begun, limit_s = time.perf_counter(), 10 * config.generation.start_timeout_s  # the host's knows of progress
    try:
        with mock.patch.dict(os.environ):  # the allocator is the trainer's; SGLang chooses its own
            os.environ.pop("PYTORCH_ALLOC_CONF", None)
            url = made(host.start(), limit_s).url
        took = time.perf_counter() - begun
        yield Server(bench, made, config, http, GenerationServerClient(http, url), took)
    finally:
        made(http.close(), LIMIT_S)
        made(host.stop(), LIMIT_S)


def _decoding(server: Server) -> Iterator[Figure]:
    """Tokens per second of all requests at once, with and without log-probabilities."""
    bench = server.bench
    rows, prompt, new = bench.size(REQUESTS, 4), bench.size(512, 8), bench.size(512, 64)
    yield Figure("decoding", "requests at once", f"{rows}, of {prompt} + {new} tokens")
    server.ask(rows, prompt, new).seconds()  # compiles, and makes connections
    prefill = server.ask(rows, prompt, 1).seconds()
    yield Figure("decoding", "first tokens of all", prefill, "s")
    for logprobs, name in ((True, "with log-probabilities"), (False, "without log-probabilities")):
        took = server.ask(rows, prompt, new, logprobs=logprobs).seconds()
        yield Figure("decoding", f"{name}, prompts included", rows * new / took, "tokens/s")
        rate = rows * (new - 1) / (took - prefill)
        yield Figure("decoding", name, rate, "tokens/s")
        for share in bandwidth_share(bench, "decoding", rows, prompt + new // 2, rate):
            yield Figure(share.part, f"{name}: {share.name}", share.value)


async def _until(client: GenerationServerClient, wanted: Callable[[float], bool]) -> float:
    """Wait until the number of running requests is as `wanted`, at most `BUSY_S` seconds; return it."""
    ends = time.monotonic() + BUSY_S
    while True:
        running = (await client.figures(timeout_s=LIMIT_S)).get("running", 0.0)
        if wanted(running) or time.monotonic() > ends:
            return running
        await asyncio.sleep(POLL_S)


def _beside_trainer(server: Server) -> Iterator[Figure]:
    """Agreement with the trainer, then updates of the server's weights by the trainer's."""
    bench = server.bench
    with rank_of(bench, BESIDE, bench.folder) as rank:
        yield from tried(bench, "agreement", partial(_distances, server, rank, "agreement"))
        step = step_of(bench, rank, BESIDE)
        numbers = itertools.count(1)
        # a disk may be slow, and the row ended
        for name in sorted(TRANSPORTS, key=lambda each: weight_transport(each).needs_folders):
            part = partial(_updates, server, rank, name, numbers, step)
            yield from tried(bench, f"update by {name}", part)


def _distances(server: Server, rank: TrainingRank, part: str) -> Iterator[Figure]:
    size = server.bench.size
    yield from distances(rank.policy("actor"), server.ask(8, size(512, 8), size(512, 16)).answers(), part)


class SentFromHere(PublisherClient):
    """Stands for the ModelWorker that sends: calls its end of the transport in this process."""

    def __init__(self, end: TrainerEnd) -> None:
        self._end = end

    async def send_weights(self, order: SendWeights, sending: Callable[[], None]) -> None:
        await self._end.send(order)


def _updates(
    server: Server, rank: TrainingRank, name: str, numbers: Iterator[int], step: Callable[[], None]
) -> Iterator[Figure]:
    """From the end of a train step until the server serves its weights: idle, and with requests, which it aborts."""
    bench, made, part = server.bench, server.calls, f"update by {name}"
    config = deepcopy(server.config)
    config.manager.weight_transport = name
    transport = weight_transport(name)
    if problems := [*transport.check(config)]:
        raise LeftOut("; ".join(problems))
    size = sum(spec.nbytes for spec in rank.policy("actor").published_specs())
    if name == "tensor":
        bench.need_space(bench.memory, 3 * size)
    folder = bench.folder / f"run-{name}"
    versions = Versions(config, folder, rank.world, rank, None, bench.device)
    end = versions.to_servers
    tolerance = logprob_check_tolerance(config)
    check = LogprobCheck(tolerance, logging.getLogger("sglang"))
    updater = ServerUpdater(
        server.http,
        transport.manager_end(SentFromHere(end)),
        timeout_s=LIMIT_S,
        check=check if tolerance else None,
        keeps_pictures=False,
        pause_ends_requests=False,
    )

    def publish() -> Target:
        version = next(numbers)
        path = versions.publish(Publish("actor", version, to_disk=transport.needs_folders))
        versions.collect(CollectWeights("actor", (version,)))
        return Target(version, str(path))

    async def serve(target: Target) -> float:
        async with asyncio.timeout(LIMIT_S):
            await updater.update(BeginUpdate(0, server.client.url, 0, target, PauseMode.abort))
        return time.perf_counter()

    def stepped() -> float:
        step()
        bench.synchronise()
        return time.perf_counter()

    try:
        for _ in range(ROUNDS):
            begun, target, held = stepped(), publish(), time.perf_counter()
            ended = made(serve(target), LIMIT_S)
        yield Figure(part, "training is held by publishing", held - begun, "s")
        yield Figure(part, "published until served", ended - held, "s")
        yield Figure(part, "step until served", ended - begun, "s")
        yield from _distances(server, rank, part)
        stepped()
        asked, _ = server.long()
        begun, target = time.perf_counter(), publish()
        ended = made(serve(target), LIMIT_S)
        made.result(asked, LIMIT_S)
        yield Figure(part, "with running requests: step until served", ended - begun, "s")
    finally:
        made(end.close(), LIMIT_S)
