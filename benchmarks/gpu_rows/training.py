"""Train steps of the random model: tokens per second, utilisation, memory beside its estimate, kernel launches.

Utilisation is the floating-point operations that the model itself takes, over what as many seconds of plain bf16 matrix
products do on this GPU. Forward and backward, as PaLM's appendix B (arXiv 2204.02311) counts them, are

    6 W T + 12 L A P     W: weights of all matrix products, the head's included, the input embedding's not
                         T computed tokens, L layers, A = query heads x head size
                         P pairs of tokens of which one sees the other

What gradient checkpointing computes again is not counted. Of shared prefixes the tokens of the stream are counted, each
once, while `tokens/s` are of the samples, as a run reports them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import rank_world, train_step
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.trainer.batches.step_batch import build_step_batch
from asyncrl.trainer.parallel.placement import Coordinates, Layout
from asyncrl.trainer.rank.training_rank import TrainingRank
from asyncrl.trainer.settings import AttentionImplementation, KeptOn
from asyncrl.trainer.sizing import Workload, count, need, packed_shape
from gpu_rows.bench import GIB, Bench, Figure, grouped, tried
from gpu_rows.machine import matmul_flops

STEP = "step of 16 x 2048, packed"
"""The row that others refer to."""
GROUP = 8


@dataclass(frozen=True, slots=True)
class Variant:
    """One train step. `prompt` tokens of `length` are shared by groups of `GROUP` samples; 0: samples share nothing."""

    name: str
    engine: str = "flat"
    checkpointing: bool = False
    moments_on: KeptOn = KeptOn.device
    offload: bool = False
    compiled: bool = False
    micro_batch: int = 8192
    sequences: int = 16
    length: int = 2048
    prompt: int = 0
    ragged: bool = False

    def lengths(self, tiny: bool) -> list[int]:
        """Tokens of each sample; ragged ones are log-normal, as answers of a model that reasons."""
        length = 24 if tiny else self.length
        if not self.ragged:
            return [length] * self.sequences
        drawn = np.random.default_rng(0).lognormal(0.0, 0.7, self.sequences)
        least = self.shared(tiny) + 2
        return [max(least, min(4 * length, round(length * each))) for each in (drawn / drawn.mean()).tolist()]

    def shared(self, tiny: bool) -> int:
        """Tokens that a group shares."""
        return min(self.prompt, 8) if tiny else self.prompt


VARIANTS = (
    Variant(STEP),
    Variant("the same, checkpointing", checkpointing=True),
    Variant("the same, checkpointing, micro-batches of 32768", checkpointing=True, micro_batch=32768),
    Variant("the same, checkpointing, moments on the host", checkpointing=True, moments_on=KeptOn.host),
    Variant("the same, checkpointing, off-loaded", checkpointing=True, offload=True),
    Variant("the same, sharded, checkpointing", engine="sharded", checkpointing=True),
    Variant(
        "the same, sharded, checkpointing, micro-batches of 32768",
        engine="sharded",
        checkpointing=True,
        micro_batch=32768,
    ),
    Variant("lognormal lengths, checkpointing", ragged=True, checkpointing=True, micro_batch=16384),
    Variant("prompts of 512 shared, sdpa", prompt=512, checkpointing=True),
    Variant("8 x 9000 after 6000 shared", prompt=6000, sequences=8, length=9000, checkpointing=True, micro_batch=32768),
    Variant("step of 16 x 2048, packed, compiled", compiled=True),
)
OTHER_PACKED = tuple(each.name for each in VARIANTS[1:] if not each.prompt and not each.ragged)
"""Variants of the first one: the same samples, computed in other ways."""
SHARED = tuple(each.name for each in VARIANTS if each.prompt)
"""Variants in which groups share their prompts."""
QUICK = (0, 5, 8)
"""Places of the variants that the small size runs: each way of the code once."""


def training(bench: Bench) -> Iterator[Figure]:
    """Every variant, one after the other."""
    peak = bench.earlier("machine", "matmul bfloat16")
    flops = matmul_flops(bench, torch.bfloat16) if peak is None else 1e12 * peak
    chosen = [VARIANTS[place] for place in QUICK] if bench.tiny else VARIANTS
    for number, variant in enumerate(chosen):
        folder = bench.folder / f"variant{number}"
        folder.mkdir()
        yield from tried(bench, variant.name, partial(_variant, bench, variant, folder, flops))


@contextmanager
def rank_of(bench: Bench, variant: Variant, folder: Path, dtype: Dtype | None = None) -> Iterator[TrainingRank]:
    """A rank that trains alone as `variant` says, in the type that is chosen for the device, or in `dtype`."""
    config = ExperimentConfig()
    config.model.path, config.model.dtype = bench.model, dtype or bench.dtype
    config.trainer.engine, config.trainer.gradient_checkpointing = variant.engine, variant.checkpointing
    config.trainer.compile = variant.compiled
    config.trainer.offload, config.optimizer.moments_on = variant.offload, variant.moments_on
    config.trainer.tokens_per_micro_batch = bench.size(variant.micro_batch, 128)
    with rank_world(config, 0, folder, bench.device) as (_, build):
        yield build()


def _variant(bench: Bench, variant: Variant, folder: Path, peak_flops: float) -> Iterator[Figure]:
    lengths, shared = variant.lengths(bench.tiny), variant.shared(bench.tiny)
    trajectories = grouped(lengths, shared, GROUP, bench.config.vocab_size)
    with rank_of(bench, variant, folder) as rank:
        engine = rank.policy("actor")

        def step() -> None:
            batch = build_step_batch(
                trajectories, [0] * len(trajectories), version=0, num_minibatches=1, device=bench.device
            )
            with engine.on_device():
                train_step(engine, batch)

        took = bench.seconds(step, bench.size(3, 1))
        tokens, pairs = stream_of(lengths, shared)
        yield Figure(variant.name, "step", took, "s")
        yield Figure(variant.name, "throughput", sum(lengths) / took, "tokens/s")
        used = model_flops(bench.config, tokens, pairs) / took / peak_flops
        yield Figure(variant.name, "utilisation", used, "of the matmul peak")
        yield from bench.peak(variant.name)
        yield Figure(variant.name, "peak as estimated", estimated(bench, variant, max(lengths)) / GIB, "GiB")
        if bench.cuda:
            yield Figure(variant.name, "kernels", float(launches(bench, step)), "launches")


def stream_of(lengths: list[int], shared: int) -> tuple[int, int]:
    """Tokens that are computed, and pairs of which one sees the other, where groups share their first tokens."""
    tokens = pairs = 0
    for first in range(0, len(lengths), GROUP):
        group = lengths[first : first + GROUP]
        tokens += shared + sum(group) - shared * len(group)
        own = [length * (length + 1) // 2 - shared * (shared + 1) // 2 for length in group]
        pairs += shared * (shared + 1) // 2 + sum(own)
    return tokens, pairs


def model_flops(config: Qwen2Config, tokens: int, pairs: int) -> float:
    """Floating-point operations of a train step; see the module's docstring."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    head = hidden // heads
    kept_heads = config.num_key_value_heads or heads
    layer = hidden * head * (2 * heads + 2 * kept_heads) + 3 * hidden * config.intermediate_size
    weights = config.num_hidden_layers * layer + hidden * config.vocab_size
    return 6.0 * weights * tokens + 12.0 * config.num_hidden_layers * heads * head * pairs


def estimated(bench: Bench, variant: Variant, longest: int) -> int:
    """Bytes that `trainer.sizing.memory_estimate` expects at the peak."""
    work = Workload(
        variant.engine,
        bench.dtype,
        AttentionImplementation.sdpa,
        bench.size(variant.micro_batch, 128),
        longest,
        moments_on_host=variant.moments_on == KeptOn.host,
        shape=packed_shape(
            variant.shared(bench.tiny),
            longest - variant.shared(bench.tiny),
            GROUP if variant.prompt else 1,
            bench.size(variant.micro_batch, 128),
            share=variant.prompt > 0,
        ),
        varlen=bench.cuda and bench.dtype == Dtype.bfloat16,
    )
    of = need(count(bench.config.to_dict()), Layout(), Coordinates(0, 0, 0), work, trained=True)
    return of.total_checkpointed if variant.checkpointing else of.total


def launches(bench: Bench, step: Any) -> int:
    """Kernels that a call of `step` launches."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        bench.synchronise()
    return sum(event.count for event in profiled.key_averages() if "LaunchKernel" in event.key)
