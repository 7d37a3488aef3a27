"""Rows on the machine itself: its parts, copies and matrix products; the random model."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import partial

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from asyncrl.config.machine import host_memory
from asyncrl.runtime.process.hardware import gpu_details
from gpu_rows.bench import GIB, MODEL, Bench, Figure, tried


def matmul_flops(bench: Bench, dtype: torch.dtype) -> float:
    """Floating-point operations per second of products of two square matrices."""
    size, products = bench.size(8192, 64), 10
    left, right = (torch.randn(size, size, device=bench.device).to(dtype) for _ in range(2))

    def multiply() -> None:
        for _ in range(products):
            left @ right

    return products * 2 * size**3 / bench.seconds(multiply, 5)


def machine(bench: Bench) -> Iterator[Figure]:
    """GPU, versions, room on disks, copies in GB/s, peaks of matrix products."""
    yield Figure("", "torch", torch.__version__)
    if bench.cuda:
        gpu = torch.cuda.get_device_properties(bench.device)
        yield Figure("", "GPU", gpu.name)
        yield Figure("", "compute capability", f"{gpu.major}.{gpu.minor}")
        yield Figure("", "GPU memory", gpu.total_memory / GIB, "GiB")
        yield Figure("", "GPUs of this machine", float(len(gpu_details()) // 2))
        yield Figure("", "CUDA of torch", str(torch.version.cuda))
        yield Figure("", "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
        yield from tried(bench, "driver", _driver)
    yield Figure("", "host memory", host_memory() / GIB, "GiB")
    for name, folder in (("/dev/shm", bench.memory), ("disk of this command's folder", bench.folder)):
        yield Figure("", f"room: {name}", shutil.disk_usage(folder).free / GIB, "GiB")
    size = bench.size(1 << 30, 1 << 16)
    for pinned in (True, False):
        yield from tried(bench, "copies", partial(_copies, bench, size, pinned=pinned))
    there = torch.empty(size, dtype=torch.uint8, device=bench.device)
    other = torch.empty_like(there)
    rate = 2 * size / bench.seconds(lambda: other.copy_(there), 5)
    yield Figure("", "memory bandwidth", rate / 1e9, "GB/s")
    for dtype in (torch.bfloat16, torch.float32):
        flops = matmul_flops(bench, dtype)
        yield Figure("", f"matmul {str(dtype).removeprefix('torch.')}", flops / 1e12, "TFLOP/s")


def _driver() -> Iterator[Figure]:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    yield Figure("", "driver", said.splitlines()[0])


def _copies(bench: Bench, size: int, *, pinned: bool) -> Iterator[Figure]:
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned and bench.cuda)
    there = torch.empty(size, dtype=torch.uint8, device=bench.device)
    kind = "pinned" if pinned else "pageable"
    for way, target, source in (("to the device", there, host), ("to the host", host, there)):
        rate = size / bench.seconds(lambda t=target, s=source: t.copy_(s), 5)  # type: ignore[misc]
        yield Figure("", f"copy {way}, {kind}", rate / 1e9, "GB/s")


def model(bench: Bench) -> Iterator[Figure]:
    """Folder of a model with random weights and a tokenizer of numbered words, which the other rows use."""
    folder, config = bench.folder / MODEL, bench.config
    torch.manual_seed(0)
    with bench.device:
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(str(folder))
    words = {"<pad>": 0, "<eos>": 1} | {f"w{number}": number for number in range(2, config.vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    yield Figure("", "parameters", made.num_parameters() / 1e9, "billion")
