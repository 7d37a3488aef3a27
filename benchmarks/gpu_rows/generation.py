"""Decoding by the embedded engine, and how far its log-probabilities are from the trainer's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from tiny_models import answered
from transformers import Qwen2Config

from asyncrl.config.setting import Dtype
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.engine_io import GenerationInput, SamplingSpec
from asyncrl.trainer.engines.base import PolicyEngine
from asyncrl.trainer.model.load_models import load_causal_lm
from asyncrl.trainer.settings import AttentionImplementation
from gpu_rows.bench import Bench, Figure, tried
from gpu_rows.training import VARIANTS, launches, rank_of

Answer = tuple[Sequence[int], Sequence[int], Sequence[float]]
"""A prompt, the engine's answer, and the log-probabilities of the answer's tokens."""


def load_engine(bench: Bench, dtype: Dtype, rows: int, length: int, folder: str = "") -> GenerationEngine:
    """The embedded engine with the model of `folder`; by default with the random one."""
    model = load_causal_lm(folder or bench.model, dtype, AttentionImplementation.eager, bench.device)
    return GenerationEngine(model, max_running_requests=rows, max_model_len=length, max_total_tokens=rows * length)


def embedded(bench: Bench) -> Iterator[Figure]:
    """Tokens per second by rows and length, plain and with a nucleus."""
    cases = [(1, 1024, 1.0), (16, 1024, 1.0), (64, 1024, 1.0), (256, 1024, 1.0), (16, 8192, 1.0), (64, 1024, 0.9)]
    for rows, length, top_p in [(4, 16, 0.9)] if bench.tiny else cases:
        name = f"{rows} rows after {length} tokens" + (f", top_p {top_p}" if top_p < 1 else "")
        yield from tried(bench, name, partial(_decode, bench, rows, length, top_p, name))


def _decode(bench: Bench, rows: int, length: int, top_p: float, name: str) -> Iterator[Figure]:
    steps = bench.size(50, 4)
    engine = load_engine(bench, bench.dtype, rows, length + 2 * steps + 8)
    prompt = tuple(2 + number % (bench.config.vocab_size - 2) for number in range(length))
    specs = [SamplingSpec(max_new_tokens=2 * steps + 4, top_p=top_p, seed=row) for row in range(rows)]
    engine.submit(Job(tuple(GenerationInput(f"r{row}", prompt, spec) for row, spec in enumerate(specs))))
    for _ in range(4):  # prefilled, and all samples have parted
        engine.step()
    bench.synchronise()
    begun = time.perf_counter()
    for _ in range(steps):
        engine.step()
    bench.synchronise()
    took = (time.perf_counter() - begun) / steps
    yield Figure(name, "throughput", rows / took, "tokens/s")
    yield Figure(name, "step", 1e3 * took, "ms")
    yield from bandwidth_share(bench, name, rows, length, rows / took)
    if bench.cuda:
        yield Figure(name, "kernels", float(launches(bench, engine.step)), "launches a step")
    engine.abort(abort_all=True)
    engine.step()
    engine.close()


def bandwidth_share(bench: Bench, part: str, rows: int, length: int, tokens_per_s: float) -> Iterator[Figure]:
    """The rate over what reading weights, keys and values once for each step would allow, if that was measured."""
    rate = bench.earlier("machine", "memory bandwidth")
    if rate is not None:
        share = tokens_per_s / rows * step_bytes(bench.config, rows, length) / (1e9 * rate)
        yield Figure(part, "share of the memory bandwidth", share)


def step_bytes(config: Qwen2Config, rows: int, length: int) -> float:
    """Bytes, in 16 bits, that decoding one token of each row reads: the weights, and what `length` tokens left."""
    hidden, head = config.hidden_size, config.hidden_size // config.num_attention_heads
    kept_heads = config.num_key_value_heads or config.num_attention_heads
    layer = hidden * head * (2 * config.num_attention_heads + 2 * kept_heads)
    weights = config.num_hidden_layers * (layer + 3 * hidden * config.intermediate_size) + hidden * config.vocab_size
    cached = 2 * config.num_hidden_layers * kept_heads * head
    return 2.0 * (weights + rows * length * cached)


def agreement(bench: Bench) -> Iterator[Figure]:
    """Mean and worst distance of the embedded engine's log-probabilities from the trainer's, by type."""
    for dtype in (Dtype.bfloat16,) if bench.tiny else (Dtype.bfloat16, Dtype.float32):
        yield from tried(bench, str(dtype), partial(_agreement, bench, dtype))


def _agreement(bench: Bench, dtype: Dtype) -> Iterator[Figure]:
    answer, rows = bench.size(256, 8), bench.size(32, 4)
    engine = load_engine(bench, dtype, rows, 2 * answer)
    prompts = [tuple(range(2 + row, 2 + row + answer // 2)) for row in range(rows)]
    specs = [SamplingSpec(max_new_tokens=answer, seed=row) for row in range(rows)]
    inputs = [
        GenerationInput(f"r{row}", each, spec) for row, (each, spec) in enumerate(zip(prompts, specs, strict=True))
    ]
    outputs = answered(engine, inputs)
    engine.close()
    del engine
    bench.forget()
    with rank_of(bench, VARIANTS[0], bench.folder, dtype) as rank:
        answers = [
            (prompt, output.output_ids, output.logprobs) for prompt, output in zip(prompts, outputs, strict=True)
        ]
        yield from distances(rank.policy("actor"), answers, f"embedded, {dtype}")


def distances(policy: PolicyEngine, answers: Sequence[Answer], name: str) -> Iterator[Figure]:
    """Distance of the engine's log-probabilities of its `answers` from those of `policy`."""
    scored = policy.score_sequences([[*prompt, *answer] for prompt, answer, _ in answers])
    own = np.concatenate([each[len(prompt) :] for each, (prompt, _, _) in zip(scored, answers, strict=True)])
    difference = np.abs(own - np.concatenate([logprobs for _, _, logprobs in answers]))
    yield Figure(name, "mean distance", float(difference.mean()), "nats")
    yield Figure(name, "worst distance", float(difference.max()), "nats")
