"""Memory of one long sequence's train step over its length: a table of docs/sizing.md.

    python benchmarks/long_context.py             rewrite the table from docs/long_context.json
    python benchmarks/long_context.py --measure   run the steps first, each in fresh processes (minutes on a CPU)

Each case builds the engine of a small random model as a ModelWorker does, in a process per rank, and trains a step on
one sequence, after one on a short sequence. Measured is what that step allocates at its peak, by torch's count of its
allocator: activations, logits, gradients on their way; no weights, gradients and moments, which do not depend on the
length. Host memory for activations comes from numpy, which torch does not count. Torch counts what the thread that
trains gives back, so an exchange between ranks waits until gloo's thread has let go of its tensors. Beside it stands
what `asyncrl.trainer.sizing` computes.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from common import on_ranks, parser, with_block

from asyncrl.config.setting import Dtype
from asyncrl.trainer.parallel.placement import Layout, WorkerGrid
from asyncrl.trainer.settings import AttentionImplementation, KeptOn
from asyncrl.trainer.sizing import MemoryNeed, Workload, count, need

PAGE = Path(__file__).resolve().parents[1] / "docs" / "sizing.md"
MEASURED = PAGE.with_name("long_context.json")
BEGIN, END = "<!-- by benchmarks/long_context.py -->\n", "<!-- end -->"
LIMIT_S = 1800.0
MIB = 1 << 20
MODEL: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1 << 16,
}
LENGTHS = (4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Way:
    """A way to train: a row of the table."""

    layout: str
    checkpointing: bool = False
    on_host: bool = False

    def __str__(self) -> str:
        words = ["gradient checkpointing"] * self.checkpointing + ["activations on the host"] * self.on_host
        return ", ".join([f"`{self.layout}`", *words])

    def computed(self, tokens: int) -> MemoryNeed:
        """The largest need of any rank."""
        layout = Layout.parse(self.layout)
        grid, engine = WorkerGrid.of(layout), "flat" if layout.ranks == 1 else "sharded"
        attention = AttentionImplementation.sdpa
        work = Workload(engine, Dtype.float32, attention, tokens, tokens, activations_on_host=self.on_host)
        model = count(MODEL)
        needs = [need(model, layout, grid.coordinates(worker), work, trained=True) for worker in grid.members]
        return max(needs, key=self.passing)

    def passing(self, of: MemoryNeed) -> int:
        """Bytes at the peak beside those kept from step to step."""
        return (of.total_checkpointed if self.checkpointing else of.total) - of.kept


WAYS = (
    Way("d1"),
    Way("c2"),
    Way("d1", checkpointing=True),
    Way("c2", checkpointing=True),
    Way("d1", checkpointing=True, on_host=True),
    Way("c2", checkpointing=True, on_host=True),
)


def measure(way: Way, tokens: int) -> tuple[int, int]:
    """The largest peak of any rank and its activations on the host, in bytes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from tiny_models import save_described

    with tempfile.TemporaryDirectory() as folder:
        save_described(dict(MODEL), Path(folder, "model"))
        found: list[tuple[int, int]] = on_ranks(_be_rank, Layout.parse(way.layout).ranks, way, tokens, folder)
        return max(found)


def _be_rank(rank: int, way: Way, tokens: int, folder: str) -> tuple[int, int]:
    import numpy as np
    import torch
    import torch.distributed as dist
    from tiny_models import rank_world

    from asyncrl.config.experiment import ExperimentConfig
    from asyncrl.trainer.model import layers as gradient_checkpointing

    torch.set_num_threads(1)
    on_host: list[int] = []

    def host_like(tensor: torch.Tensor) -> torch.Tensor:
        on_host.append(tensor.nbytes)
        return torch.from_numpy(np.empty(tuple(tensor.shape), np.float32))

    def users(tensor: torch.Tensor) -> int:
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

    all_to_all: Callable[..., object] = dist.all_to_all_single

    def exchange(*tensors: torch.Tensor, group: dist.ProcessGroup) -> None:
        before = [users(tensor) for tensor in tensors]
        all_to_all(*(tensor.detach() for tensor in tensors), group=group)  # tensors of its own to let go of
        until = time.monotonic() + LIMIT_S
        while any(users(tensor) > n for tensor, n in zip(tensors, before, strict=True)):
            assert time.monotonic() < until, "gloo keeps a tensor that it has sent"
            os.sched_yield()

    vars(gradient_checkpointing)["host_like"] = host_like
    vars(dist)["all_to_all_single"] = exchange
    config = ExperimentConfig()
    config.model.dtype, config.model.path = Dtype.float32, f"{folder}/model"
    config.trainer.parallel, config.trainer.tokens_per_micro_batch = way.layout, tokens
    config.trainer.gradient_checkpointing = way.checkpointing
    config.trainer.activations_on = KeptOn.host if way.on_host else KeptOn.device
    with rank_world(config, rank, Path(folder)) as (_, build):
        engine = build().policy("actor")

        def step(tokens: int) -> None:
            batch = _batch(tokens)
            wanted = torch.arange(batch.num_tokens) > 0
            engine.compute_gradients(batch, wanted, [0], lambda _, out: (-out.logprobs_N.sum() / tokens, {}))

        step(64)
        engine.step(1e-4)
        on_host.clear()
        with torch.profiler.profile(profile_memory=True) as profiled:
            step(tokens)
        held = peak = 0
        for event in profiled.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        return peak, sum(on_host)


def _batch(tokens: int) -> Any:
    """One sequence, of which `tokens` go into the model."""
    import numpy as np
    from tiny_models import batch_of, sample_of

    ids = np.random.default_rng(0).integers(0, MODEL["vocab_size"], tokens + 1)
    return batch_of([[sample_of(ids, 1)]])


def page(text: str, measured: Sequence[Mapping[str, Any]]) -> str:
    """`text`, that of docs/sizing.md, with its table made anew; `measured` are the rows of docs/long_context.json."""
    return with_block(text, BEGIN, END, _table(measured))


def _table(measured: Sequence[Mapping[str, Any]]) -> str:
    found = {(Way(**row["way"]), row["tokens"]): row for row in measured}
    lines = ["| | measured | computed | on the host |", "|---|--:|--:|--:|"]
    lines += [f"| {way} | {' | '.join(_cells(way, LENGTHS[-1], found.get((way, LENGTHS[-1]))))} |" for way in WAYS]
    return "\n".join(lines) + "\n"


def _cells(way: Way, tokens: int, row: Mapping[str, Any] | None) -> tuple[str, str, str]:
    computed = f"{round(way.passing(way.computed(tokens)) / MIB)} MiB"
    if row is None:
        return "–", computed, "–"
    return f"{round(row['peak'] / MIB)} MiB", computed, f"{round(row['on_host'] / MIB)} MiB" if row["on_host"] else ""


def main() -> None:
    """Rewrite the page."""
    command = parser(__doc__)
    command.add_argument("--measure", action="store_true", help="measure anew")
    if command.parse_args().measure:
        measured: list[dict[str, Any]] = []
        for tokens, way in product(LENGTHS, WAYS):
            peak, on_host = measure(way, tokens)
            measured.append({"way": asdict(way), "tokens": tokens, "peak": peak, "on_host": on_host})
            print(way, tokens, *_cells(way, tokens, measured[-1]), flush=True)
        MEASURED.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
