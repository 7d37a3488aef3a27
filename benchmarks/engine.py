"""Generated tokens per second on one thread in fp32: the embedded engine, and transformers' `model.generate`.

    python benchmarks/engine.py [--hidden 96 256] [--loads "ragged 32"] [--rounds 5]

`engine` is called in process, log-probabilities included; `generate` has all requests as one left-padded static batch,
without log-probabilities. Loads: equal answers of 64 tokens (32 and 128 requests), ragged answers of 16 to 112 tokens,
and the demo's 32 prompts x 8 samples. Prompts have 8 to 24 tokens. Only tokens asked for count.

Both take turns in every round, in one order and then in the other; one round warms up. Rates are medians over the
rounds, the ratio engine / generate is the median of the rounds' ratios.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import Table, in_turns, parser, verdict
from tiny_models import qwen2
from transformers import GenerationConfig, PreTrainedModel

from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.engine_io import GenerationInput, SamplingSpec

CONTEXT = 256
SHAPES = {96: (2, 17), 256: (4, 512)}
"""By hidden size: layers, vocabulary."""
LOADS = {
    "equal 32": (32, 1, 64, 64),
    "ragged 32": (32, 1, 16, 112),
    "equal 128": (128, 1, 64, 64),
    "ragged 128": (128, 1, 16, 112),
    "demo 32x8": (32, 8, 20, 60),
}
"""Prompts, samples of each, least and most new tokens."""
TARGETS = {"equal": 1.0, "ragged": 1.5}
"""The least ratio, by kind of load."""


@dataclass(frozen=True)
class Load:
    """Prompts, and how many tokens to generate for each."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, name: str, vocabulary: int) -> Load:
        """The load of that name, the same at every call."""
        count, group, low, high = LOADS[name]
        rng = random.Random(name)
        prompts = [tuple(rng.randrange(1, vocabulary) for _ in range(rng.randint(8, 24))) for _ in range(count)]
        lengths = tuple(rng.randint(low, high) for _ in range(count * group))
        return cls(tuple(prompt for prompt in prompts for _ in range(group)), lengths)


Contender = Callable[[Load], int]
"""Generates a load; returns the number of tokens that were asked for."""


def embedded(model: PreTrainedModel, rows: int) -> Contender:
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


def static_batch(model: Any) -> Contender:
    """`model.generate` over the whole load at once, to its longest answer."""

    @torch.inference_mode()
    def run(load: Load) -> int:
        width, longest = max(map(len, load.prompts)), max(load.lengths)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in load.prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in load.prompts])
        config = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0
        )
        output = model.generate(ids, attention_mask=mask, generation_config=config)
        assert output.shape[1] - width == longest
        return sum(load.lengths)

    return run


def measure(hidden: int, name: str, rounds: int) -> tuple[float, float, float]:
    """Tokens per second of both, and the ratio."""
    layers, vocabulary = SHAPES[hidden]
    load = Load.of(name, vocabulary)
    fields: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    fields |= {"num_key_value_heads": 4, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True}
    runs = {
        "engine": embedded(qwen2(hidden, layers, vocabulary, **fields), len(load.prompts)),
        "generate": static_batch(qwen2(hidden, layers, vocabulary, **fields)),
    }
    seconds: dict[str, list[float]] = {contender: [] for contender in runs}
    for number, contender in in_turns(runs, rounds + 1):
        begin = time.perf_counter()
        assert runs[contender](load) == sum(load.lengths)
        if number:
            seconds[contender].append(time.perf_counter() - begin)
    ratio = statistics.median(b / a for a, b in zip(seconds["engine"], seconds["generate"], strict=True))
    own, other = (sum(load.lengths) / statistics.median(each) for each in seconds.values())
    return own, other, ratio


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--hidden", type=int, nargs="+", choices=SHAPES, default=list(SHAPES))
    command.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), metavar="LOAD")
    args = command.parse_args()
    torch.set_num_threads(1)
    table = Table("model, load", "engine, tokens/s", "generate, tokens/s", "ratio", "target")
    for hidden in args.hidden:
        for name in args.loads:
            own, other, ratio = measure(hidden, name, args.rounds)
            target = TARGETS.get(name.split()[0])
            met = "" if target is None else f">= {target:.1f} {verdict(ratio, target, at_least=True)}"
            model = f"{SHAPES[hidden][0]} layers, width {hidden}"
            table.row(f"{model}, {name}", f"{own:.0f}", f"{other:.0f}", f"{ratio:.2f}", met)


if __name__ == "__main__":
    main()
