"""Memory needs of layouts: the tables of docs/sizing.md, and the model of memory against real steps on this CPU.

    python benchmarks/sizing.py                           rewrite docs/sizing.md
    python benchmarks/sizing.py --measure small lengths   first run these cases and note their peaks in docs/sizing.json

Each case trains a random model with the engine as a ModelWorker builds it, in a fresh process per rank. What
`asyncrl.trainer.sizing` says of the same case stands beside it. Minutes on a CPU.

small    two steps of a small model: the highest resident memory of a rank less what its libraries take. glibc is told
         to give freed memory back (MALLOC_MMAP_THRESHOLD_), else it keeps what a later allocation would have used.
lengths  a step on one long sequence, after one on a short sequence: what that step allocates at its peak, by torch's
         count of its allocator: activations, logits, gradients on their way; no weights, gradients and moments, which
         do not depend on the length. Host memory for activations comes from numpy, which torch does not count. Torch
         counts what the thread that trains gives back, so an exchange between ranks waits until gloo's thread has let
         go of its tensors.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common import parser, sizes_of, with_block

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.trainer.parallel.placement import Layout, WorkerGrid
from asyncrl.trainer.settings import AttentionImplementation, KeptOn
from asyncrl.trainer.sizing import MemoryNeed, SizedModel, Workload, count, need

PAGE = Path(__file__).resolve().parents[1] / "docs" / "sizing.md"
MEASURED = PAGE.with_suffix(".json")
LIMIT_S = 1800.0
"""Longest that the processes of a case may take, and an exchange may keep its tensors."""
GIB, MIB = 1 << 30, 1 << 20

EXPERTS = {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-0.5B": sizes_of("qwen2", 151936, 896, 24, 14, 2, 4864, tie_word_embeddings=True),
    "Qwen2.5-7B": sizes_of("qwen2", 152064, 3584, 28, 28, 4, 18944),
    "Qwen2.5-32B": sizes_of("qwen2", 152064, 5120, 64, 40, 8, 27648),
    "Qwen3-30B-A3B": sizes_of("qwen3_moe", 151936, 2048, 48, 32, 4, 6144, **EXPERTS),
}
LAYOUTS: Mapping[str, Sequence[str]] = {
    "Qwen2.5-0.5B": ("d1", "d2", "d8", "t2"),
    "Qwen2.5-7B": ("d1", "d2", "d8", "t2p2", "d4t2", "d2t2p2"),
    "Qwen2.5-32B": ("d8", "d4t2", "t8", "d2t8", "d2t4p2", "d8t4"),
    "Qwen3-30B-A3B": ("d8", "d4t2", "d4t4", "d16", "d32", "d8p2"),
}
TOKENS = 16384
LONG = "Qwen2.5-7B"
LONG_LAYOUTS = ("d8", "d4c2", "d2c4", "d4t2", "d2c2t2")
LENGTHS = (16384, 32768, 65536, 131072)
GPUS = (("24 GiB", 24), ("48 GiB", 48), ("80 GiB", 80), ("141 GiB", 141))
CUDA_GIB = 1.5
"""Left to CUDA's context, NCCL's buffers and fragments when asking what fits."""

SMALL = sizes_of("llama", 16000, 512, 8, 8, 4, 1536)
TINY = sizes_of("llama", 16, 16, 1, 8, 4, 16)
NARROW = sizes_of("llama", 64, 32, 12, 2, 2, 64, tie_word_embeddings=True, max_position_embeddings=1 << 16)
"""Of long sequences, whose activations are most of its memory."""


@dataclass(frozen=True)
class Case:
    """A measured train step."""

    engine: str
    layout: str
    dtype: str
    tokens: int
    checkpointing: bool = False
    on_host: bool = False

    def computed(self, described: Mapping[str, Any]) -> MemoryNeed:
        """The need of the rank with the highest peak."""
        attention = AttentionImplementation.sdpa
        work = Workload(
            self.engine, Dtype(self.dtype), attention, self.tokens, self.tokens, activations_on_host=self.on_host
        )
        return max(needs(count(described), Layout.parse(self.layout), work), key=self.peak)

    def peak(self, of: MemoryNeed) -> int:
        """Bytes of a need at the peak."""
        return of.total_checkpointed if self.checkpointing else of.total

    def passing(self, of: MemoryNeed) -> int:
        """Bytes at the peak beside those kept from step to step."""
        return self.peak(of) - of.kept


SMALL_CASES = (
    Case("flat", "d1", "float32", 256),
    Case("flat", "d1", "float32", 1024),
    Case("flat", "d1", "bfloat16", 256),
    Case("sharded", "d2", "float32", 256),
    Case("sharded", "d2", "float32", 1024),
    Case("sharded", "d2", "float32", 1024, checkpointing=True),
    Case("sharded", "d2", "bfloat16", 256),
    Case("sharded", "d4", "float32", 256),
)
LONGEST = 32768
LENGTH_CASES = tuple(
    Case(engine, layout, "float32", tokens, checkpointing, on_host)
    for tokens in (4096, 8192, 16384, LONGEST)
    for checkpointing, on_host in ((False, False), (True, False), (True, True))
    for engine, layout in (("flat", "d1"), ("sharded", "c2"))
)


def needs(model: SizedModel, layout: Layout, work: Workload) -> list[MemoryNeed]:
    """Return the needs of each rank, by worker."""
    grid = WorkerGrid.of(layout)
    return [need(model, layout, grid.coordinates(worker), work, trained=True) for worker in grid.members]


# Measuring.


def on_ranks(be_rank: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Call `be_rank(rank, *arguments)` in a fresh process for each rank; return what they return."""
    with get_context("spawn").Pool(ranks, maxtasksperchild=1) as pool:  # its end kills a rank that hangs
        return pool.starmap_async(be_rank, [(rank, *arguments) for rank in range(ranks)], chunksize=1).get(LIMIT_S)


def memory_of_process(name: str) -> int:
    """Bytes of this process by /proc: VmRSS, resident now, or VmHWM, the most since the program began.

    rusage would count the parent's too.
    """
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def measured(be_rank: Callable[..., dict[str, int]], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Rows of docs/sizing.json: each case with what the rank of the largest peak returns."""
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "OMP_NUM_THREADS": "1"}
    from tiny_models import save_described

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, described in (("small", SMALL), ("tiny", TINY), ("narrow", NARROW)):
            save_described(described, Path(folder, name))
        for case in cases:
            scratch = tempfile.mkdtemp(dir=folder)
            found = on_ranks(be_rank, Layout.parse(case.layout).ranks, case, folder, scratch)
            rows.append({"case": asdict(case), **max(found, key=lambda of: of["peak"])})
            print(rows[-1], flush=True)
    return rows


@contextmanager
def _rank(rank: int, case: Case, folder: str, scratch: str) -> Iterator[Callable[[str], Any]]:
    """A function that builds the engine of this rank for the model of that name."""
    import torch
    from tiny_models import rank_world

    torch.set_num_threads(1)
    config = ExperimentConfig()
    config.model.dtype, config.trainer.engine = Dtype(case.dtype), case.engine
    config.trainer.parallel, config.trainer.gradient_checkpointing = case.layout, case.checkpointing
    config.trainer.tokens_per_micro_batch = case.tokens
    config.trainer.activations_on = KeptOn.host if case.on_host else KeptOn.device
    with rank_world(config, rank, Path(scratch)) as (_, build):

        def engine(name: str) -> Any:
            config.model.path = f"{folder}/{name}"
            return build().policy("actor")

        yield engine


def _small(rank: int, case: Case, folder: str, scratch: str) -> dict[str, int]:
    """Trains a step of a tiny model, by which every library is loaded, then two of the case's."""
    from tiny_models import train_step

    with _rank(rank, case, folder, scratch) as build:
        engine = build("tiny")
        train_step(engine, _batch(2, 129, TINY))
        del engine
        gc.collect()
        before = memory_of_process("VmRSS")
        engine = build("small")
        batch = _batch(2 * max(1, case.tokens // 128), 129, SMALL)  # two micro-batches
        for _ in range(2):
            train_step(engine, batch)
        return {"peak": memory_of_process("VmHWM") - before}


def _length(rank: int, case: Case, folder: str, scratch: str) -> dict[str, int]:
    import numpy as np
    import torch
    import torch.distributed as dist
    from tiny_models import backward, train_step

    from asyncrl.trainer.model import layers as gradient_checkpointing

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
    with _rank(rank, case, folder, scratch) as build:
        engine = build("narrow")
        train_step(engine, _batch(1, 65, NARROW))
        on_host.clear()
        with torch.profiler.profile(profile_memory=True) as profiled:
            backward(engine, _batch(1, case.tokens + 1, NARROW))
        held = peak = 0
        for event in profiled.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        return {"peak": peak, "host_bytes": sum(on_host)}


def _batch(sequences: int, length: int, described: Mapping[str, Any]) -> Any:
    """Random sequences of `length` tokens, of which all but one go into the model."""
    import numpy as np
    from tiny_models import batch_of, sample_of

    rng = np.random.default_rng(0)
    return batch_of([[sample_of(rng.integers(0, described["vocab_size"], length), 1) for _ in range(sequences)]])


KINDS: Mapping[str, tuple[Callable[..., dict[str, int]], Sequence[Case]]] = {
    "small": (_small, SMALL_CASES),
    "lengths": (_length, LENGTH_CASES),
}


# The page.


def page(text: str, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """`text`, that of docs/sizing.md, with its tables computed anew; `found` is what docs/sizing.json has."""
    tables = {name: _layout_table(count(described), LAYOUTS[name]) for name, described in MODELS.items()}
    tables |= {"long contexts": _length_table(count(MODELS[LONG]))}
    tables |= {"measured": _small_table(found["small"]), "measured lengths": _ways_table(found["lengths"])}
    for name, table in tables.items():
        text = with_block(text, f"<!-- {name}: by benchmarks/sizing.py -->\n", "<!-- end -->", table)
    return text


def _layout_table(model: SizedModel, layouts: Sequence[str]) -> str:
    lines = [
        f"{model.numel:,} parameters.",
        "",
        "| layout | GPUs | weights | gradients | moments | gathered | activations | logits | peak | fits |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for text in layouts:
        layout = Layout.parse(text)
        engine = "flat" if layout.ranks == 1 else "sharded"
        each = needs(model, layout, _work(engine, TOKENS))
        worst, least = max(each, key=lambda of: of.total), max(of.total_checkpointed for of in each)
        kept = (f"{size / GIB:.1f}" for size in (worst.weights, worst.gradients, worst.moments, worst.gathered))
        activations = f"{worst.activations / GIB:.1f} ({(worst.checkpointed + worst.recomputed) / GIB:.1f})"
        peak = f"{worst.total / GIB:.1f} ({least / GIB:.1f})"
        cells = (f"`{text}`", str(layout.ranks), *kept, activations, f"{worst.logits / GIB:.1f}", peak)
        lines.append(f"| {' | '.join(cells)} | {_fits(worst.total, least)} |")
    return "\n".join(lines) + "\n"


def _length_table(model: SizedModel) -> str:
    lines = [f"| layout | {' | '.join(f'{tokens:,} tokens' for tokens in LENGTHS)} |", f"|---|{'--:|' * len(LENGTHS)}"]
    for text in LONG_LAYOUTS:
        cells = []
        for tokens in LENGTHS:
            on_device, on_host = (_work("sharded", tokens, activations_on_host=host) for host in (False, True))
            each, saving = (needs(model, Layout.parse(text), work) for work in (on_device, on_host))
            peaks = (
                max(of.total for of in each),
                max(of.total_checkpointed for of in each),
                max(of.total_checkpointed for of in saving),
            )
            plain, *saved = (f"{peak / GIB:.0f}" for peak in peaks)
            cells.append(f"{plain} ({', '.join(saved)})")
        lines.append(f"| `{text}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _work(engine: str, tokens: int, *, activations_on_host: bool = False) -> Workload:
    attention = AttentionImplementation.flash_attention_2
    return Workload(engine, Dtype.bfloat16, attention, tokens, tokens, activations_on_host=activations_on_host)


def _fits(total: int, checkpointed: int) -> str:
    plain = next((name for name, size in GPUS if total / GIB + CUDA_GIB <= size), None)
    best = next((name for name, size in GPUS if checkpointed / GIB + CUDA_GIB <= size), None)
    if best is None:
        return "none of these"
    return best if plain == best else f"{plain or 'none of these'} ({best})"


def _small_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| engine | layout | type | tokens | checkpointing | measured | computed | computed / measured |",
        "|---|---|---|--:|---|--:|--:|--:|",
    ]
    for row in rows:
        case = Case(**row["case"])
        computed, peak = case.peak(case.computed(SMALL)), row["peak"]
        cells = (case.engine, f"`{case.layout}`", case.dtype, str(case.tokens), "yes" if case.checkpointing else "no")
        figures = (f"{peak / MIB:.0f} MiB", f"{computed / MIB:.0f} MiB", f"{computed / peak:.2f}")
        lines.append(f"| {' | '.join((*cells, *figures))} |")
    return "\n".join(lines) + "\n"


def _ways_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| | measured | computed | on the host |", "|---|--:|--:|--:|"]
    for row in rows:
        if (case := Case(**row["case"])).tokens == LONGEST:
            words = ["gradient checkpointing"] * case.checkpointing + ["activations on the host"] * case.on_host
            sizes = row["peak"], case.passing(case.computed(NARROW)), row["host_bytes"]
            cells = [f"{round(size / MIB)} MiB" if size else "" for size in sizes]
            lines.append(f"| {', '.join([f'`{case.layout}`', *words])} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite the page."""
    command = parser(__doc__)
    command.add_argument("--measure", nargs="+", choices=KINDS, default=(), help="measure these anew")
    found = json.loads(MEASURED.read_text(encoding="utf-8"))
    for kind in command.parse_args().measure:
        found[kind] = measured(*KINDS[kind])
        MEASURED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
