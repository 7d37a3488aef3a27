"""A shared prefix computed once, in training and in generation: CPU time, and how far the results differ.

    python benchmarks/prefix.py                                     shapes of prompt/answer, group, and the demo
    python benchmarks/prefix.py --only generation --shapes 15/25/8  one part, one shape, without the demo

The step is the actor's: a forward pass for proximal log-probabilities, then four minibatches with a backward pass and
an optimizer step each; one thread. Rounds of `packed` and `tree` alternate, `speed-up` is the median of their ratios.
`stream` is the part of the samples' tokens that is computed. Random answers share their prompt only; the demo's, made
here by its base model and its reward, share far more, and only groups with a signal are trained, as in a run.
`log-probs` is the largest difference of any log-probability, `gradients` of any gradient, in parts of the largest.

Generation is the embedded engine, one thread, on the same groups, all asked for at once; answers of the shapes are of
their full length. Without sharing every sample has a row of the model to itself (a prompt is prefilled once all the
same). `rows` is the part of the decoded rows that are computed. `equal` is the part of the samples whose tokens are
those without sharing, `log-probs` the largest difference in them.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Table, by_turns, demo_model, parser
from tiny_models import agreement, answered, batch_of, qwen2, sample_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.api.trajectory import Sample
from asyncrl.config.setting import Dtype
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Sequence as Running
from asyncrl.inference.engine_io import GenerationInput, GenerationOutput, SamplingSpec
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.plugins.rewards.arithmetic import arithmetic_reward
from asyncrl.reference import ReferenceConfig, ReferenceTrainer
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import PolicyOutputs
from asyncrl.trainer.engines.flat import FlatOptimizer, FlatPolicyEngine
from asyncrl.trainer.model.attention import PACKED
from asyncrl.trainer.model.load_models import load_causal_lm
from asyncrl.trainer.settings import AttentionImplementation, OptimizerConfig

SHAPES = ("15/25/8", "60/400/8", "200/60/8", "1000/200/16")
SIZES = ((96, 2), (256, 4))
DEMO_STEPS = (0, 20)
MINIBATCHES, BUDGET, VOCABULARY = 4, 16384, 512
GROUPS_TOKENS = 16_000
"""Samples' tokens of a batch, about; at least one group a minibatch."""
Groups = Sequence[Sequence[Sample]]


def random_groups(shape: str) -> Groups:
    """Groups of a common prompt and random answers, of half to one and a half times the shape's tokens."""
    prompt, answer, group = map(int, shape.split("/"))
    rng = np.random.default_rng(0)
    count = max(MINIBATCHES, GROUPS_TOKENS // (group * (prompt + answer)) // MINIBATCHES * MINIBATCHES)
    groups = []
    for _ in range(count):
        begin = rng.integers(0, VOCABULARY, prompt)
        lengths = rng.integers(answer // 2, answer + answer // 2, group)
        ends = (rng.integers(0, VOCABULARY, length) for length in lengths)
        groups.append([sample_of(np.concatenate((begin, end)), prompt) for end in ends])
    return groups


def demo(base: Path, steps: int) -> ReferenceTrainer:
    """The demo after `steps` steps."""
    model, prompts = AutoModelForCausalLM.from_pretrained(str(base)), PromptFormat(load_tokenizer(base), None)
    trainer = ReferenceTrainer(ReferenceConfig(seed=7), model, prompts, ArithmeticDataset(seed=7), arithmetic_reward)
    for _ in range(steps):
        trainer.train_step()
    return trainer


# Training.


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
        engine.compute_gradients(batch, wanted_T, batch.minibatches[number], loss)
        gradient = engine.optimizer.grad.clone()
        engine.step(0.0)
    return logprobs_T, gradient, computed, whole


def compare_training(folder: str, groups: Groups, rounds: int) -> tuple[str, ...]:
    """A row of the table, without its name."""
    kinds = (AttentionKind.packed, AttentionKind.tree)
    engines = {kind: engine_of(folder, kind) for kind in kinds}
    packed, tree = (step(engine, batch_of(groups, MINIBATCHES)) for engine in engines.values())

    def seconds(kind: AttentionKind) -> float:
        batch = batch_of(groups, MINIBATCHES)  # a new one: what is found out about a batch is kept with it
        begun = time.process_time()
        step(engines[kind], batch)
        return time.process_time() - begun

    speed_up = statistics.median(a / b for a, b in zip(*by_turns(kinds, rounds, seconds), strict=True))
    gradients = (packed[1] - tree[1]).abs().max() / packed[1].abs().max()
    differences = (float((packed[0] - tree[0]).abs().max()), float(gradients))
    return f"{tree[3]:,}", f"{tree[2] / tree[3]:.2f}", f"{speed_up:.2f} x", *(f"{each:.1e}" for each in differences)


# Generation.


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
    """The answers, CPU seconds without the engine's making, and the part of the decoded rows that were computed."""

    outputs: list[GenerationOutput]
    seconds: float
    rows: float


def generate(model: Any, inputs: list[GenerationInput], shares: bool) -> Generated:
    """Have everything generated."""
    engine = GenerationEngine(model, max_running_requests=len(inputs))
    batch = engine._batch
    if not shares:
        batch.prefills.kept = None
    with contextlib.nullcontext() if shares else rows_of_their_own():
        begun = time.process_time()
        outputs = answered(engine, inputs)
        seconds = time.process_time() - begun
    rows = batch.counts.decoded_rows / max(1, batch.counts.generated)
    return Generated(outputs, seconds, rows)


def compare_generation(model: Any, inputs: list[GenerationInput], rounds: int) -> tuple[str, ...]:
    """A row of the table, without its name."""
    found = by_turns((False, True), rounds, partial(generate, model, inputs))
    ratio = statistics.median(a.seconds / b.seconds for a, b in zip(*found, strict=True))
    expected, shared = (runs[-1] for runs in found)
    tokens = sum(len(output.output_ids) for output in shared.outputs)
    return f"{tokens:,}", f"{shared.rows:.2f}", f"{ratio:.2f} x", *agreement(shared.outputs, expected.outputs)


def asked_of(groups: Groups, sampling: SamplingSpec) -> list[GenerationInput]:
    """One request for each sample: its prompt, a seed of its own; of the answer's length where no token stops it."""
    inputs: list[GenerationInput] = []
    for sample in (sample for group in groups for sample in group):
        prompt = int(np.argmax(sample.loss_mask))
        length = sampling.max_new_tokens or len(sample.tokens) - prompt
        spec = replace(sampling, max_new_tokens=length, seed=len(inputs))
        inputs.append(GenerationInput(f"s{len(inputs)}", tuple(sample.tokens[:prompt].tolist()), spec))
    return inputs


HEADINGS = {
    "training": ("batch", "tokens", "stream", "speed-up", "log-probs", "gradients"),
    "generation": ("batch", "tokens", "rows", "speed-up", "equal", "log-probs"),
}


def main() -> None:
    """Measure, print the tables."""
    command = parser(__doc__)
    command.add_argument("--shapes", nargs="+", metavar="PROMPT/ANSWER/GROUP", help="these, without the demo")
    command.add_argument("--only", choices=HEADINGS, help="one part")
    command.add_argument("--rounds", type=int, default=7)
    args = command.parse_args()
    torch.set_num_threads(1)
    base = demo_model()
    demos = [] if args.shapes else [(f"demo after {steps} steps", demo(base, steps)) for steps in DEMO_STEPS]
    with tempfile.TemporaryDirectory() as scratch:
        for part in [args.only] if args.only else HEADINGS:
            table = Table(*HEADINGS[part])
            for hidden, layers in SIZES:
                folder = f"{scratch}/{hidden}x{layers}"
                qwen2(hidden, layers, VOCABULARY).save_pretrained(folder)
                for shape in args.shapes or SHAPES:
                    name, groups = f"{shape}, {hidden} x {layers}", random_groups(shape)
                    if part == "training":
                        table.row(name, *compare_training(folder, groups, args.rounds))
                    else:
                        model = load_causal_lm(
                            folder, Dtype.float32, AttentionImplementation.eager, torch.device("cpu")
                        )
                        inputs = asked_of(groups, SamplingSpec(max_new_tokens=0))
                        table.row(name, *compare_generation(model, inputs, args.rounds))
            for name, trainer in demos:
                batch = trainer.generate()
                if part == "training":
                    groups = [list(group) for group in batch if len({sample.reward for sample in group}) > 1]
                    table.row(name, *compare_training(str(base), groups, args.rounds))
                else:
                    stop = (trainer.prompt_format.tokenizer.eos_token_id,)
                    inputs = asked_of(batch, SamplingSpec(max_new_tokens=112, stop_token_ids=stop))
                    table.row(name, *compare_generation(trainer.actor.behaviour, inputs, args.rounds))


if __name__ == "__main__":
    main()
