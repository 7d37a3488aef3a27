"""Training speed of one GPU: tokens per second and model FLOPs utilisation of a 1.5B model with random weights.

    python benchmarks/gpu_training.py                                on the first GPU
    python benchmarks/gpu_training.py --device cpu --tiny            the same code, small, where there is none

Utilisation is the FLOPs that the model itself takes, over what as many seconds of plain bf16 matrix products do on this
GPU, measured first (8192 x 8192 x 8192). The model's FLOPs per token, forward and backward, are those of PaLM's
appendix B (arXiv 2204.02311):

    6 W + 6 L A s        W: weights of all matrix products, the head's included, the input embedding's not
                         L layers, A = query heads x head size, s: length of the token's sequence

The second term is half of PaLM's, as attention is causal and only that half is counted.

What gradient checkpointing computes again is not counted. Target: 40 % and more, one train step of 16 sequences of
2,048 tokens in bf16.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.comm.name_resolve import make_resolver
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.master.graph.builtin import load_graph
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.engines.base import PolicyEngine, PolicyOutputs
from asyncrl.trainer.parallel.rank_position import World
from asyncrl.trainer.parallel.world import training_world
from asyncrl.trainer.placement import placement
from asyncrl.trainer.roles import build_rank
from asyncrl.trainer.settings import AttentionImplementation, MomentsOn

QWEN2_1_5B = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "tie_word_embeddings": True,
}
"""Qwen2.5-1.5B's sizes."""
TINY = QWEN2_1_5B | {"vocab_size": 512, "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 192}


@dataclass(frozen=True, slots=True)
class Variant:
    """One row."""

    engine: str
    checkpointing: bool = False
    moments_on: MomentsOn = MomentsOn.device

    def __str__(self) -> str:
        words = [str(self.engine)]
        words += ["checkpointing"] * self.checkpointing
        words += ["moments on host"] * (self.moments_on == MomentsOn.host)
        return ", ".join(words)


VARIANTS = (
    Variant("flat"),
    Variant("flat", checkpointing=True),
    Variant("flat", checkpointing=True, moments_on=MomentsOn.host),
    Variant("sharded"),
    Variant("sharded", checkpointing=True),
)


def synchronise(device: torch.device) -> None:
    """Wait for what the device is at."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(step: Callable[[], None], rounds: int, device: torch.device) -> float:
    """Median of `rounds` after one that warms up."""
    step()
    times = []
    for _ in range(rounds):
        synchronise(device)
        begun = time.perf_counter()
        step()
        synchronise(device)
        times.append(time.perf_counter() - begun)
    return float(np.median(times))


def matmul_peak(device: torch.device, size: int) -> float:
    """FLOPs per second of bf16 products of two square matrices."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))

    def products() -> None:
        for _ in range(10):
            left @ right

    return 10 * 2 * size**3 / seconds(products, 5, device)


def model_flops(config: Qwen2Config, lengths: list[int]) -> float:
    """Return the floating-point operations of a train step on sequences of these lengths; see the module's
    docstring.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    head = hidden // heads
    attention = hidden * head * (2 * heads + 2 * config.num_key_value_heads)
    layer = attention + 3 * hidden * config.intermediate_size
    weights = config.num_hidden_layers * layer + hidden * config.vocab_size
    attended = sum(length * length for length in lengths)
    return 6.0 * weights * sum(lengths) + 6.0 * config.num_hidden_layers * heads * head * attended


def step_batch(lengths: list[int], vocabulary: int, device: torch.device) -> StepBatch:
    """Sequences of these lengths, the first quarter of each its prompt."""
    rng = np.random.default_rng(0)
    made = []
    for number, length in enumerate(lengths):
        mask = (np.arange(length) >= max(1, length // 4)).astype(np.uint8)
        sample = Sample(
            tokens=rng.integers(0, vocabulary, length).astype(np.int32),
            loss_mask=mask,
            behave_logprobs=np.zeros(length, np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            reward=0.0,
        )
        made.append(Trajectory(f"r{number}", f"p{number}", number, (sample,)))
    return build_step_batch(made, [0] * len(made), version=0, num_minibatches=1, device=device)


def train_step(engine: PolicyEngine, batch: StepBatch) -> None:
    """One optimizer step."""
    total = int(batch["loss_mask"].sum())

    def loss(_: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, Any]]:
        return -outputs.logprobs_N.sum() / total, {}

    engine.compute_gradients(batch, batch["loss_mask"], range(batch.num_seqs), loss)
    engine.step()


def measure(variant: Variant, path: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Tokens per second and peak memory of one variant."""
    device = torch.device(args.device)
    config = ExperimentConfig()
    config.model.path, config.model.dtype = path, Dtype.bfloat16
    config.model.attn_implementation = AttentionImplementation(args.attention)
    config.trainer.engine, config.trainer.gradient_checkpointing = variant.engine, variant.checkpointing
    config.trainer.tokens_per_micro_batch = args.micro_batch
    config.optimizer.moments_on = variant.moments_on
    graph, resolver = load_graph(config), make_resolver("file", str(folder / "names"))
    lengths = [args.length] * args.sequences
    gc.collect()  # of the variant before: FSDP2's modules and states refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

    def run(world: World) -> float:
        engine = build_rank(config, graph, world, device).policy("actor")
        batch = step_batch(lengths, engine.model_config.vocab_size, device)
        return seconds(lambda: train_step(engine, batch), args.rounds, device)

    if variant.engine == "flat":
        took = run(World())
    else:
        with training_world(config, 0, placement(config, graph), device, folder, resolver) as world:
            took = run(world)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else float("nan")
    return {"variant": str(variant), "tokens_per_s": sum(lengths) / took, "step_s": took, "peak_GiB": peak}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=8192)
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "flash_attention_2"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    sizes: dict[str, Any] = TINY if args.tiny else QWEN2_1_5B
    model_config = Qwen2Config(**sizes)
    peak = matmul_peak(device, 256 if args.tiny else 8192)
    flops = model_flops(model_config, [args.length] * args.sequences)
    print(f"matmul peak {peak / 1e12:.1f} TFLOP/s; {flops / 1e12:.1f} TFLOP a step")
    rows = []
    with tempfile.TemporaryDirectory() as root:
        path = f"{root}/model"
        with device:
            model = AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        model.save_pretrained(path)
        del model
        print(f"{'variant':<36} {'tok/s':>9} {'step s':>8} {'MFU':>6} {'peak GiB':>9}")
        for number, variant in enumerate(VARIANTS):
            folder = Path(root, str(number))
            folder.mkdir()
            row = measure(variant, path, args, folder)
            row["mfu"] = flops / row["step_s"] / peak
            rows.append(row)
            print(
                f"{row['variant']:<36} {row['tokens_per_s']:>9.0f} {row['step_s']:>8.3f} {row['mfu']:>6.1%} "
                f"{row['peak_GiB']:>9.1f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"peak": peak, "flops": flops, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
