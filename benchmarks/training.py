"""A train step in tokens per second: packed against a plain padded loop.

    python benchmarks/training.py [--means 40 120 400] [--rounds 3]

One rank with one thread, a small model, samples of ragged lengths (log-normal), the same samples for both. The plain
loop is what a user would write with transformers: rows in the order given, padded on the right to the longest of their
micro-batch, torch's attention under a mask, log-softmax of the logits, AdamW. The engine cuts and packs the samples
itself. Rates are of real tokens; `ratio` is to the plain loop of the same row.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Table, parser
from tiny_models import batch_of, qwen2, rank_world, sample_of, train_step
from transformers import AutoModelForCausalLM

from asyncrl.api.trajectory import Sample
from asyncrl.config.experiment import ExperimentConfig

VOCABULARY, BUDGET = 512, 4096


def samples(count: int, mean: float) -> list[Sample]:
    """Ragged samples, the same at every call; the first quarter of each is its prompt."""
    rng = np.random.default_rng(int(mean))
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.32, 0.8, count), 4, 8 * mean).astype(int)
    return [sample_of(rng.integers(0, VOCABULARY, length), max(1, length // 4)) for length in lengths]


def plain_step(model: Any, optimizer: torch.optim.Optimizer, members: list[Sample]) -> None:
    """The step of somebody without a framework; at most `BUDGET` padded positions a micro-batch."""
    total = sum(int(each.loss_mask.sum()) for each in members)
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


def main() -> None:
    """Print the table."""
    command = parser(__doc__)
    command.add_argument("--means", type=int, nargs="+", default=[40, 120, 400], help="tokens of a sample")
    command.add_argument("--rounds", type=int, default=3)
    args = command.parse_args()
    torch.set_num_threads(1)
    table = Table("mean tokens", "plain tokens/s", "packed tokens/s", "ratio")
    with tempfile.TemporaryDirectory() as folder:
        config = ExperimentConfig()
        config.model.path, config.trainer.tokens_per_micro_batch = f"{folder}/small", BUDGET
        config.trainer.parallel, config.trainer.engine = "d1", "flat"
        qwen2(128, 4).save_pretrained(config.model.path)
        for mean in args.means:
            members = samples(256, mean)
            tokens = sum(len(each.tokens) for each in members)
            model = AutoModelForCausalLM.from_pretrained(config.model.path, attn_implementation="sdpa").eval()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
            with rank_world(config, 0, Path(folder)) as (_, build):
                flat = build().policy("actor")
            batch = batch_of([[sample] for sample in members])
            padded = rate(partial(plain_step, model, optimizer, members), tokens, args.rounds)
            packed = rate(partial(train_step, flat, batch), tokens, args.rounds)
            table.row(mean, f"{padded:.0f}", f"{packed:.0f}", f"{packed / padded:.2f}")


if __name__ == "__main__":
    main()
