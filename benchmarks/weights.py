"""Publish to served: the time from "the train step is over" to "the server generates with the new weights".

    python benchmarks/weights.py [--quick] [--sizes 1M 10M 100M 300M 1B] [--links 1 10] [--dir DIR] [--json PATH]

Per model size and type, in one run: `publish` (shards, checksums, manifest, fsync, rename), `check` (the manager reads
the checksums back) and `load` (`update_weights_from_disk` of an embedded server in a process of its own, label
confirmed), as a run does them one after the other; beside it the time that plainly writing the same bytes (one file,
file and folder synced: the same promise for a power loss) and reading them takes. The two take turns, and each round
the other one begins; times are medians over rounds, the ratio is the median of the rounds' ratios. Files are read back
from the page cache on both sides, as they are in a run on one machine, and both processes have the allocator's settings
that the launcher gives to a run's. `--dir` chooses the file system, by default the temporary one; /dev/shm measures
tmpfs. A size that does not fit into memory is left out and named.

`--links` adds rows of `deltas.py`: a version of 100 million parameters in bf16 on its way to a host without a shared
folder, over links of so many Gb/s, as whole files and as what changed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deltas
import psutil
import torch
import uvloop
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from asyncrl.comm import names
from asyncrl.comm.http.calls import JsonHttp
from asyncrl.comm.name_resolve import NameBackend, make_resolver
from asyncrl.comm.security import HttpSecurity, RunSecret
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import SECRET_FILE, write_run_config
from asyncrl.config.setting import Device, Dtype
from asyncrl.inference.client import GenerationServerClient
from asyncrl.models.ranks import Ranks
from asyncrl.models.weights.atomic_dir import sync_directory, sync_file
from asyncrl.models.weights.versions.manifest import verify
from asyncrl.models.weights.versions.published import WholeModel
from asyncrl.models.weights.versions.publishing import publish, tokenizer_assets
from asyncrl.models.weights.versions.shared_files import SharedFiles
from asyncrl.runtime.planning.plan_workers import MALLOC
from asyncrl.runtime.supervisor import STOP_SIGNAL, supervised

TARGET_RATIO = 1.3
ENVIRONMENT = MALLOC | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
START_S, UPDATE_S = 600.0, 600.0
COPIES_IN_MEMORY = {"float32": 4, "bfloat16": 3}
"""Copies of the weights: the trainer's, the server's, the page cache; in fp32 also the server's, packed for oneDNN."""
HELD_BYTES = 1 << 30
"""Most that plain reading holds of what it has read: the whole of all models but the largest."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = {  # hidden, layers, vocabulary
    "1M": (128, 4, 2_000),
    "10M": (320, 6, 8_000),
    "100M": (768, 12, 32_000),
    "300M": (1024, 20, 64_000),
    "1B": (2048, 17, 100_000),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One size and type; times in seconds."""

    size: str
    dtype: str
    parameters: int
    bytes: int
    plain_write_s: float
    plain_read_s: float
    publish_s: float
    check_s: float
    load_s: float
    ratio: float
    """Publish to served over plain writing and reading."""

    @property
    def plain_s(self) -> float:
        """Plain writing and reading."""
        return self.plain_write_s + self.plain_read_s

    @property
    def served_s(self) -> float:
        """Publish to served."""
        return self.publish_s + self.check_s + self.load_s


def config_of(size: str) -> Qwen2Config:
    hidden, layers, vocabulary = SHAPES[size]
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=max(1, hidden // 256),
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )


def make_model(size: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model of that size with cheap weights: only their bytes matter."""
    with torch.device("meta"):
        model: Any = Qwen2ForCausalLM(config_of(size)).to(dtype=dtype)  # type: ignore[call-arg]
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    model.tie_weights()
    return model


@contextmanager
def serve(model_dir: Path, dtype: Dtype, run_dir: Path) -> Iterator[tuple[str, HttpSecurity]]:
    """An embedded server of that model: its URL, token and certificate."""
    config = ExperimentConfig()
    config.model.path = str(model_dir)
    config.generation.dtype = dtype
    config.generation.device = Device.cpu
    config.generation.context_length = 128
    config.generation.start_timeout_s = START_S
    config.generation.max_total_tokens = 1024
    run_dir.mkdir()
    write_run_config(config, run_dir)
    security = RunSecret.create(run_dir / SECRET_FILE).http()
    argv = [sys.executable, "-m", "asyncrl.runtime.main", "generation_server", "0", "--run-dir", str(run_dir)]
    with (run_dir / "log").open("wb") as log:
        server = subprocess.Popen(supervised(argv), stdin=subprocess.PIPE, stdout=log, stderr=log)
    resolver = make_resolver(NameBackend.file, str(run_dir / "name_resolve"))
    try:
        yield names.GenerationServerEntry.decode(resolver.wait(names.gen_server_key(0), START_S)).url, security
    finally:
        server.send_signal(STOP_SIGNAL)
        server.wait()
        resolver.close()


def plain(model: PreTrainedModel, file: Path) -> tuple[float, float]:
    """Seconds to write the model's bytes durably, and to read them."""
    start = time.perf_counter()
    save_file({name: tensor.contiguous() for name, tensor in WholeModel(model).tensors().items()}, file)
    sync_file(file)
    sync_directory(file.parent)
    middle = time.perf_counter()
    held: list[Tensor] = []
    held_bytes = 0
    for tensor in load_file(file).values():  # load_file only maps
        if held_bytes + tensor.nbytes > HELD_BYTES:
            held, held_bytes = [], 0
        held.append(tensor.clone())
        held_bytes += tensor.nbytes
    end = time.perf_counter()
    file.unlink()
    return middle - start, end - middle


async def served(
    model: PreTrainedModel, root: Path, version: int, server: GenerationServerClient, shared: SharedFiles
) -> tuple[float, float, float]:
    """Seconds to publish, to check and to load."""
    start = time.perf_counter()
    published = publish(WholeModel(model), root, role="actor", version=version, ranks=Ranks(), shared=shared)
    after_publish = time.perf_counter()
    verify(published)
    after_check = time.perf_counter()
    await server.update_weights(str(published), version, timeout_s=UPDATE_S)
    end = time.perf_counter()
    shutil.rmtree(published)
    return after_publish - start, after_check - after_publish, end - after_check


async def measure(size: str, dtype: str, folder: Path, rounds: int) -> Row:
    """Both ways in turn, `rounds` times after one to warm up."""
    model = make_model(size, DTYPES[dtype])
    model.save_pretrained(folder / "base")
    shared = SharedFiles(model.config, tokenizer_assets(folder / "base"))
    plains, serveds = [], []
    with serve(folder / "base", Dtype(dtype), folder / "run") as (url, security):
        http = JsonHttp(security)
        server = GenerationServerClient(http, url)
        for version in range(1, rounds + 2):
            for ours in (version % 2 == 0, version % 2 == 1):
                if ours:
                    serveds.append(await served(model, folder / "weights", version, server, shared))
                else:
                    plains.append(plain(model, folder / "plain.safetensors"))
        await http.close()
    write_s, read_s = (statistics.median(times) for times in zip(*plains[1:], strict=True))
    publish_s, check_s, load_s = (statistics.median(times) for times in zip(*serveds[1:], strict=True))
    tensors = WholeModel(model).tensors().values()
    count = sum(tensor.numel() for tensor in tensors)
    bytes_ = count * DTYPES[dtype].itemsize
    ratio = statistics.median(sum(ours) / sum(theirs) for ours, theirs in zip(serveds[1:], plains[1:], strict=True))
    return Row(size, dtype, count, bytes_, write_s, read_s, publish_s, check_s, load_s, ratio)


def fits(size: str, dtype: str) -> bool:
    """True if this machine has the memory for it now."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Qwen2ForCausalLM(config_of(size)).parameters())
    needed = COPIES_IN_MEMORY[dtype] * count * DTYPES[dtype].itemsize + HELD_BYTES
    return needed < psutil.virtual_memory().available


def print_row(row: Row) -> None:
    times = (row.publish_s, row.check_s, row.load_s, row.served_s, row.plain_write_s, row.plain_read_s, row.plain_s)
    figures = "".join(f"{1e3 * seconds:>10.1f}" for seconds in times)
    print(f"{row.size:>5} {row.dtype:>9} {row.bytes / 2**20:>8.1f}{figures}{row.ratio:>8.2f}", flush=True)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1M and 10M only, three rounds")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="folder on the file system to measure")
    parser.add_argument("--links", type=float, nargs="+", default=[], metavar="GBITS")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    if ENVIRONMENT.items() - os.environ.items():  # which is read once, at the start of a process
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | ENVIRONMENT)
    torch.set_num_threads(1)
    sizes, rounds = (["1M", "10M"], 3) if args.quick else (args.sizes, args.rounds)
    heads = ("publish", "check", "load", "served", "write", "read", "plain")
    print(f"{'size':>5} {'type':>9} {'MiB':>8}{''.join(f'{head:>10}' for head in heads)}{'ratio':>8}    (ms)")
    rows = []
    for size in sizes:
        for dtype in DTYPES:
            if not fits(size, dtype):
                print(f"{size:>5} {dtype:>9} left out: needs {COPIES_IN_MEMORY[dtype]} copies in memory")
                continue
            with tempfile.TemporaryDirectory(dir=args.dir) as folder:
                row = uvloop.run(measure(size, dtype, Path(folder), rounds))
            rows.append(row)
            print_row(row)
    print(f"target: served at most {TARGET_RATIO} x plain; worst here {max(row.ratio for row in rows):.2f}")
    if args.links:
        print(deltas.HEADER)
    over = [*deltas.rows(args.links, deltas.LEARNING_RATES, rounds, 100)]
    if args.json:
        derived = [asdict(row) | {"served_s": row.served_s, "plain_s": row.plain_s} for row in rows]
        told = {"target_ratio": TARGET_RATIO, "rows": derived, "over_links": [*map(asdict, over)]}
        args.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
