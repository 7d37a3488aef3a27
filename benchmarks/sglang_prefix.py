"""Shared prefix of a group sent to SGLang before it, or all in one call: seconds, and tokens that the server prefills.

    python benchmarks/sglang_prefix.py SGLANG_PYTHON            an interpreter that has SGLang, see launchers/
    python benchmarks/sglang_prefix.py SGLANG_PYTHON --rounds 1

A real server on the CPU (a random model of 4 layers of width 256), started as a run starts it. Before each measurement
its prefix cache is emptied, as a weight update does it. Groups have 8 samples; each generates one token, so that what
is measured is the prefill. Both ways alternate; `one call` and `shared first` are the fastest of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.comm import names
from asyncrl.comm.http.calls import JsonHttp
from asyncrl.comm.name_resolve import NameBackend, make_resolver
from asyncrl.comm.security import HttpSecurity, RunSecret
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import SECRET_FILE, write_run_config
from asyncrl.config.setting import Device
from asyncrl.inference.settings import GenerationBackend
from asyncrl.runtime.supervisor import STOP_SIGNAL, supervised

GROUP, VOCABULARY, START_S, LIMIT_S = 8, 512, 600.0, 300.0
SHAPES = ((1, 60, 0), (4, 60, 0), (4, 200, 0), (1, 1000, 0), (4, 60, 100), (1, 1000, 200))
"""Groups, tokens that the samples of each share, tokens of each sample's own."""


class Server:
    """The server's calls that are measured."""

    def __init__(self, http: JsonHttp, url: str) -> None:
        self._http, self._url = http, url
        self._calls = 0

    async def flush(self) -> None:
        """Empty the prefix cache, once the server is idle."""
        await self._http.call("POST", f"{self._url}/flush_cache?timeout=20", timeout_s=60.0)

    async def prefill(self, prompts: list[list[int]]) -> int:
        """One call for one token of each; the tokens that were computed."""
        self._calls += 1
        body = {
            "input_ids": prompts,
            "rid": [f"{self._calls};{number};" for number in range(len(prompts))],
            "sampling_params": {"max_new_tokens": 1, "ignore_eos": True},
        }
        replies: list[dict[str, Any]] = await self._http.call("POST", f"{self._url}/generate", body, timeout_s=LIMIT_S)
        return sum(map(len, prompts)) - sum(reply["meta_info"]["cached_tokens"] for reply in replies)


async def measure(server: Server, rounds: int) -> None:
    """Print the table."""
    print("| groups, tokens shared + own | one call | shared first |\n|---|--:|--:|", flush=True)
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(5, VOCABULARY) for _ in range(count)]

    for groups, shared, own in SHAPES:
        seconds: dict[bool, float] = {}
        computed: dict[bool, int] = {}
        for number in range(rounds):
            for first in (False, True) if number % 2 else (True, False):
                prompts = [tokens(shared) for _ in range(groups)]
                samples = [prompt + tokens(own) for prompt in prompts for _ in range(GROUP)]
                await server.flush()
                begun = time.perf_counter()
                count = await server.prefill(prompts) if first else 0
                computed[first] = count + await server.prefill(samples)
                seconds[first] = min(seconds.get(first, LIMIT_S), time.perf_counter() - begun)
        cells = [f"{seconds[first]:.2f} s, {computed[first]}" for first in (False, True)]
        print(f"| {groups}, {shared} + {own} | {cells[0]} | {cells[1]} |", flush=True)


@contextmanager
def serving(python: str, folder: Path) -> Iterator[tuple[str, HttpSecurity]]:
    """A server within it: its URL, and what its callers need."""
    torch.manual_seed(0)
    model = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(model).save_pretrained(folder / "model")
    config = ExperimentConfig()
    config.model.path = str(folder / "model")
    config.generation.backend = GenerationBackend.sglang
    config.generation.device = Device.cpu
    config.generation.context_length = 4096
    config.generation.max_running_requests = 32
    config.generation.max_total_tokens = 65536
    config.generation.start_timeout_s = START_S
    config.generation.sglang.python = python
    write_run_config(config, folder)
    security = RunSecret.create(folder / SECRET_FILE).http()
    argv = [sys.executable, "-m", "asyncrl.runtime.main", "generation_server", "0", "--run-dir", str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(supervised(argv), stdin=subprocess.PIPE, stdout=log, stderr=log)
    resolver = make_resolver(NameBackend.file, str(folder / "name_resolve"))
    try:
        yield names.GenerationServerEntry.decode(resolver.wait(names.gen_server_key(0), START_S)).url, security
    finally:
        process.send_signal(STOP_SIGNAL)
        process.wait(60)
        resolver.close()


async def ask(url: str, security: HttpSecurity, rounds: int) -> None:
    """Measure by the server at `url`."""
    http = JsonHttp(security)
    try:
        await measure(Server(http, url), rounds)
    finally:
        await http.close()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="interpreter that has SGLang")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(options.python, Path(folder)) as (url, security):
        asyncio.run(ask(url, security, options.rounds))


if __name__ == "__main__":
    main()
