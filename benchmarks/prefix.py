"""A shared prefix computed once, in training and in generation: CPU time, and how far the results differ.

    python benchmarks/prefix.py                    shapes of prompt, answer and group, and batches of the demo
    python benchmarks/prefix.py --only generation  one of the two parts
    python benchmarks/prefix.py --quick            one shape, few rounds: shows that it runs
    python benchmarks/prefix.py --json out.json

The step is the actor's: a forward pass for proximal log-probabilities, then four minibatches with a backward pass and
an optimizer step each; one thread. Rounds of `packed` and `tree` alternate, `speed-up` is the median of their ratios.
`stream` is the part of the samples' tokens that is computed. Random answers share their prompt only; the demo's, made
here by its base model and its reward, share far more, and only groups with a signal are trained, as in a run.
`log-probs` is the largest difference of any log-probability, `gradients` of any gradient, in parts of the largest.

Generation is the embedded engine, one thread, on the same groups, all asked for at once; answers of the shapes are of
their full length. Without sharing every sample has a row of the model to itself (a prompt is prefilled once all the
same). `rows` is the part of the decoded rows that are computed. `interrupted`: every 16 tokens all samples go back to
the queue, as at a weight update, and are prefilled again. `prefilled` is the part of their distinct prefixes' tokens
that is computed then, prompts at the start included; `by that` what it makes of `interrupted`: the speed-up over an
engine whose samples share rows, and are prefilled by themselves once they have parted. `equal` is the part of the
samples whose tokens are those without sharing, `log-probs` the largest difference in them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.config.load import load_supervised
from asyncrl.config.setting import Dtype
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.engine_io import GenerationInput, GenerationOutput, Job, SamplingSpec
from asyncrl.inference.embedded.engine_io import Sequence as Running
from asyncrl.inference.messages import PauseMode
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.plugins.datasets.prompt_format import PromptFormat
from asyncrl.plugins.datasets.tokenizers import load_tokenizer
from asyncrl.plugins.rewards.arithmetic import arithmetic_reward
from asyncrl.reference import ReferenceConfig, ReferenceTrainer
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.engines.base import PolicyOutputs
from asyncrl.trainer.engines.flat.engine import FlatPolicyEngine
from asyncrl.trainer.engines.flat.flat_optimizer import FlatOptimizer
from asyncrl.trainer.model.attention import PACKED
from asyncrl.trainer.model.load_models import load_causal_lm
from asyncrl.trainer.settings import AttentionImplementation, OptimizerConfig
from asyncrl.trainer.supervised.base_model import ensure_base_model

SHAPES = ((15, 25, 8), (60, 400, 8), (200, 60, 8), (1000, 200, 16))
SIZES = ((96, 2), (256, 4))
MINIBATCHES, BUDGET, VOCABULARY = 4, 16384, 512
GROUPS_TOKENS, QUICK_GROUPS_TOKENS = 16_000, 1_500
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


def random_groups(prompt: int, answer: int, group: int, tokens: int) -> list[list[Sample]]:
    """Groups of a common prompt and random answers, of half to one and a half times `answer` tokens."""
    rng = np.random.default_rng(0)
    count = max(MINIBATCHES, tokens // (group * (prompt + answer)) // MINIBATCHES * MINIBATCHES)
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


def demo(base: Path, steps: int) -> ReferenceTrainer:
    """The demo after `steps` steps."""
    model = AutoModelForCausalLM.from_pretrained(str(base))
    config = ReferenceConfig(seed=7)
    trainer = ReferenceTrainer(
        config, model, PromptFormat(load_tokenizer(base), None), ArithmeticDataset(seed=7), arithmetic_reward
    )
    for _ in range(steps):
        trainer.train_step()
    return trainer


def batch_of(groups: Sequence[Sequence[Sample]]) -> StepBatch:
    """The groups in four minibatches."""
    trajectories = [Trajectory(f"r{i}", f"p{i}", i, tuple(group)) for i, group in enumerate(groups)]
    dealt = [i % MINIBATCHES for i in range(len(groups))]
    return build_step_batch(trajectories, dealt, version=0, num_minibatches=MINIBATCHES)


def engine_of(folder: str, kind: AttentionKind) -> FlatPolicyEngine:
    """A trained engine that lays out micro-batches as `kind`."""
    model = load_causal_lm(folder, Dtype.float32, AttentionImplementation.sdpa, torch.device("cpu"))
    model.set_attn_implementation(PACKED)
    optimizer = FlatOptimizer(model.named_parameters(), OptimizerConfig())
    return FlatPolicyEngine(model, temperature=1.0, attention=kind, tokens_per_micro_batch=BUDGET, optimizer=optimizer)


def step(engine: FlatPolicyEngine, batch: StepBatch) -> tuple[Tensor, Tensor, int, int]:
    """The actor's step; log-probabilities, the last minibatch's gradient, tokens computed and tokens of the samples."""
    wanted_T = batch["loss_mask"]
    weights_T = torch.linspace(-1, 1, batch.num_tokens)
    computed = whole = 0
    later_T = (batch["minibatches"][:, 0] != 0)[batch.seq_ids_T]
    logprobs_T = engine.logprobs(batch, wanted_T & later_T)

    def loss(micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, Any]]:
        nonlocal computed, whole
        computed += micro_batch.model_inputs["input_ids"].numel()
        whole += len(micro_batch.sources_I)
        return (outputs.logprobs_N * weights_T[micro_batch.targets_N]).sum() / batch.num_tokens, {}

    for number in range(MINIBATCHES):
        engine.compute_gradients(batch, wanted_T, batch.minibatch(number), loss)
        gradient = engine.optimizer.grad.clone()
        engine.step(0.0)
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


class Sharing(Enum):
    """Prefixes that samples share in the engine."""

    nothing = auto()
    """But a prompt that several ask for at once, which is prefilled once all the same."""
    rows = auto()
    """Rows of the model for as long as they are alike; each that has parted is prefilled by itself."""
    all = auto()
    """Rows, and prefixes that are prefilled: as the engine is."""


@contextlib.contextmanager
def rows_of_their_own() -> Iterator[None]:
    """Meanwhile no two samples have a row of the model in common."""
    shared = Running.context
    Running.context = property(lambda self: (self.arrival, -1))  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Running.context = shared  # type: ignore[method-assign]


@dataclass(frozen=True)
class Generated:
    """The answers, CPU seconds without the engine's making, the part of the decoded rows that were computed, and the
    tokens that were prefilled."""

    outputs: list[GenerationOutput]
    seconds: float
    rows: float
    prefilled: int


def generate(model: Any, inputs: list[GenerationInput], interrupt: bool, sharing: Sharing) -> Generated:
    """Have everything generated."""
    engine = GenerationEngine(model, max_running_requests=len(inputs))
    batch = engine._batch
    if sharing != Sharing.all:
        batch.prefills.kept = None
    with rows_of_their_own() if sharing == Sharing.nothing else contextlib.nullcontext():
        before, begun = batch.prefills.forward.computed_tokens, time.process_time()
        answers = engine.submit(Job(tuple(inputs)))
        steps = 0
        while engine.step():
            steps += 1
            if interrupt and steps % 16 == 0:
                engine.pause(PauseMode.retract)
                batch.weights_changed()
                engine.resume()
        seconds = time.process_time() - begun
    prefilled = batch.prefills.forward.computed_tokens - before
    return Generated(
        answers.result(timeout=0), seconds, batch.counts.decoded_rows / max(1, batch.counts.generated), prefilled
    )


def compare_generation(name: str, model: Any, inputs: list[GenerationInput], rounds: int) -> dict[str, Any]:
    """One row of the table."""
    ratios: dict[str, list[float]] = {"speed_up": [], "interrupted": [], "prefill": []}
    for number in range(rounds):
        for interrupt in (False, True):
            kinds = list(Sharing) if interrupt else [Sharing.nothing, Sharing.all]
            found = {kind: generate(model, inputs, interrupt, kind) for kind in kinds[:: 1 if number % 2 else -1]}
            alone, shared = found[Sharing.nothing], found[Sharing.all]
            ratios["interrupted" if interrupt else "speed_up"].append(alone.seconds / shared.seconds)
            if interrupt:
                ratios["prefill"].append(found[Sharing.rows].seconds / shared.seconds)
                again = shared.prefilled / found[Sharing.rows].prefilled
            else:
                plain = alone, shared
    expected, shared = plain
    pairs = zip(shared.outputs, expected.outputs, strict=True)
    same = [(a, b) for a, b in pairs if a.output_ids == b.output_ids]
    differences = [abs(x - y) for a, b in same for x, y in zip(a.logprobs, b.logprobs, strict=True)]
    return {
        "batch": name,
        "samples": len(inputs),
        "tokens": sum(len(output.output_ids) for output in shared.outputs),
        "rows": shared.rows,
        "prefilled": again,
        **{key: statistics.median(values) for key, values in ratios.items()},
        "equal": len(same) / len(inputs),
        "logprobs": max(differences),
    }


def asked_of(groups: Sequence[Sequence[Sample]], sampling: SamplingSpec) -> list[GenerationInput]:
    """One request for each sample: its prompt, a seed of its own; of the answer's length where no token stops it."""
    inputs: list[GenerationInput] = []
    for sample in (sample for group in groups for sample in group):
        prompt = int(np.argmax(sample.loss_mask))
        length = sampling.max_new_tokens or len(sample.tokens) - prompt
        spec = replace(sampling, max_new_tokens=length, seed=len(inputs))
        inputs.append(GenerationInput(f"s{len(inputs)}", tuple(sample.tokens[:prompt].tolist()), spec))
    return inputs


HEADINGS = {
    "training": "| batch | samples | tokens | stream | speed-up | log-probs | gradients |\n"
    "|---|--:|--:|--:|--:|--:|--:|",
    "generation": "| batch | samples | tokens | rows | speed-up | interrupted | prefilled | by that | equal "
    "| log-probs |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
}


def line(made: dict[str, Any]) -> str:
    """A row of either table."""
    begin = f"| {made['batch']} | {made['samples']} | {made['tokens']:,}"
    if "stream" in made:
        return (
            f"{begin} | {made['stream']:.2f} | {made['speed_up']:.2f} x | {made['logprobs']:.1e} "
            f"| {made['gradients']:.1e} |"
        )
    return (
        f"{begin} | {made['rows']:.2f} | {made['speed_up']:.2f} x | {made['interrupted']:.2f} x "
        f"| {made['prefilled']:.2f} | {made['prefill']:.2f} x | {made['equal']:.3f} | {made['logprobs']:.1e} |"
    )


def main() -> None:
    """Measure, print the tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, two rounds")
    parser.add_argument("--only", choices=HEADINGS, help="one part")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds, tokens = (2, QUICK_GROUPS_TOKENS) if options.quick else (options.rounds, GROUPS_TOKENS)
    parts = [options.only] if options.only else list(HEADINGS)
    made: dict[str, list[dict[str, Any]]] = {part: [] for part in parts}
    with tempfile.TemporaryDirectory() as scratch:
        random_models = [
            (f"{hidden} x {layers}", model_folder(Path(scratch) / f"{hidden}x{layers}", hidden, layers))
            for hidden, layers in (SIZES[:1] if options.quick else SIZES)
        ]
        shapes = SHAPES[:1] if options.quick else SHAPES
        demos = (
            []
            if options.quick
            else [(steps, ensure_base_model(load_supervised("arithmetic_base"))) for steps in (0, 20)]
        )
        trained = [(f"demo after {steps} steps", base, demo(base, steps)) for steps, base in demos]
        for part in parts:
            print(HEADINGS[part], flush=True)
            for name, folder in random_models:
                for shape in shapes:
                    label, groups = f"{'/'.join(map(str, shape))}, {name}", random_groups(*shape, tokens)
                    if part == "training":
                        made[part].append(compare(label, folder, groups, rounds))
                    else:
                        model = load_causal_lm(
                            folder, Dtype.float32, AttentionImplementation.eager, torch.device("cpu")
                        )
                        inputs = asked_of(groups, SamplingSpec(max_new_tokens=0))
                        made[part].append(compare_generation(label, model, inputs, rounds))
                    print(line(made[part][-1]), flush=True)
            for label, base, trainer in trained:
                batch = trainer.generate()
                if part == "training":
                    groups = [list(group) for group in batch if len({sample.reward for sample in group}) > 1]
                    made[part].append(compare(label, str(base), groups, rounds))
                else:
                    stop = (trainer.prompt_format.tokenizer.eos_token_id,)
                    inputs = asked_of(batch, SamplingSpec(max_new_tokens=112, stop_token_ids=stop))
                    made[part].append(compare_generation(label, trainer.actor.behaviour, inputs, rounds))
                print(line(made[part][-1]), flush=True)
            print(flush=True)
    if options.json:
        options.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
