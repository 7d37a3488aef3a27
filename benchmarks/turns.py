"""Agents of several turns and long prompts in the embedded engine, with and without what it keeps and cuts.

    python benchmarks/turns.py              both sizes of model
    python benchmarks/turns.py --only long  one of the two tables (turns, long)
    python benchmarks/turns.py --sglang SGLANG_PYTHON --only turns
                                            and what SGLang's radix cache makes of the agents
    python benchmarks/turns.py --quick      one size, one round: shows that it runs
    python benchmarks/turns.py --json PATH

16 agents at a time, 32 in all, play 8 turns each: they begin with a system prompt of 200 tokens that all share and a
question of 20 tokens of their own, answer with 24 tokens, and get 40 tokens from a tool, which takes as long as 4
decode steps. One thread, fp32, random weights; the engine's default room (`generation.max_total_tokens`).

`kept` is the engine as it is, `anew` prefills every turn's history. Rounds alternate; `speed-up` is the median of the
rounds' ratios of CPU seconds, `prefilled` the tokens of prompts that were computed, `tokens` those of all prompts.
SGLang is asked over HTTP, with a random model of its own and answers of the same lengths: only tokens are counted.
`equal` is the part of the answers that are the same, `log-probs` the largest difference in these.

Long prompts: 8 samples are decoded when a prompt of 4,096 or 8,192 tokens arrives, which is prefilled in parts of
`generation.chunked_prefill_size`, or whole. `longest pause` is the CPU time of the slowest step before the long
sample's first token, in decode steps of the 8 alone (the median of those before); `first token` the CPU time from the
arrival to that token, in parts against whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from sglang_prefix import LIMIT_S, serving
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from asyncrl.comm.http.calls import JsonHttp
from asyncrl.comm.security import HttpSecurity
from asyncrl.inference.embedded.engine import CHUNKED_PREFILL_SIZE, GenerationEngine
from asyncrl.inference.embedded.engine_io import GenerationInput, GenerationOutput, Job, SamplingSpec

AGENTS, AT_A_TIME, TURNS, TOOL_STEPS = 32, 16, 8, 4
SYSTEM, QUESTION, ANSWER, OBSERVATION = 200, 20, 24, 40
ROOM, CONTEXT, VOCABULARY = 65536, 1024, 512
SIZES = ((96, 2), (256, 4))
LENGTHS, LONG_CONTEXT = (4096, 8192), 8448


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
        max_position_embeddings=LONG_CONTEXT,
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
            self.observe(output.output_ids)
            self.pending, self.ready_at = None, steps + TOOL_STEPS

    def observe(self, answer: list[int]) -> None:
        """Go on with an answer and what the tool says to it."""
        observed = (self.draw.randrange(1, VOCABULARY) for _ in range(OBSERVATION))
        self.history = (*self.history, *answer, *observed)


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
    everyone = agents()
    waiting, steps = list(everyone), 0
    playing: list[Any] = []
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
    return Played([agent.outputs for agent in everyone], seconds, stats.prefilled_tokens, stats.prompt_tokens)


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


async def play_on_sglang(url: str, security: HttpSecurity) -> tuple[int, int]:
    """Have all agents play on the server at `url`; tokens that were prefilled, tokens of all prompts."""
    http, places = JsonHttp(security), asyncio.Semaphore(AT_A_TIME)

    async def one(agent: Agent) -> tuple[int, int]:
        prefilled = tokens = 0
        async with places:
            for turn in range(TURNS):
                body = {
                    "input_ids": [list(agent.history)],
                    "rid": [f"{agent.number}-{turn};"],
                    "sampling_params": {"max_new_tokens": ANSWER, "ignore_eos": True},
                }
                (reply,) = await http.call("POST", f"{url}/generate", body, timeout_s=LIMIT_S)
                tokens += len(agent.history)
                prefilled += len(agent.history) - reply["meta_info"]["cached_tokens"]
                agent.observe(reply["output_ids"])
        return prefilled, tokens

    try:
        counts = await asyncio.gather(*map(one, agents()))
    finally:
        await http.close()
    return sum(prefilled for prefilled, _ in counts), sum(tokens for _, tokens in counts)


def pauses(model: PreTrainedModel, length: int, part: int) -> tuple[float, float]:
    """The longest pause in decode steps, and the CPU seconds to the first token of a prompt of `length` tokens."""
    others = 8
    engine = GenerationEngine(
        model,
        max_running_requests=others + 1,
        max_model_len=LONG_CONTEXT,
        max_total_tokens=(others + 1) * LONG_CONTEXT,
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

    for number in range(others):
        ask(f"o{number}", 20 + number, 900)
    before = [step() for _ in range(60)][20:]
    ask("long", length, 4)
    during = []
    while engine._batch.samples.live <= others:
        during.append(step())
    return max(during) / statistics.median(before), sum(during)


def compare_long(hidden: int, layers: int, length: int, rounds: int) -> dict[str, Any]:
    """One row of the second table."""
    model = model_of(hidden, layers)
    found: dict[bool, list[Any]] = {True: [], False: []}
    for number in range(rounds):
        for cut in (True, False) if number % 2 else (False, True):
            found[cut].append(pauses(model, length, CHUNKED_PREFILL_SIZE if cut else LONG_CONTEXT))
    (parts, in_parts), (whole, at_once) = (zip(*found[cut], strict=True) for cut in (True, False))
    return {
        "model": f"{layers} layers, width {hidden}",
        "length": length,
        "whole": statistics.median(whole),
        "parts": statistics.median(parts),
        "first": statistics.median(a / b for a, b in zip(in_parts, at_once, strict=True)),
    }


def tell_turns(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print the first table."""
    print("| model | tokens | prefilled anew | prefilled, kept | speed-up | equal | log-probs |", flush=True)
    print("|---|--:|--:|--:|--:|--:|--:|", flush=True)
    rows = []
    for hidden, layers in SIZES[:1] if options.quick else SIZES:
        row = compare(hidden, layers, options.rounds)
        rows.append(row)
        print(
            f"| {row['model']} | {row['tokens']:,} | {row['anew']:,} | {row['kept']:,} | {row['speed_up']:.2f} x "
            f"| {row['equal']:.3f} | {row['logprobs']:.1e} |",
            flush=True,
        )
    if options.sglang:
        with tempfile.TemporaryDirectory() as folder, serving(options.sglang, Path(folder)) as (url, security):
            prefilled, tokens = asyncio.run(play_on_sglang(url, security))
        rows.append({"model": "SGLang", "tokens": tokens, "kept": prefilled})
        print(f"| SGLang | {tokens:,} | | {prefilled:,} | | | |", flush=True)
    return rows


def tell_long(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print the second table."""
    print("| model | prompt | longest pause, whole | longest pause, in parts | first token |", flush=True)
    print("|---|--:|--:|--:|--:|", flush=True)
    rows = []
    for hidden, layers in SIZES[:1] if options.quick else SIZES:
        for length in LENGTHS[:1] if options.quick else LENGTHS:
            row = compare_long(hidden, layers, length, options.rounds)
            rows.append(row)
            print(
                f"| {row['model']} | {row['length']:,} | {row['whole']:.0f} steps | {row['parts']:.0f} steps "
                f"| {row['first']:.2f} x |",
                flush=True,
            )
    return rows


def main() -> None:
    """Measure, print the tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size, one round")
    parser.add_argument("--rounds", type=int, default=5)
    tables = {"turns": tell_turns, "long": tell_long}
    parser.add_argument("--only", choices=tables, help="one table")
    parser.add_argument("--sglang", help="interpreter that has SGLang")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    options.rounds = 1 if options.quick else options.rounds
    torch.set_num_threads(1)
    made = {}
    for name, tell in tables.items():
        if options.only in (None, name):
            made[name] = tell(options)
            print(flush=True)
    if options.json:
        options.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
