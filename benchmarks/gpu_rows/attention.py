"""Attention of the trainer's layouts alone, and the scorer: from hidden states to log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncrl.models.chunked_logprobs import EntropyMode, token_logprobs
from asyncrl.trainer.batches.micro_batch import one_micro_batch
from asyncrl.trainer.model.layout_parity import SequenceLayout, layouts
from asyncrl.trainer.settings import AttentionImplementation
from gpu_rows.bench import Bench, Figure, tried

SEQUENCES = 8
CASES = ((2048, 0), (8192, 0), (8192, 512), (32768, 0), (32768, 6000))
"""Tokens of all sequences, and those that they share."""


def attention(bench: Bench) -> Iterator[Figure]:
    """Milliseconds forward and backward, peak memory and kernels of each layout."""
    for tokens, shared in ((64, 0), (64, 4)) if bench.tiny else CASES:
        for layout in layouts(AttentionImplementation.sdpa):
            if layout.attention.startswith("asyncrl"):
                name = f"{tokens} tokens, {shared} shared, {layout}"
                yield from tried(bench, name, partial(_layout, bench, layout, tokens, shared, name))


def _layout(bench: Bench, layout: SequenceLayout, tokens: int, shared: int, name: str) -> Iterator[Figure]:
    config, dtype = bench.config, getattr(torch, bench.dtype)
    length = tokens // SEQUENCES
    prompt = list(range(2, 2 + min(shared, length - 1)))
    sequences = [[*prompt, *([2 + each] * (length - len(prompt)))] for each in range(SEQUENCES)]
    micro_batch = one_micro_batch(sequences, layout.kind, bench.device, wanted=False)
    told: dict[str, Any] = {k: v for k, v in micro_batch.model_inputs.items() if k not in ("input_ids", "position_ids")}
    stream = micro_batch.model_inputs["input_ids"].shape[1]
    size = config.hidden_size // config.num_attention_heads
    kept_heads = config.num_key_value_heads or config.num_attention_heads
    heads = (config.num_attention_heads, kept_heads, kept_heads)
    q, k, v = (
        torch.randn(1, count, stream, size, device=bench.device, dtype=dtype, requires_grad=True) for count in heads
    )
    function, module = ALL_ATTENTION_FUNCTIONS[layout.attention], nn.Module()

    def forward() -> Tensor:
        out: Tensor = function(module, q, k, v, None, **told)[0]
        return out

    def both() -> None:
        torch.autograd.grad(forward().sum(), (q, k, v))

    rounds = bench.size(5, 1)
    ahead, together = bench.seconds(forward, rounds), bench.seconds(both, rounds)
    yield Figure(name, "forward", 1e3 * ahead, "ms")
    yield Figure(name, "backward", 1e3 * (together - ahead), "ms")
    yield from bench.peak(name)
    if bench.cuda:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            both()
            bench.synchronise()
        times = sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)
        yield Figure(name, "kernels", ", ".join(event.key[:40] for event in times[:3]))


def scoring(bench: Bench) -> Iterator[Figure]:
    """Milliseconds, forward and backward, of log-probabilities in chunks of different sizes."""
    tokens = bench.size(16384, 64)
    for mebibytes in (256, 1024) if bench.tiny else (256, 512, 1024, 2048):
        for entropy in (EntropyMode.none, EntropyMode.constant, EntropyMode.differentiable):
            name = f"{tokens} tokens, chunks of {mebibytes} MiB, entropy {entropy}"
            yield from tried(bench, name, partial(_score, bench, tokens, mebibytes << 20, entropy, name))


def _score(bench: Bench, tokens: int, chunk: int, entropy: EntropyMode, name: str) -> Iterator[Figure]:
    config, dtype = bench.config, getattr(torch, bench.dtype)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device=bench.device, dtype=dtype)
    hidden = torch.randn(tokens, config.hidden_size, device=bench.device, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, config.vocab_size, (tokens,), device=bench.device)

    def step() -> None:
        logprobs, entropies = token_logprobs(hidden, targets, head, entropy=entropy, max_logits_bytes=chunk)
        total = logprobs.sum()
        if entropy == EntropyMode.differentiable and entropies is not None:
            total = total + entropies.sum()
        torch.autograd.grad(total, (hidden, head.weight))

    yield Figure(name, "forward and backward", 1e3 * bench.seconds(step, bench.size(3, 1)), "ms")
    yield from bench.peak(name)
