"""Generated tokens per second: the embedded engine in process and over HTTP, and what else can generate on a CPU.

    python benchmarks/engine.py [--quick] [--hidden 96 256] [--loads "ragged 32"] [--rounds 5] [--json PATH]

Contenders, one compute thread each, in fp32:

- `engine`: the embedded engine, called in process, log-probabilities included;
- `http`: the same behind its HTTP server in a process of its own, one batch request, reply parsed;
- `generate`: transformers' `model.generate`, all requests as one left-padded static batch, no log-probabilities;
- `continuous`: transformers' continuous batching, its block pool sized for the load, log-probabilities included;
- `sglang`: a real SGLang server in a process of its own, asked what `http` is asked, with the settings that asyncrl
  gives it on a CPU and room for the whole load at once. The environment variable ASYNCRL_SGLANG_PYTHON names an
  interpreter that has it (`launchers/install_sglang_cpu.sh`); without it the table says "not installed". Its HTTP
  server has a core beside that of its computation, where there is one.

Loads: equal answers of 64 tokens (32 and 128 requests), ragged answers of 16 to 112 tokens (32 and 128 requests), and
the demo's 32 prompts x 8 samples. Prompts have 8 to 24 tokens. Only tokens asked for count.

The contenders take turns in every round, in one order and then in the other; one round warms up. Rates are medians
over the rounds, ratios medians of the rounds' ratios: engine / contender, for `http` http / engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import msgspec
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device
from asyncrl.inference.child.ports import reserve_ports
from asyncrl.inference.child.process_tree import ForwardedOutput, ProcessTree
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.engine_io import GenerationInput, Job, SamplingSpec
from asyncrl.inference.engine_host import wait_ready
from asyncrl.inference.sglang.host import SGLangHost

Contender = Callable[["Load"], int]
HOST = "127.0.0.1"
START_LIMIT_S = 180.0
STOP_GRACE_S = 5.0
CALL_LIMIT_S = 600.0
CONTEXT = 256
PAGE_TOKENS = 32
CONTENDERS = ("engine", "http", "generate", "continuous", "sglang")
TARGETS = {
    ("equal", "generate"): 1.0,
    ("ragged", "generate"): 1.5,
    ("ragged", "continuous"): 2.0,
    ("ragged", "sglang"): 2.0,
    ("equal", "http"): 0.85,
    ("ragged", "http"): 0.85,
}
"""The least ratio, by kind of load and contender."""


@dataclass(frozen=True)
class Shape:
    """A Qwen2 of this size with random weights."""

    name: str
    hidden: int
    layers: int
    heads: int
    vocab: int

    def build(self) -> PreTrainedModel:
        """The model, the same at every call."""
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        return Qwen2ForCausalLM(config).eval()


SHAPES = {
    96: Shape("hidden 96, 2 layers", 96, 2, 4, 17),
    256: Shape("hidden 256, 4 layers", 256, 4, 4, 512),
}


@dataclass(frozen=True)
class Load:
    """Prompts, and how many tokens to generate for each."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens asked for."""
        return sum(self.lengths)


LOADS = {
    "equal 32": (32, 1, 64, 64),
    "ragged 32": (32, 1, 16, 112),
    "equal 128": (128, 1, 64, 64),
    "ragged 128": (128, 1, 16, 112),
    "demo 32x8": (32, 8, 20, 60),
}
"""Prompts, samples of each, least and most new tokens."""


def make_load(name: str, vocab: int) -> Load:
    """The load of that name, the same at every call."""
    count, group, low, high = LOADS[name]
    rng = random.Random(name)
    prompts = [tuple(rng.randrange(1, vocab) for _ in range(rng.randint(8, 24))) for _ in range(count)]
    lengths = tuple(rng.randint(low, high) for _ in range(count * group))
    return Load(name, tuple(prompt for prompt in prompts for _ in range(group)), lengths)


def in_process(model: PreTrainedModel, rows: int) -> Contender:
    """The engine on the caller's thread."""
    engine = GenerationEngine(model, max_running_requests=rows)

    def run(load: Load) -> int:
        inputs = tuple(
            GenerationInput(f"r{index}", prompt, SamplingSpec(max_new_tokens=length, seed=index))
            for index, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True))
        )
        future = engine.submit(Job(inputs))
        while engine.step():
            pass
        return sum(len(output.logprobs) for output in future.result(timeout=0))

    return run


def over_http(url: str) -> Contender:
    """A server that speaks SGLang's contract, one call a load."""

    def run(load: Load) -> int:
        body = {
            "input_ids": load.prompts,
            "sampling_params": [{"max_new_tokens": length, "ignore_eos": True} for length in load.lengths],
            "return_logprob": True,
        }
        request = urllib.request.Request(
            f"{url}/generate", msgspec.json.encode(body), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=CALL_LIMIT_S) as reply:
            return sum(len(item["output_ids"]) for item in msgspec.json.decode(reply.read()))

    return run


def static_batch(model: Any) -> Contender:
    """`model.generate` over the whole load at once, to its longest answer."""

    @torch.inference_mode()
    def run(load: Load) -> int:
        width = max(len(prompt) for prompt in load.prompts)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in load.prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in load.prompts])
        longest = max(load.lengths)
        config = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0
        )
        output = model.generate(ids, attention_mask=mask, generation_config=config)
        assert output.shape[1] - width == longest
        return load.tokens

    return run


def transformers_continuous(model: Any) -> Contender:
    """Its manager, fed request by request with a length each."""

    def run(load: Load) -> int:
        manager_config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=sum(-(-(len(p) + n) // PAGE_TOKENS) for p, n in zip(load.prompts, load.lengths, strict=True))
            + 8,
            max_batch_tokens=512,
            allow_block_sharing=False,
            return_logprobs=True,
        )
        config = GenerationConfig(do_sample=True, max_new_tokens=max(load.lengths), eos_token_id=-1, pad_token_id=0)
        manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=manager_config)
        manager.start()
        try:
            for prompt, length in zip(load.prompts, load.lengths, strict=True):
                manager.add_request(list(prompt), max_new_tokens=length)
            done = 0
            for _ in load.prompts:
                result = manager.get_result(timeout=CALL_LIMIT_S)
                assert result is not None
                assert result.is_finished()
                done += len(result.generated_tokens)
        finally:
            manager.stop(block=True)
        return done

    return run


@asynccontextmanager
async def embedded_server(folder: Path, rows: int) -> AsyncIterator[str]:
    """The embedded engine's server as a child process; yields its address."""
    ports = reserve_ports(HOST)
    argv = [sys.executable, "-m", "asyncrl.inference.embedded", "--model-path", str(folder), "--port", str(ports.http)]
    argv += ["--threads", "1", "--max-running-requests", str(rows), "--skip-tokenizer-init"]
    output = ForwardedOutput(logging.getLogger("embedded"))
    tree = ProcessTree(argv, {}, grace_s=STOP_GRACE_S, output=output)
    await tree.start()
    try:
        url = f"http://{HOST}:{ports.http}"
        await wait_ready(url, None, START_LIMIT_S)
        yield url
    finally:
        await tree.stop()
        ports.release()


@asynccontextmanager
async def sglang_server(python: str, folder: Path, rows: int) -> AsyncIterator[str]:
    """A real SGLang server as asyncrl starts it, able to run `rows` requests at once; yields its address."""
    config = ExperimentConfig()
    config.model.path = str(folder)
    config.generation.context_length = CONTEXT
    config.generation.max_running_requests = rows
    config.generation.max_total_tokens = rows * CONTEXT
    config.generation.sglang.python = python
    host = SGLangHost(
        config, scratch="sglang0", run_dir=folder, device=Device.cpu, security=None, log=logging.getLogger("sglang")
    )
    try:
        yield (await host.start()).url
    finally:
        await host.stop()


async def contenders(stack: AsyncExitStack, shape: Shape, rows: int) -> dict[str, Contender]:
    """Every contender that this machine has, ready to run."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    shape.build().save_pretrained(folder)
    found = {
        "engine": in_process(shape.build(), rows),
        "http": over_http(await stack.enter_async_context(embedded_server(folder, rows))),
        "generate": static_batch(shape.build()),
        "continuous": transformers_continuous(shape.build()),
    }
    python = os.environ.get("ASYNCRL_SGLANG_PYTHON")
    if python:
        found["sglang"] = over_http(await stack.enter_async_context(sglang_server(python, folder, rows)))
    return found


@dataclass(frozen=True)
class Row:
    """Results of one contender under one load, as medians over the rounds; None if it is not installed."""

    model: str
    load: str
    contender: str
    tokens_per_s: float | None
    ratio: float | None

    @property
    def target(self) -> float | None:
        """The least ratio asked for, where one is."""
        return TARGETS.get((self.load.split()[0], self.contender))

    def __str__(self) -> str:
        """A line of the table."""
        begin = f"{self.load:<12} {self.contender:<12}"
        if self.tokens_per_s is None or self.ratio is None:
            return f"{begin} not installed"
        line = f"{begin} {self.tokens_per_s:>10.0f} {self.ratio:>8.2f}"
        if self.target is not None:
            line += f"  >= {self.target:.2f} {'met' if self.ratio >= self.target else 'MISSED'}"
        return line


async def measure(shape: Shape, loads: list[Load], rounds: int) -> list[Row]:
    """Run every load by every contender, `rounds` times after one to warm up."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        runners = await contenders(stack, shape, rows=max(len(load.prompts) for load in loads))
        for number in range(rounds + 1):
            for load in loads:
                for name, run in list(runners.items())[:: 1 if number % 2 else -1]:
                    begin = time.perf_counter()
                    made = run(load)
                    took = time.perf_counter() - begin
                    assert made == load.tokens, f"{name} made {made} tokens of {load.tokens}"
                    if number > 0:
                        seconds[load.name, name].append(took)
    return [summary(shape, load, name, seconds) for load in loads for name in CONTENDERS]


def summary(shape: Shape, load: Load, name: str, seconds: dict[tuple[str, str], list[float]]) -> Row:
    """The row of contender `name` from the rounds' times."""
    own, reference = seconds.get((load.name, name)), seconds[load.name, "engine"]
    if own is None:
        return Row(shape.name, load.name, name, None, None)
    ratio = statistics.median(mine / engine for mine, engine in zip(own, reference, strict=True))
    return Row(
        shape.name, load.name, name, load.tokens / statistics.median(own), 1 / ratio if name == "http" else ratio
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, nargs="+", choices=SHAPES, default=list(SHAPES), help="models")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), metavar="LOAD")
    parser.add_argument("--quick", action="store_true", help="the small model, 32 requests, 2 rounds")
    parser.add_argument("--json", type=Path, metavar="PATH")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.hidden, arguments.loads, arguments.rounds = [96], ["equal 32", "ragged 32"], 2
    torch.set_num_threads(1)
    rows: list[Row] = []
    for hidden in arguments.hidden:
        shape = SHAPES[hidden]
        measured = asyncio.run(
            measure(shape, [make_load(name, shape.vocab) for name in arguments.loads], arguments.rounds)
        )
        print(f"\n{shape.name}\n{'load':<12} {'contender':<12} {'tokens/s':>10} {'ratio':>8}  target")
        print(*measured, sep="\n", flush=True)
        rows += measured
    if arguments.json is not None:
        record = {"threads": 1, "rounds": arguments.rounds, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
