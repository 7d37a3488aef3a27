"""Publish to served: the time from "the train step is over" to "the server generates with the new weights".

    python benchmarks/weights.py [--sizes 1M 10M 100M 300M 1B] [--rounds 5] [--dir DIR]

Per model size and type, in one run: `publish` (shards, checksums, manifest, fsync, rename), `check` (the manager reads
the checksums back) and `load` (`update_weights_from_disk` of an embedded server in a process of its own, label
confirmed), as a run does them one after the other; beside it the time that plainly writing the same bytes (one file,
file and folder synced: the same promise for a power loss) and reading them takes. The two take turns; times are medians
over rounds in ms, the ratio is the median of the rounds' ratios. Files are read back from the page cache on both sides,
as they are in a run on one machine, and both processes have the allocator's settings that the launcher gives to a
run's. `--dir` chooses the file system, by default the temporary one; /dev/shm measures tmpfs. A size that does not fit
into memory is left out and named.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import uvloop
from common import Table, in_turns, parser, serving
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from asyncrl.comm.http_client import JsonHttp
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device, Dtype
from asyncrl.inference.client import GenerationServerClient
from asyncrl.models.ranks import Ranks
from asyncrl.runtime.plan import MALLOC
from asyncrl.weights.atomic_dir import sync_directory, sync_file
from asyncrl.weights.folder_tensors import WholeModel
from asyncrl.weights.manifest import verify
from asyncrl.weights.publishing import SharedFiles, publish, tokenizer_assets

TARGET_RATIO = 1.3
ENVIRONMENT = MALLOC | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
UPDATE_S = 600.0
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


async def measure(size: str, dtype: str, folder: Path, rounds: int) -> tuple[str, ...]:
    """A row of the table, without size and type: both ways in turn, `rounds` times after one to warm up."""
    model = make_model(size, DTYPES[dtype])
    model.save_pretrained(folder / "base")
    shared = SharedFiles(model.config, tokenizer_assets(folder / "base"))
    times: dict[str, list[tuple[float, ...]]] = {"served": [], "plain": []}
    config, version = ExperimentConfig(), 0
    config.model.path, config.generation.dtype = str(folder / "base"), Dtype(dtype)
    config.generation.device = Device.cpu
    config.generation.context_length, config.generation.max_total_tokens = 128, 1024
    with serving(config, folder / "run") as (url, security):
        http = JsonHttp(security)
        server = GenerationServerClient(http, url)
        for _, way in in_turns(times, rounds + 1):
            if way == "served":
                version += 1
                times[way].append(await served(model, folder / "weights", version, server, shared))
            else:
                times[way].append(plain(model, folder / "plain.safetensors"))
        await http.close()
    ours, theirs = (each[1:] for each in times.values())
    ratio = statistics.median(sum(own) / sum(other) for own, other in zip(ours, theirs, strict=True))
    own, other = ([statistics.median(each) for each in zip(*found, strict=True)] for found in (ours, theirs))
    mib = sum(tensor.nbytes for tensor in WholeModel(model).tensors().values()) / 2**20
    figures = (*own, sum(own), *other, sum(other))
    return f"{mib:.1f}", *(f"{1e3 * each:.1f}" for each in figures), f"{ratio:.2f}"


def fits(size: str, dtype: str) -> bool:
    """True if this machine has the memory for it now."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Qwen2ForCausalLM(config_of(size)).parameters())
    needed = COPIES_IN_MEMORY[dtype] * count * DTYPES[dtype].itemsize + HELD_BYTES
    return needed < psutil.virtual_memory().available


def main() -> None:
    """Print the table."""
    command = parser(__doc__)
    command.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--dir", type=Path, help="folder on the file system to measure")
    args = command.parse_args()
    if ENVIRONMENT.items() - os.environ.items():  # which is read once, at the start of a process
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | ENVIRONMENT)
    torch.set_num_threads(1)
    heads = ("publish", "check", "load", "served", "write", "read", "plain")
    table, worst = Table("size", "type", "MiB", *heads, "ratio"), 0.0
    for size in args.sizes:
        for dtype in DTYPES:
            if not fits(size, dtype):
                print(f"{size} {dtype} is left out: it needs {COPIES_IN_MEMORY[dtype]} copies in memory")
                continue
            with tempfile.TemporaryDirectory(dir=args.dir) as folder:
                row = uvloop.run(measure(size, dtype, Path(folder), args.rounds))
            table.row(size, dtype, *row)
            worst = max(worst, float(row[-1]))
    print(f"target: served at most {TARGET_RATIO} x plain; worst here {worst:.2f}")


if __name__ == "__main__":
    main()
