"""Generated tokens per second: the embedded engine in process and over HTTP, and what else can generate on a CPU.

    python benchmarks/engine.py [--quick] [--json PATH]

Contenders, one compute thread each, taking turns in one run, best of the rounds:

- `engine`: the embedded engine, called in process, log-probabilities included;
- `engine http`: the same behind its HTTP server in a process of its own, one batch request, reply parsed;
- `generate`: transformers' `model.generate`, all requests as one left-padded static batch, no log-probabilities;
- `continuous`: transformers' continuous batching, its block pool sized for the load;
- `sglang`: a real SGLang server on CPU, where ASYNCRL_SGLANG_PYTHON names an interpreter that has it.

Loads: equal answers of 64 tokens (32 and 128 requests), ragged answers of 16 to 112 tokens (32 and 128 requests), and
the demo's 32 prompts x 8 samples. Prompts have 8 to 24 tokens. Only tokens asked for count. The ratios are engine /
contender.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import orjson
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from asyncrl.generation.embedded.engine import Engine
from asyncrl.generation.embedded.types import GenerationInput, Job, SamplingSpec

Contender = Callable[["Load"], int]
START_LIMIT_S = 180.0
CALL_LIMIT_S = 600.0
PAGE_TOKENS = 32
TARGETS = {
    ("equal", "generate"): 1.0,
    ("ragged", "generate"): 1.5,
    ("ragged", "continuous"): 2.0,
    ("ragged", "sglang"): 2.0,
    ("equal", "engine http"): 1 / 0.85,
    ("ragged", "engine http"): 1 / 0.85,
}
"""Engine / contender: at least this, but for `engine http`, where it is at most this."""


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
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        return Qwen2ForCausalLM(config).eval()


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


def make_loads(vocab: int, quick: bool) -> list[Load]:
    """The loads of the benchmark."""
    rng = random.Random(0)

    def load(name: str, prompts: int, group: int, low: int, high: int) -> Load:
        heads = [tuple(rng.randrange(1, vocab) for _ in range(rng.randint(8, 24))) for _ in range(prompts)]
        lengths = tuple(rng.randint(low, high) for _ in range(prompts * group))
        return Load(name, tuple(head for head in heads for _ in range(group)), lengths)

    loads = [load("equal 32", 32, 1, 64, 64), load("ragged 32", 32, 1, 16, 112)]
    if quick:
        return loads
    return [
        *loads,
        load("equal 128", 128, 1, 64, 64),
        load("ragged 128", 128, 1, 16, 112),
        load("demo 32x8", 32, 8, 20, 60),
    ]


def in_process(model: PreTrainedModel, rows: int) -> Contender:
    """The engine on the caller's thread."""
    engine = Engine(model, max_running_requests=rows)

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
        request = urllib.request.Request(f"{url}/generate", orjson.dumps(body), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=CALL_LIMIT_S) as reply:
            return sum(len(item["output_ids"]) for item in orjson.loads(reply.read()))

    return run


def static_batch(model: PreTrainedModel) -> Contender:
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


def transformers_continuous(model: PreTrainedModel) -> Contender:
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


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(command: list[str], port: int, environment: dict[str, str]) -> Iterator[str]:
    """Run a server until the block ends; yields its address once it is healthy."""
    url = f"http://127.0.0.1:{port}"
    child = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not healthy(url):
            if child.poll() is not None:
                raise RuntimeError(f"{command[2]} ended with code {child.returncode} before it was healthy")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{command[2]} was not healthy within {START_LIMIT_S:.0f} s")
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait(timeout=30)


def healthy(url: str) -> bool:
    """Whether the server answers its health check."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def embedded_command(folder: str, port: int, rows: int) -> list[str]:
    """Start command of the embedded server."""
    return [
        *(sys.executable, "-m", "asyncrl.generation.embedded", "--model-path", folder, "--port", str(port)),
        *("--threads", "1", "--max-running-requests", str(rows), "--skip-tokenizer-init"),
    ]


def sglang_command(python: str, folder: str, port: int, rows: int) -> list[str]:
    """Start command of a real SGLang server without a GPU."""
    return [
        *(python, "-m", "sglang.launch_server", "--model-path", folder, "--host", "127.0.0.1", "--port", str(port)),
        *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--disable-cuda-graph", "--disable-overlap-schedule", "--skip-tokenizer-init", "--skip-server-warmup"),
        *("--mem-fraction-static", "0.85", "--max-total-tokens", "65536", "--max-running-requests", str(rows)),
        *("--dtype", "float32", "--sleep-on-idle"),
    ]


SGLANG_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}


def contenders(stack: ExitStack, shape: Shape, rows: int) -> dict[str, Contender]:
    """Every contender that this machine has, ready to run."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    shape.build().save_pretrained(folder)
    port = free_port()
    url = stack.enter_context(server(embedded_command(folder, port, rows), port, {}))
    found = {
        "engine": in_process(shape.build(), rows),
        "engine http": over_http(url),
        "generate": static_batch(shape.build()),
        "continuous": transformers_continuous(shape.build()),
    }
    python = os.environ.get("ASYNCRL_SGLANG_PYTHON")
    if python:
        port = free_port()
        found["sglang"] = over_http(
            stack.enter_context(server(sglang_command(python, folder, port, rows), port, SGLANG_ENVIRONMENT))
        )
    else:
        print("sglang: left out, ASYNCRL_SGLANG_PYTHON is not set")
    return found


def measure(shape: Shape, quick: bool, rounds: int) -> list[dict[str, Any]]:
    """Best tokens per second of every contender at every load."""
    loads = make_loads(shape.vocab, quick)
    best: dict[tuple[str, str], float] = {}
    with ExitStack() as stack:
        runners = contenders(stack, shape, rows=max(len(load.prompts) for load in loads))
        for _ in range(rounds):
            for load in loads:
                for name, run in runners.items():
                    begin = time.perf_counter()
                    made = run(load)
                    seconds = time.perf_counter() - begin
                    assert made == load.tokens, f"{name} made {made} tokens of {load.tokens}"
                    best[load.name, name] = max(best.get((load.name, name), 0.0), made / seconds)
    return [
        {
            "model": shape.name,
            "load": load,
            "contender": name,
            "tokens_per_s": rate,
            "ratio": best[load, "engine"] / rate,
        }
        for (load, name), rate in best.items()
    ]


def verdict(row: dict[str, Any]) -> str:
    """Whether the row meets its target, where it has one."""
    target = TARGETS.get((row["load"].split()[0], row["contender"]))
    if target is None:
        return ""
    if row["contender"] == "engine http":
        return f"<= {target:.2f} {'ok' if row['ratio'] <= target else 'MISSED'}"
    return f">= {target:.2f} {'ok' if row['ratio'] >= target else 'MISSED'}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="the small model, 32 requests, 2 rounds")
    parser.add_argument("--json", type=Path, metavar="PATH")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shapes = [Shape("hidden 96, 2 layers", 96, 2, 4, 17)]
    if not arguments.quick:
        shapes.append(Shape("hidden 256, 4 layers", 256, 4, 4, 512))
    rows = []
    for shape in shapes:
        measured = measure(shape, arguments.quick, 2 if arguments.quick else arguments.rounds)
        print(f"\n{shape.name}\n{'load':<12} {'contender':<12} {'tokens/s':>10} {'engine/it':>10}  target")
        for row in sorted(measured, key=lambda row: str(row["load"])):
            print(
                f"{row['load']:<12} {row['contender']:<12} {row['tokens_per_s']:>10.0f} {row['ratio']:>10.2f}  "
                f"{verdict(row)}"
            )
        rows += measured
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"threads": 1, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
