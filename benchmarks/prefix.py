"""A shared prefix computed once, against packed samples: a train step's CPU time, and how far the results differ.

    python benchmarks/prefix.py                    shapes of prompt, answer and group, and batches of the demo
    python benchmarks/prefix.py --quick            one shape, few rounds: shows that it runs
    python benchmarks/prefix.py --json out.json

The step is the actor's: a forward pass for proximal log-probabilities, then four minibatches with a backward pass and
an optimizer step each; one thread. Rounds of `packed` and `tree` alternate, `speed-up` is the median of their ratios.
`stream` is the part of the samples' tokens that is computed. Random answers share their prompt only; the demo's, made
here by its base model and its reward, share far more, and only groups with a signal are trained, as in a run.
`log-probs` is the largest difference of any log-probability, `gradients` of any gradient, in parts of the largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.config.load import load_supervised
from asyncrl.datasets.arithmetic import ArithmeticDataset
from asyncrl.datasets.tokenizers import load_tokenizer
from asyncrl.reference import ReferenceConfig, ReferenceTrainer
from asyncrl.rewards.arithmetic import arithmetic_reward
from asyncrl.trainer.engines.base import PolicyOutputs
from asyncrl.trainer.engines.flat import FlatPolicyEngine
from asyncrl.trainer.engines.flat_adamw import FlatAdamW
from asyncrl.trainer.micro_batch import MicroBatch
from asyncrl.trainer.micro_batch_layout import AttentionKind
from asyncrl.trainer.models import load_causal_lm
from asyncrl.trainer.packed_attention import PACKED
from asyncrl.trainer.settings import OptimizerConfig
from asyncrl.trainer.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.supervised.base_model import ensure_base_model

SHAPES = ((15, 25, 8), (60, 400, 8), (200, 60, 8), (1000, 200, 16))
SIZES = ((96, 2), (256, 4))
MINIBATCHES, BUDGET, VOCABULARY = 4, 16384, 512
GROUPS_TOKENS = 16_000
"""Samples' tokens of a batch, about; at least one group a minibatch."""


def model_folder(folder: Path, hidden: int, layers: int) -> str:
    """A randomly initialised model."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
    return str(folder)


def random_groups(prompt: int, answer: int, group: int) -> list[list[Sample]]:
    """Groups of a common prompt and random answers, of half to one and a half times `answer` tokens."""
    rng = np.random.default_rng(0)
    count = max(MINIBATCHES, GROUPS_TOKENS // (group * (prompt + answer)) // MINIBATCHES * MINIBATCHES)
    groups = []
    for _ in range(count):
        begin = rng.integers(0, VOCABULARY, prompt)
        lengths = rng.integers(answer // 2, answer + answer // 2, group)
        ends = (rng.integers(0, VOCABULARY, length) for length in lengths)
        groups.append([sample_of(np.concatenate((begin, end)), prompt) for end in ends])
    return groups


def sample_of(tokens: Any, prompt: int) -> Sample:
    """A sample whose first `prompt` tokens are given."""
    mask = (np.arange(len(tokens)) >= prompt).astype(np.uint8)
    versions = np.where(mask, 0, -1).astype(np.int32)
    return Sample(tokens.astype(np.int32), mask, np.zeros(len(tokens), np.float32), versions, 0.0)


def demo_groups(base: Path, steps: int) -> list[list[Sample]]:
    """The groups with a signal of the demo's batch after `steps` steps."""
    model = AutoModelForCausalLM.from_pretrained(str(base))
    config = ReferenceConfig(seed=7)
    trainer = ReferenceTrainer(config, model, load_tokenizer(base), ArithmeticDataset(seed=7), arithmetic_reward)
    for _ in range(steps):
        trainer.train_step()
    return [list(group) for group in trainer.generate() if len({sample.reward for sample in group}) > 1]


def batch_of(groups: Sequence[Sequence[Sample]]) -> StepBatch:
    """The groups in four minibatches."""
    trajectories = [Trajectory(f"r{i}", f"p{i}", i, tuple(group)) for i, group in enumerate(groups)]
    dealt = [i % MINIBATCHES for i in range(len(groups))]
    return build_step_batch(trajectories, dealt, version=0, num_minibatches=MINIBATCHES)


def engine_of(folder: str, kind: AttentionKind) -> FlatPolicyEngine:
    """A trained engine that lays out micro-batches as `kind`."""
    model = load_causal_lm(folder, "float32", "sdpa", torch.device("cpu"))
    model.set_attn_implementation(PACKED)
    optimizer = FlatAdamW(model.named_parameters(), OptimizerConfig(lr=0.0), 1000)
    return FlatPolicyEngine(model, temperature=1.0, attention=kind, tokens_per_micro_batch=BUDGET, optimizer=optimizer)


def step(engine: FlatPolicyEngine, batch: StepBatch) -> tuple[Tensor, Tensor, int, int]:
    """The actor's step; log-probabilities, the last minibatch's gradient, tokens computed and tokens of the samples."""
    wanted_T = batch["loss_mask"]
    weights_T = torch.linspace(-1, 1, batch.num_tokens)
    computed = whole = 0
    later_T = (batch["minibatches"] != 0)[batch.seq_ids_T]
    logprobs_T = engine.logprobs(batch, wanted_T & later_T)

    def loss(micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, Any]]:
        nonlocal computed, whole
        computed += micro_batch.model_inputs["input_ids"].numel()
        whole += len(micro_batch.sources_I)
        return (outputs.logprobs_N * weights_T[micro_batch.targets_N]).sum() / batch.num_tokens, {}

    for number in range(MINIBATCHES):
        engine.compute_gradients(batch, wanted_T, batch.minibatch(number), loss)
        gradient = engine.optimizer.grad.clone()
        engine.step()
    return logprobs_T, gradient, computed, whole


def compare(name: str, folder: str, groups: Sequence[Sequence[Sample]], rounds: int) -> dict[str, Any]:
    """One row of the table."""
    engines = {kind: engine_of(folder, kind) for kind in (AttentionKind.packed, AttentionKind.tree)}
    found = {kind: step(engine, batch_of(groups)) for kind, engine in engines.items()}
    packed, tree = found.values()
    times: dict[AttentionKind, list[float]] = {kind: [] for kind in engines}
    for number in range(rounds):
        for kind in list(engines)[:: 1 if number % 2 else -1]:
            batch = batch_of(groups)  # a new one: what is found out about a batch is kept with it
            begun = time.process_time()
            step(engines[kind], batch)
            times[kind].append(time.process_time() - begun)
    ratios = [a / b for a, b in zip(times[AttentionKind.packed], times[AttentionKind.tree], strict=True)]
    return {
        "batch": name,
        "samples": sum(map(len, groups)),
        "tokens": tree[3],
        "stream": tree[2] / tree[3],
        "speed_up": statistics.median(ratios),
        "logprobs": float((packed[0] - tree[0]).abs().max()),
        "gradients": float((packed[1] - tree[1]).abs().max() / packed[1].abs().max()),
    }


def main() -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, two rounds")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 2 if options.quick else options.rounds
    rows = []
    print("| batch | samples | tokens | stream | speed-up | log-probs | gradients |\n|---|--:|--:|--:|--:|--:|--:|")

    def row(name: str, folder: str, groups: Sequence[Sequence[Sample]]) -> None:
        rows.append(made := compare(name, folder, groups, rounds))
        print(
            f"| {name} | {made['samples']} | {made['tokens']:,} | {made['stream']:.2f} | {made['speed_up']:.2f} x "
            f"| {made['logprobs']:.1e} | {made['gradients']:.1e} |",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as scratch:
        for hidden, layers in SIZES[:1] if options.quick else SIZES:
            folder = model_folder(Path(scratch) / f"{hidden}x{layers}", hidden, layers)
            for shape in SHAPES[:1] if options.quick else SHAPES:
                row(f"{'/'.join(map(str, shape))}, {hidden} x {layers}", folder, random_groups(*shape))
    if not options.quick:
        base = ensure_base_model(load_supervised("sft"))
        for steps in (0, 20):
            row(f"demo after {steps} steps", str(base), demo_groups(base, steps))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
