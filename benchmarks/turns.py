"""Agents of several turns and long prompts in the embedded engine, with and without what it keeps and cuts.

    python benchmarks/turns.py              both tables; --only turns, or --only long

16 agents at a time, 32 in all, play 8 turns each: they begin with a system prompt of 200 tokens that all share and a
question of 20 tokens of their own, answer with 24 tokens, and get 40 tokens from a tool, which takes as long as 4
decode steps. One thread, fp32, random weights; the engine's default room (`generation.max_total_tokens`).

`kept` is the engine as it is, `anew` prefills every turn's history. Rounds alternate; `speed-up` is the median of the
rounds' ratios of CPU seconds, `prefilled` the tokens of prompts that were computed, `tokens` those of all prompts.
`equal` is the part of the answers that are the same, `log-probs` the largest difference in these.

Long prompts: 8 samples are decoded when a prompt of 4,096 or 8,192 tokens arrives, which is prefilled in parts of
`generation.chunked_prefill_size`, or whole. `longest pause` is the CPU time of the slowest step before the long
sample's first token, in decode steps of the 8 alone (the median of those before); `first token` the CPU time from the
arrival to that token, in parts against whole.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import Table, in_turns, parser
from tiny_models import qwen2
from transformers import PreTrainedModel

from asyncrl.inference.embedded.engine import CHUNKED_PREFILL_SIZE, GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.engine_io import GenerationInput, GenerationOutput, SamplingSpec

AGENTS, AT_A_TIME, TURNS, TOOL_STEPS = 32, 16, 8, 4
SYSTEM, QUESTION, ANSWER, OBSERVATION = 200, 20, 24, 40
ROOM, CONTEXT, VOCABULARY = 65536, 1024, 512
SIZES = ((96, 2), (256, 4))
LENGTHS, LONG_CONTEXT, OTHERS = (4096, 8192), 8448, 8


def model_of(hidden: int, layers: int) -> PreTrainedModel:
    """A model with random weights, the same at every call."""
    fields: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return qwen2(hidden, layers, VOCABULARY, max_position_embeddings=LONG_CONTEXT, **fields)


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
    engine = GenerationEngine(model, max_running_requests=AT_A_TIME, max_model_len=CONTEXT, max_total_tokens=ROOM)
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


def turns(rounds: int) -> None:
    """Print the first table."""
    table = Table("model", "tokens", "prefilled anew", "prefilled, kept", "speed-up", "equal", "log-probs")
    for hidden, layers in SIZES:
        model = model_of(hidden, layers)
        found: dict[bool, list[Played]] = {True: [], False: []}
        for _, keeps in in_turns(found, rounds):
            found[keeps].append(play(model, keeps))
        speed_up = statistics.median(b.seconds / a.seconds for a, b in zip(*found.values(), strict=True))
        kept, anew = (runs[-1] for runs in found.values())
        pairs = [*zip(kept.outputs, anew.outputs, strict=True)]
        same = [(one, other) for one, other in pairs if one.output_ids == other.output_ids]
        worst = max(abs(x - y) for one, other in same for x, y in zip(one.logprobs, other.logprobs, strict=True))
        tokens = (f"{each:,}" for each in (anew.tokens, anew.prefilled, kept.prefilled))
        figures = (f"{speed_up:.2f} x", f"{len(same) / len(pairs):.3f}", f"{worst:.1e}")
        table.row(f"{layers} layers, width {hidden}", *tokens, *figures)


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


def long(rounds: int) -> None:
    """Print the second table."""
    table = Table("model", "prompt", "longest pause, whole", "longest pause, in parts", "first token")
    for hidden, layers in SIZES:
        model = model_of(hidden, layers)
        for length in LENGTHS:
            found: dict[int, list[tuple[float, float]]] = {LONG_CONTEXT: [], CHUNKED_PREFILL_SIZE: []}
            for _, part in in_turns(found, rounds):
                found[part].append(pauses(model, length, part))
            (whole, at_once), (parts, in_parts) = (zip(*runs, strict=True) for runs in found.values())
            first = statistics.median(a / b for a, b in zip(in_parts, at_once, strict=True))
            steps = (f"{statistics.median(each):.0f} steps" for each in (whole, parts))
            table.row(f"{layers} layers, width {hidden}", f"{length:,}", *steps, f"{first:.2f} x")


def main() -> None:
    """Measure, print the tables."""
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--only", choices=("turns", "long"), help="one table")
    args = command.parse_args()
    torch.set_num_threads(1)
    if args.only != "long":
        turns(args.rounds)
    if args.only != "turns":
        long(args.rounds)


if __name__ == "__main__":
    main()
