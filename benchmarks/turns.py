"""Agents of several turns in the embedded engine, with and without what it keeps of earlier turns.

    python benchmarks/turns.py              both sizes of model
    python benchmarks/turns.py --quick      one size, one round: shows that it runs
    python benchmarks/turns.py --json PATH

16 agents at a time, 32 in all, play 8 turns each: they begin with a system prompt of 200 tokens that all share and a
question of 20 tokens of their own, answer with 24 tokens, and get 40 tokens from a tool, which takes as long as 4
decode steps. One thread, fp32, random weights; the engine's default room (`generation.max_total_tokens`).

`kept` is the engine as it is, `anew` prefills every turn's history. Rounds alternate; `speed-up` is the median of the
rounds' ratios of CPU seconds, `prefilled` the tokens of prompts that were computed, `tokens` those of all prompts.
`equal` is the part of the answers that are the same, `log-probs` the largest difference in these.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.types import GenerationInput, GenerationOutput, Job, SamplingSpec

AGENTS, AT_A_TIME, TURNS, TOOL_STEPS = 32, 16, 8, 4
SYSTEM, QUESTION, ANSWER, OBSERVATION = 200, 20, 24, 40
ROOM, CONTEXT, VOCABULARY = 65536, 1024, 512
SIZES = ((96, 2), (256, 4))


def model_of(hidden: int, layers: int) -> PreTrainedModel:
    """A randomly initialised model, the same at every call."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()


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


@dataclass(frozen=True)
class Played:
    """Answers by agent and turn, CPU seconds, tokens that were prefilled, tokens of all prompts."""

    outputs: list[list[GenerationOutput]]
    seconds: float
    prefilled: int
    tokens: int


def play(model: PreTrainedModel, keeps: bool) -> Played:
    """Have all agents play."""
    engine = GenerationEngine(model, max_running_requests=AT_A_TIME, max_model_len=CONTEXT, max_total_tokens=ROOM)
    if not keeps:
        engine._batch.prefills.kept = None
    draw = random.Random(0)
    system = tuple(draw.randrange(1, VOCABULARY) for _ in range(SYSTEM))
    agents = []
    for number in range(AGENTS):
        own = random.Random(number)
        question = tuple(own.randrange(1, VOCABULARY) for _ in range(QUESTION))
        agents.append(Agent(number, (*system, *question), own))
    waiting, playing, steps = list(agents), [], 0
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
    seconds = time.process_time() - begun
    stats = engine.stats()
    return Played([agent.outputs for agent in agents], seconds, stats.prefilled_tokens, stats.prompt_tokens)


def compare(hidden: int, layers: int, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    model = model_of(hidden, layers)
    ratios, found = [], {}
    for number in range(rounds):
        for keeps in (True, False) if number % 2 else (False, True):
            found[keeps] = play(model, keeps)
        ratios.append(found[False].seconds / found[True].seconds)
    kept, anew = found[True], found[False]
    pairs = [
        (one, other)
        for mine, its in zip(kept.outputs, anew.outputs, strict=True)
        for one, other in zip(mine, its, strict=True)
    ]
    same = [(one, other) for one, other in pairs if one.output_ids == other.output_ids]
    return {
        "model": f"{layers} layers, width {hidden}",
        "tokens": anew.tokens,
        "anew": anew.prefilled,
        "kept": kept.prefilled,
        "speed_up": statistics.median(ratios),
        "equal": len(same) / len(pairs),
        "logprobs": max(abs(x - y) for one, other in same for x, y in zip(one.logprobs, other.logprobs, strict=True)),
    }


def main() -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size, one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | tokens | prefilled anew | prefilled, kept | speed-up | equal | log-probs |", flush=True)
    print("|---|--:|--:|--:|--:|--:|--:|", flush=True)
    rows = []
    for hidden, layers in SIZES[:1] if options.quick else SIZES:
        row = compare(hidden, layers, 1 if options.quick else options.rounds)
        rows.append(row)
        print(
            f"| {row['model']} | {row['tokens']:,} | {row['anew']:,} | {row['kept']:,} | {row['speed_up']:.2f} x "
            f"| {row['equal']:.3f} | {row['logprobs']:.1e} |",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
