"""The embedded engine on one thread in fp32: beside `model.generate`, and with and without what it keeps and cuts.

    python benchmarks/engine.py [--only plain] [--hidden 96 256] [--loads "ragged 32"] [--rounds 5]

`plain`: generated tokens per second. `engine` is called in process, log-probabilities included; `generate` has all
requests as one left-padded static batch, without log-probabilities. Loads: equal answers of 64 tokens (32 and 128
requests), ragged answers of 16 to 112 tokens, and the demo's 32 prompts x 8 samples. Prompts have 8 to 24 tokens. Only
tokens asked for count.

`turns`: 16 agents at a time, 32 in all, play 8 turns each: they begin with a system prompt of 200 tokens that all share
and a question of 20 tokens of their own, answer with 24 tokens, and get 40 tokens from a tool, which takes as long as 4
decode steps; the engine's default room (`generation.max_total_tokens`). `kept` is the engine as it is, `anew` prefills
every turn's history. `prefilled` are the tokens of prompts that were computed, `tokens` those of all prompts. `equal`
is the part of the answers that are the same, `log-probs` the largest difference in these.

`long`: 8 samples are decoded when a prompt of 4,096 or 8,192 tokens arrives, which is prefilled in parts of
`generation.chunked_prefill_size`, or whole. `longest pause` is the CPU time of the slowest step before the long
sample's first token, in decode steps of the 8 alone (the median of those before); `first token` the CPU time from the
arrival to that token, in parts against whole.

Both sides of a comparison take turns. Figures are medians over the rounds, ratios the medians of the rounds' ratios: of
wall-clock time after a round that warms up in `plain`, of CPU time in the others. Weights are random.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import Table, by_turns, parser, verdict
from tiny_models import agreement, answered, qwen2
from transformers import GenerationConfig, PreTrainedModel

from asyncrl.inference.embedded.engine import CHUNKED_PREFILL_SIZE, GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.engine_io import GenerationInput, GenerationOutput, SamplingSpec

LAYERS = {96: 2, 256: 4}
"""By hidden size."""


def model_of(hidden: int, vocabulary: int, **more: Any) -> PreTrainedModel:
    """A model with random weights that no token ends, the same at every call."""
    fields: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return qwen2(hidden, LAYERS[hidden], vocabulary, **(fields | more))


def label(hidden: int) -> str:
    """The model in a table."""
    return f"{LAYERS[hidden]} layers, width {hidden}"


# Beside `model.generate`.

VOCABULARIES = {96: 17, 256: 512}
"""By hidden size; 17 is that of the demo."""
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


Load = Sequence[GenerationInput]
Contender = Callable[[Load], int]
"""Generates a load; returns the number of tokens that were asked for."""


def load_of(name: str, vocabulary: int) -> Load:
    """The load of that name, the same at every call."""
    count, group, low, high = LOADS[name]
    rng = random.Random(name)
    prompts = [tuple(rng.randrange(1, vocabulary) for _ in range(rng.randint(8, 24))) for _ in range(count)]
    asked = [(prompt, rng.randint(low, high)) for prompt in prompts for _ in range(group)]
    return [
        GenerationInput(f"r{index}", prompt, SamplingSpec(max_new_tokens=length, seed=index))
        for index, (prompt, length) in enumerate(asked)
    ]


def embedded(model: PreTrainedModel, rows: int) -> Contender:
    """The engine on the caller's thread."""
    engine = GenerationEngine(model, max_running_requests=rows)
    return lambda load: sum(len(output.logprobs) for output in answered(engine, load))


def static_batch(model: Any) -> Contender:
    """`model.generate` over the whole load at once, to its longest answer."""

    @torch.inference_mode()
    def run(load: Load) -> int:
        prompts, lengths = [each.input_ids for each in load], [each.sampling.max_new_tokens for each in load]
        width, longest = max(map(len, prompts)), max(lengths)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        config = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0
        )
        output = model.generate(ids, attention_mask=mask, generation_config=config)
        assert output.shape[1] - width == longest
        return sum(lengths)

    return run


def measure(hidden: int, name: str, rounds: int) -> tuple[float, float, float]:
    """Tokens per second of both, and the ratio."""
    vocabulary = VOCABULARIES[hidden]
    load = load_of(name, vocabulary)
    tokens = sum(each.sampling.max_new_tokens for each in load)
    fields = {"num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": True}
    engine = embedded(model_of(hidden, vocabulary, **fields), len(load))
    generate = static_batch(model_of(hidden, vocabulary, **fields))

    def seconds(contender: Contender) -> float:
        begun = time.perf_counter()
        assert contender(load) == tokens
        return time.perf_counter() - begun

    ours, others = (each[1:] for each in by_turns((engine, generate), rounds + 1, seconds))
    ratio = statistics.median(b / a for a, b in zip(ours, others, strict=True))
    return tokens / statistics.median(ours), tokens / statistics.median(others), ratio


def plain(loads: Sequence[str], hiddens: Sequence[int], rounds: int) -> None:
    """Print the first table."""
    table = Table("model, load", "engine, tokens/s", "generate, tokens/s", "ratio", "target")
    for hidden in hiddens:
        for name in loads:
            own, other, ratio = measure(hidden, name, rounds)
            target = TARGETS.get(name.split()[0])
            met = "" if target is None else f">= {target:.1f} {verdict(ratio, target, at_least=True)}"
            table.row(f"{label(hidden)}, {name}", f"{own:.0f}", f"{other:.0f}", f"{ratio:.2f}", met)


# Agents of several turns.

AGENTS, AT_A_TIME, TURNS, TOOL_STEPS = 32, 16, 8, 4
SYSTEM, QUESTION, ANSWER, OBSERVATION = 200, 20, 24, 40
CAPACITY, CONTEXT, VOCABULARY = 65536, 1024, 512


@dataclass
class Agent:
    """One conversation; its tools answer by its number alone."""

    number: int
    history: tuple[int, ...]
    draw: random.Random
    outputs: list[GenerationOutput] = field(default_factory=list)
    pending: Future[list[GenerationOutput]] | None = None
    ready_at: int = 0

    def ask(self, engine: GenerationEngine) -> None:
        """Send the next turn."""
        spec = SamplingSpec(max_new_tokens=ANSWER, seed=1000 * self.number + len(self.outputs))
        request = GenerationInput(f"a{self.number}-{len(self.outputs)}", self.history, spec)
        self.pending = engine.submit(Job((request,)))

    def take(self, steps: int) -> None:
        """Take the answer and call the tool, if it is there."""
        if self.pending is not None and self.pending.done():
            (output,) = self.pending.result()
            self.outputs.append(output)
            observed = (self.draw.randrange(1, VOCABULARY) for _ in range(OBSERVATION))
            self.history = (*self.history, *output.output_ids, *observed)
            self.pending, self.ready_at = None, steps + TOOL_STEPS


def agents() -> list[Agent]:
    """All of them before their first turn."""
    draw = random.Random(0)
    system = tuple(draw.randrange(1, VOCABULARY) for _ in range(SYSTEM))
    made = []
    for number in range(AGENTS):
        own = random.Random(number)
        question = tuple(own.randrange(1, VOCABULARY) for _ in range(QUESTION))
        made.append(Agent(number, (*system, *question), own))
    return made


@dataclass(frozen=True)
class Played:
    """Answers of all agents and turns, CPU seconds, tokens that were prefilled, tokens of all prompts."""

    outputs: list[GenerationOutput]
    seconds: float
    prefilled: int
    tokens: int


def play(model: PreTrainedModel, keeps: bool) -> Played:
    """Have all agents play."""
    engine = GenerationEngine(model, max_running_requests=AT_A_TIME, max_model_len=CONTEXT, max_total_tokens=CAPACITY)
    if not keeps:
        engine._batch.prefills.kept = None
    everyone = agents()
    waiting, steps = list(everyone), 0
    playing: list[Agent] = []
    begun = time.process_time()
    while waiting or playing:
        while waiting and len(playing) < AT_A_TIME:
            playing.append(waiting.pop(0))
        for agent in playing:
            if agent.pending is None and steps >= agent.ready_at:
                agent.ask(engine)
        engine.step()
        steps += 1
        for agent in playing:
            agent.take(steps)
        playing = [agent for agent in playing if len(agent.outputs) < TURNS]
    seconds, stats = time.process_time() - begun, engine.stats()
    outputs = [output for agent in everyone for output in agent.outputs]
    return Played(outputs, seconds, stats.prefilled_tokens, stats.prompt_tokens)


def turns(hiddens: Sequence[int], rounds: int) -> None:
    """Print the second table."""
    table = Table("model", "tokens", "prefilled anew", "prefilled, kept", "speed-up", "equal", "log-probs")
    for hidden in hiddens:
        model = model_of(hidden, VOCABULARY, max_position_embeddings=LONG_CONTEXT)
        found = by_turns((True, False), rounds, partial(play, model))
        speed_up = statistics.median(b.seconds / a.seconds for a, b in zip(*found, strict=True))
        kept, anew = (runs[-1] for runs in found)
        tokens = (f"{each:,}" for each in (anew.tokens, anew.prefilled, kept.prefilled))
        same = agreement(kept.outputs, anew.outputs)
        table.row(label(hidden), *tokens, f"{speed_up:.2f} x", *same)


# Long prompts.

LENGTHS, LONG_CONTEXT, OTHERS = (4096, 8192), 8448, 8


def pauses(model: PreTrainedModel, length: int, part: int) -> tuple[float, float]:
    """The longest pause in decode steps, and the CPU seconds to the first token of a prompt of `length` tokens."""
    engine = GenerationEngine(
        model,
        max_running_requests=OTHERS + 1,
        max_model_len=LONG_CONTEXT,
        max_total_tokens=(OTHERS + 1) * LONG_CONTEXT,
        chunked_prefill_size=part,
    )
    draw = random.Random(1)

    def ask(name: str, count: int, new_tokens: int) -> None:
        prompt = tuple(draw.randrange(1, VOCABULARY) for _ in range(count))
        engine.submit(Job((GenerationInput(name, prompt, SamplingSpec(max_new_tokens=new_tokens, seed=count)),)))

    def step() -> float:
        begun = time.process_time()
        engine.step()
        return time.process_time() - begun

    for number in range(OTHERS):
        ask(f"o{number}", 20 + number, 900)
    before = [step() for _ in range(60)][20:]
    ask("long", length, 4)
    during = []
    while engine._batch.samples.live <= OTHERS:
        during.append(step())
    return max(during) / statistics.median(before), sum(during)


def long(hiddens: Sequence[int], rounds: int) -> None:
    """Print the third table."""
    table = Table("model", "prompt", "longest pause, whole", "longest pause, in parts", "first token")
    for hidden in hiddens:
        model = model_of(hidden, VOCABULARY, max_position_embeddings=LONG_CONTEXT)
        for length in LENGTHS:
            found = by_turns((LONG_CONTEXT, CHUNKED_PREFILL_SIZE), rounds, partial(pauses, model, length))
            (whole, at_once), (parts, in_parts) = (zip(*runs, strict=True) for runs in found)
            first = statistics.median(a / b for a, b in zip(in_parts, at_once, strict=True))
            steps = (f"{statistics.median(each):.0f} steps" for each in (whole, parts))
            table.row(label(hidden), f"{length:,}", *steps, f"{first:.2f} x")


def main() -> None:
    """Measure, print the tables."""
    command = parser(__doc__)
    command.add_argument("--only", choices=("plain", "turns", "long"), help="one table")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--hidden", type=int, nargs="+", choices=LAYERS, default=list(LAYERS))
    command.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), metavar="LOAD", help="of `plain`")
    args = command.parse_args()
    torch.set_num_threads(1)
    tables: dict[str, Callable[[Sequence[int], int], None]]
    tables = {"plain": partial(plain, args.loads), "turns": turns, "long": long}
    for name in [args.only] if args.only else tables:
        tables[name](args.hidden, args.rounds)


if __name__ == "__main__":
    main()
