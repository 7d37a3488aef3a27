"""A train step in tokens per second and memory: packed against a plain padded loop, and over layouts.

    python benchmarks/training.py                          both tables
    python benchmarks/training.py --layouts d1 s1 d2       d1 is the flat engine, s1 the sharded one on one rank
    python benchmarks/training.py --only packed

First table: one rank with one thread, a small model, samples of ragged lengths (log-normal), the same samples for all.
The plain loop is what a user would write with transformers: rows in the order given, padded on the right to the longest
of their micro-batch, torch's attention under a mask, log-softmax of the logits, AdamW. Engines cut and pack the samples
themselves. Rates are of real tokens; `ratio` is to the plain loop of the same row.

Second table: a larger model over ranks of this machine (gloo). `held` is what a rank has of weights and moments, by
its tensors; `peak` its largest resident memory beyond what it had before it loaded the model. In brackets: parts of the
first layout's. Where ranks share cores, look at memory and not at rates.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Table, memory_of_process, on_ranks, parser
from tiny_models import batch_of, qwen2, rank_world, sample_of, train_step
from transformers import AutoModelForCausalLM

from asyncrl.api.trajectory import Sample
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.graph import load_graph
from asyncrl.trainer.engines.optimizer import local
from asyncrl.trainer.parallel.placement import placement

VOCABULARY, BUDGET = 512, 4096
LAYOUT_MEAN = 60


def samples(count: int, mean: float) -> list[Sample]:
    """Ragged samples, the same at every call; the first quarter of each is its prompt."""
    rng = np.random.default_rng(int(mean))
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.32, 0.8, count), 4, 8 * mean).astype(int)
    return [sample_of(rng.integers(0, VOCABULARY, length), max(1, length // 4)) for length in lengths]


def sizes(members: Sequence[Sample]) -> tuple[int, int]:
    """Tokens of the samples, and those that are trained."""
    return sum(len(each.tokens) for each in members), sum(int(each.loss_mask.sum()) for each in members)


def plain_step(model: Any, optimizer: torch.optim.Optimizer, members: list[Sample]) -> None:
    """The step of somebody without a framework; at most `BUDGET` padded positions a micro-batch."""
    total = sizes(members)[1]
    optimizer.zero_grad()
    row = 0
    while row < len(members):
        rows, width = 0, 0
        while row + rows < len(members):
            wider = max(width, len(members[row + rows].tokens))
            if rows and wider * (rows + 1) > BUDGET:
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


def rate(step: Callable[[], None], tokens: int, rounds: int) -> float:
    """Tokens per second of the median of `rounds` steps after one that warms up."""
    step()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return tokens / float(np.median(times))


def experiment(path: str, layout: str) -> ExperimentConfig:
    """A config with the actor alone in `layout`; `s1` is the sharded engine on one rank."""
    config = ExperimentConfig()
    config.model.path = path
    config.trainer.tokens_per_micro_batch = BUDGET
    config.trainer.parallel = layout.replace("s1", "d1")
    config.trainer.engine = "flat" if layout == "d1" else "sharded"
    return config


def on_one_thread(means: Sequence[int], rounds: int, folder: Path) -> None:
    """Print the first table."""
    path = str(folder / "small")
    qwen2(128, 4).save_pretrained(path)
    table = Table("mean tokens", "plain tokens/s", "packed tokens/s", "ratio")
    for mean in means:
        members = samples(256, mean)
        tokens, total = sizes(members)
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        config = experiment(path, "d1")
        with rank_world(config, 0, folder) as (_, build):
            flat = build().policy("actor")
        batch = batch_of([[sample] for sample in members])
        padded = rate(partial(plain_step, model, optimizer, members), tokens, rounds)
        packed = rate(partial(train_step, flat, batch, total), tokens, rounds)
        table.row(mean, f"{padded:.0f}", f"{packed:.0f}", f"{packed / padded:.2f}")


def be_rank(worker: int, path: str, layout: str, folder: str, rounds: int) -> tuple[float, int, int]:
    """One rank of the second table: tokens per second of the whole step, bytes held and at the peak."""
    torch.set_num_threads(1)
    config = experiment(path, layout)
    with rank_world(config, worker, Path(folder)) as (world, build):
        before = memory_of_process("VmRSS")
        engine = build().policy("actor")
        place, everything = world.place("actor"), samples(32, LAYOUT_MEAN)
        batch = batch_of([[sample] for sample in everything[place.data.rank :: place.data.world]])
        tokens, total = sizes(everything)
        found = rate(partial(train_step, engine, batch, total), tokens, rounds)
        held = sum(local(tensor).nbytes for tensor in engine.state()[0].values())
        return found, held, memory_of_process("VmHWM") - before


def over_layouts(layouts: Sequence[str], rounds: int, folder: Path) -> None:
    """Print the second table."""
    path = str(folder / "larger")
    qwen2(384, 6).save_pretrained(path)
    table = Table("layout", "tokens/s", "held MiB", "peak MiB")
    first: tuple[float, ...] | None = None
    for layout in layouts:
        config = experiment(path, layout)
        ranks = placement(config, load_graph(config)).workers
        (folder / layout).mkdir()
        found = on_ranks(be_rank, ranks, path, layout, str(folder / layout), rounds)
        rates, held, peak = zip(*found, strict=True)
        figures = (min(rates), max(held) / 2**20, max(peak) / 2**20)
        first = first or figures
        table.row(layout, *(f"{own:.0f} ({own / other:.2f})" for own, other in zip(figures, first, strict=True)))


def main() -> None:
    """Print the tables."""
    command = parser(__doc__)
    command.add_argument("--means", type=int, nargs="+", default=[40, 120, 400])
    command.add_argument("--layouts", nargs="+", default=["d1", "s1", "d2", "t2", "p2", "d2t2", "d4"])
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--only", choices=["packed", "layouts"], help="one table alone")
    args = command.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if args.only != "layouts":
            on_one_thread(args.means, args.rounds, Path(folder))
        if args.only != "packed":
            over_layouts(args.layouts, args.rounds, Path(folder))


if __name__ == "__main__":
    main()
