"""Memory needs of layouts: the tables of docs/sizing.md, and the model of memory against real runs on this CPU.

    python benchmarks/sizing.py              rewrite docs/sizing.md
    python benchmarks/sizing.py --measure    run the small models first and note their peaks in docs/sizing.json

A measured case trains a small random model for two steps in a process per rank, by the engine as a run has it. Measured
is the highest resident memory of a rank less what its libraries take; beside it stands what `asyncrl.trainer.sizing`
says of the same case. glibc is told to give freed memory back (MALLOC_MMAP_THRESHOLD_), else it keeps what a later
allocation would have used.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import memory_of_process, on_ranks, parser, with_block

from asyncrl.config.setting import Dtype
from asyncrl.trainer.parallel.placement import Layout, WorkerGrid
from asyncrl.trainer.settings import AttentionImplementation
from asyncrl.trainer.sizing import MemoryNeed, SizedModel, Workload, count, need

PAGE = Path(__file__).resolve().parents[1] / "docs" / "sizing.md"
MEASURED = PAGE.with_suffix(".json")
GIB, MIB = 1 << 30, 1 << 20

QWEN2 = {"model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-0.5B": QWEN2
    | {
        "vocab_size": 151936,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": QWEN2
    | {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
    },
    "Qwen2.5-32B": QWEN2
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 27648,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    },
}
"""Their public config.json, as far as it decides sizes."""
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

SMALL: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 16000,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1536,
    "tie_word_embeddings": False,
}
TINY: Mapping[str, Any] = {"num_hidden_layers": 1, "vocab_size": 16, "hidden_size": 16, "intermediate_size": 16}


@dataclass(frozen=True)
class Case:
    """One measured run of the small model."""

    engine: str
    layout: str
    dtype: str
    tokens: int
    checkpointing: bool = False

    @property
    def workload(self) -> Workload:
        """As the model of memory takes it."""
        return Workload(self.engine, Dtype(self.dtype), AttentionImplementation.sdpa, self.tokens, self.tokens)


CASES = (
    Case("flat", "d1", "float32", 256),
    Case("flat", "d1", "float32", 1024),
    Case("flat", "d1", "bfloat16", 256),
    Case("sharded", "d2", "float32", 256),
    Case("sharded", "d2", "float32", 1024),
    Case("sharded", "d2", "float32", 1024, checkpointing=True),
    Case("sharded", "d2", "bfloat16", 256),
    Case("sharded", "d4", "float32", 256),
)


def needs(model: SizedModel, layout: Layout, work: Workload) -> list[MemoryNeed]:
    """Return the needs of each rank, by worker."""
    grid = WorkerGrid.of(layout)
    return [need(model, layout, grid.coordinates(worker), work, trained=True) for worker in grid.members]


# Measuring.


def measure(case: Case) -> float:
    """The largest peak of any rank, in MiB above its libraries."""
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "OMP_NUM_THREADS": "1"}
    from tiny_models import save_described

    with tempfile.TemporaryDirectory() as folder:
        save_described(dict(SMALL), Path(folder, "small"))
        save_described({**SMALL, **TINY}, Path(folder, "tiny"))
        found: list[float] = on_ranks(_be_rank, Layout.parse(case.layout).ranks, case, folder)
        return max(found)


def _be_rank(rank: int, case: Case, folder: str) -> float:
    """Trains a step of a tiny model, by which every library is loaded, then two of the case's."""
    import torch
    from tiny_models import rank_world

    from asyncrl.config.experiment import ExperimentConfig

    torch.set_num_threads(1)
    config = ExperimentConfig()
    config.model.dtype, config.trainer.engine = Dtype(case.dtype), case.engine
    config.trainer.parallel, config.trainer.gradient_checkpointing = case.layout, case.checkpointing
    config.trainer.tokens_per_micro_batch = case.tokens
    with rank_world(config, rank, Path(folder)) as (_, build):

        def train(name: str, tokens: int, steps: int) -> None:
            config.model.path = f"{folder}/{name}"
            engine = build().policy("actor")
            batch = _batch(tokens, engine.model_config.vocab_size)
            wanted = torch.ones(batch.num_tokens, dtype=torch.bool)
            wanted[torch.from_numpy(batch.starts_S)] = False
            for _ in range(steps):
                engine.compute_gradients(
                    batch, wanted, range(batch.num_seqs), lambda _, out: (-out.logprobs_N.sum() / tokens, {})
                )
                engine.step(1e-4)

        train("tiny", 64, 1)
        gc.collect()
        before = memory_of_process("VmRSS")
        train("small", case.tokens, 2)
        return (memory_of_process("VmHWM") - before) / MIB


def _batch(tokens: int, vocabulary: int) -> Any:
    """Two micro-batches of `tokens` input tokens, in sequences of 129 tokens, of which 128 go into the model."""
    import numpy as np
    from tiny_models import batch_of, sample_of

    rng = np.random.default_rng(0)
    count = 2 * max(1, tokens // 128)
    return batch_of([[sample_of(rng.integers(0, vocabulary, 129), 1) for _ in range(count)]])


# The page.


def page(text: str, measured: Sequence[Mapping[str, Any]]) -> str:
    """`text`, that of docs/sizing.md, with its tables computed anew; `measured` are the cases of docs/sizing.json."""
    tables = {name: _layout_table(count(described), LAYOUTS[name]) for name, described in MODELS.items()}
    tables |= {"long contexts": _length_table(count(MODELS[LONG])), "measured": _measured_table(measured)}
    for name, table in tables.items():
        text = with_block(text, f"<!-- {name}: by benchmarks/sizing.py -->\n", "<!-- end -->", table)
    return text


def computed_mib(case: Case) -> float:
    """The largest need of any rank of `case`."""
    layout = Layout.parse(case.layout)
    each = needs(count(SMALL), layout, case.workload)
    return max(of.total_checkpointed if case.checkpointing else of.total for of in each) / MIB


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


def _measured_table(measured: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| engine | layout | type | tokens | checkpointing | measured | computed | computed / measured |",
        "|---|---|---|--:|---|--:|--:|--:|",
    ]
    for row in measured:
        case = Case(**{key: value for key, value in row.items() if key != "measured_mib"})
        computed, peak = computed_mib(case), row["measured_mib"]
        cells = (case.engine, f"`{case.layout}`", case.dtype, str(case.tokens), "yes" if case.checkpointing else "no")
        figures = (f"{peak} MiB", f"{computed:.0f} MiB", f"{computed / peak:.2f}")
        lines.append(f"| {' | '.join((*cells, *figures))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite the page."""
    command = parser(__doc__)
    command.add_argument("--measure", action="store_true", help="measure anew")
    if command.parse_args().measure:
        rows = []
        for case in CASES:
            rows.append({**asdict(case), "measured_mib": round(measure(case))})
            print(case, f"{rows[-1]['measured_mib']} MiB measured, {computed_mib(case):.0f} computed", flush=True)
        MEASURED.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), measured), encoding="utf-8")


if __name__ == "__main__":
    main()
