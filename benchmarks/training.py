"""A train step in tokens per second and memory: packed against a plain padded loop, and over layouts.

    python benchmarks/training.py                 both tables
    python benchmarks/training.py --layouts d1,d2 only these; d1 is the flat engine, s1 the sharded one on one rank
    python benchmarks/training.py --json out.json

First table: one rank with one thread, a small model, samples of ragged lengths (log-normal), the same samples for all.
The plain loop is what a user would write with transformers: rows in the order given, padded on the right to the longest
of their micro-batch, torch's attention under a mask, log-softmax of the logits, AdamW. Engines cut and pack the samples
themselves. Rates are of real tokens; `ratio` is to the plain loop of the same row.

Second table: a larger model over ranks of this machine (gloo). `held` is what a rank has of weights and moments, by
its tensors; `peak` its largest resident memory beyond what it had before it loaded the model. Where ranks share
cores, look at memory and not at rates.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.comm.name_resolve import NameBackend, make_resolver
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.graph.builtin import load_graph
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.engines.base import PolicyEngine, PolicyOutputs
from asyncrl.trainer.engines.host_offload import local
from asyncrl.trainer.parallel.placement import placement
from asyncrl.trainer.parallel.rank_position import World
from asyncrl.trainer.parallel.world import training_world
from asyncrl.trainer.rank.training_rank import build_rank

VOCABULARY = 512
LIMIT_S = 600.0


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
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
    return str(folder)


def samples(count: int, mean: float, seed: int) -> list[Sample]:
    """Ragged samples; the first quarter of each is its prompt."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.32, 0.8, count), 4, 8 * mean).astype(int)
    made = []
    for length in lengths:
        mask = np.ones(length, np.uint8)
        mask[: max(1, length // 4)] = 0
        made.append(
            Sample(
                tokens=rng.integers(0, VOCABULARY, length).astype(np.int32),
                loss_mask=mask,
                behave_logprobs=np.zeros(length, np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                reward=0.0,
            )
        )
    return made


def step_batch(members: list[Sample]) -> StepBatch:
    """The samples as one minibatch."""
    trajectories = [Trajectory(f"r{i}", f"p{i}", i, (sample,)) for i, sample in enumerate(members)]
    return build_step_batch(trajectories, [0] * len(members), version=0, num_minibatches=1)


def plain_step(model: Any, optimizer: torch.optim.Optimizer, members: list[Sample], budget: int) -> None:
    """The step of somebody without a framework; at most `budget` padded positions a micro-batch."""
    total = sum(int(sample.loss_mask.sum()) for sample in members)
    optimizer.zero_grad()
    row = 0
    while row < len(members):
        rows, width = 0, 0
        while row + rows < len(members):
            wider = max(width, len(members[row + rows].tokens))
            if rows and wider * (rows + 1) > budget:
                break
            rows, width = rows + 1, wider
        ids = torch.zeros(rows, width, dtype=torch.int64)
        mask, wanted = torch.zeros(rows, width, dtype=torch.int64), torch.zeros(rows, width, dtype=torch.bool)
        for index, sample in enumerate(members[row : row + rows]):
            ids[index, : len(sample.tokens)] = torch.from_numpy(sample.tokens.astype(np.int64))
            mask[index, : len(sample.tokens)] = 1
            wanted[index, : len(sample.tokens)] = torch.from_numpy(sample.loss_mask.astype(bool))
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        (-(logprobs * wanted[:, 1:]).sum() / total).backward()
        row += rows
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def engine_step(engine: PolicyEngine, batch: StepBatch, total: int) -> None:
    """One optimizer step of an engine on the same loss."""

    def loss(_: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, Any]]:
        return -outputs.logprobs_N.sum() / total, {}

    engine.compute_gradients(batch, batch["loss_mask"], range(batch.num_seqs), loss)
    engine.step(1e-4)


def rate(step: Callable[[], None], tokens: int, rounds: int) -> float:
    """Tokens per second of the median of `rounds` steps after one that warms up."""
    step()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return tokens / float(np.median(times))


def memory(name: str) -> int:
    """Bytes by /proc: VmRSS, resident now, VmHWM, at most since the program began; rusage counts the parent's too."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def experiment(path: str, layout: str, budget: int) -> ExperimentConfig:
    """A config with the actor alone in `layout`; `s1` is the sharded engine on one rank."""
    config = ExperimentConfig()
    config.model.path = path
    config.trainer.tokens_per_micro_batch = budget
    config.trainer.parallel = layout.replace("s1", "d1")
    config.trainer.engine = "flat" if layout == "d1" else "sharded"
    return config


def on_one_thread(means: list[int], rounds: int, budget: int) -> list[dict[str, Any]]:
    """The first table."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = model_folder(Path(folder) / "model", 128, 4)
        for mean in means:
            members = samples(256, mean, seed=mean)
            tokens = sum(len(sample.tokens) for sample in members)
            total = sum(int(sample.loss_mask.sum()) for sample in members)
            model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
            config = experiment(path, "d1", budget)
            flat = build_rank(config, load_graph(config), World(), torch.device("cpu")).policy("actor")
            batch = step_batch(members)
            padded = rate(partial(plain_step, model, optimizer, members, budget), tokens, rounds)
            packed = rate(partial(engine_step, flat, batch, total), tokens, rounds)
            rows.append({"mean": mean, "plain": padded, "packed": packed, "ratio": packed / padded})
    return rows


def be_rank(worker: int, path: str, layout: str, folder: str, mean: int, rounds: int, budget: int, told: Any) -> None:
    """One rank of the second table; the first tells what it found."""
    torch.set_num_threads(1)
    config = experiment(path, layout, budget)
    placed = placement(config, load_graph(config))
    resolver = make_resolver(NameBackend.file, f"{folder}/names")
    device = torch.device("cpu")
    with training_world(config, worker, placed, device, Path(folder), resolver) as world:
        before = memory("VmRSS")
        engine = build_rank(config, load_graph(config), world, device).policy("actor")
        place, everything = world.place("actor"), samples(32, mean, seed=mean)
        mine = everything[place.data.rank :: place.data.world]
        tokens = sum(len(sample.tokens) for sample in everything)
        total = sum(int(sample.loss_mask.sum()) for sample in everything)
        batch = step_batch(mine)
        found = rate(lambda: engine_step(engine, batch, total), tokens, rounds)
        held = sum(local(tensor).nbytes for tensor in engine.state()[0].values())
        told.put((worker, found, held, memory("VmHWM") - before))


def over_layouts(layouts: list[str], mean: int, rounds: int, budget: int) -> list[dict[str, Any]]:
    """The second table."""
    context, rows = multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory() as folder:
        path = model_folder(Path(folder) / "model", 384, 6)
        for layout in layouts:
            config = experiment(path, layout, budget)
            ranks = placement(config, load_graph(config)).workers
            told: Any = context.Queue()
            Path(folder, layout).mkdir()
            arguments = (path, layout, f"{folder}/{layout}", mean, rounds, budget, told)
            processes = [context.Process(target=be_rank, args=(worker, *arguments)) for worker in range(ranks)]
            for process in processes:
                process.start()
            found = [told.get(timeout=LIMIT_S) for _ in processes]
            for process in processes:
                process.join(LIMIT_S)
            rows.append(
                {
                    "layout": layout,
                    "tokens_per_s": min(one[1] for one in found),
                    "held_MiB": max(one[2] for one in found) / 2**20,
                    "peak_MiB": max(one[3] for one in found) / 2**20,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--means", default="40,120,400")
    parser.add_argument("--layouts", default="d1,s1,d2,t2,p2,d2t2,d4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=["packed", "layouts"], help="one table alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    packed = spread = None
    if args.only != "layouts":
        packed = on_one_thread([int(mean) for mean in args.means.split(",")], args.rounds, 4096)
        print(f"{'mean tokens':>12} {'plain tok/s':>12} {'packed tok/s':>13} {'ratio':>6}")
        for row in packed:
            print(f"{row['mean']:>12} {row['plain']:>12.0f} {row['packed']:>13.0f} {row['ratio']:>6.2f}")
    if args.only != "packed":
        spread = over_layouts(args.layouts.split(","), 60, args.rounds, 4096)
        show_layouts(spread)
    if args.json:
        args.json.write_text(json.dumps({"packed": packed, "layouts": spread}, indent=1))


def show_layouts(spread: list[dict[str, Any]]) -> None:
    """Print the second table."""
    first = spread[0]
    heads = ("layout", "tok/s", "to first", "held MiB", "to first", "peak MiB", "to first")
    print("\n" + " ".join(f"{head:>9}" for head in heads))
    for row in spread:
        share, held, peak = (row[key] / first[key] for key in ("tokens_per_s", "held_MiB", "peak_MiB"))
        print(
            f"{row['layout']:>9} {row['tokens_per_s']:>9.0f} {share:>9.2f} {row['held_MiB']:>9.1f} {held:>9.2f} "
            f"{row['peak_MiB']:>9.0f} {peak:>9.2f}"
        )


if __name__ == "__main__":
    main()
