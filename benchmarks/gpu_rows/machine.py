"""Rows on the machine itself: its parts, copies and matrix products; the tests for GPUs; the random model."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from asyncrl.config.machine_limits import host_memory
from asyncrl.runtime.process.hardware import gpu_details
from gpu_rows.bench import GIB, MODEL, Bench, Figure, LeftOut, tried

ROOT = Path(__file__).parents[2]
TESTS_S = 135
"""Longest that the tests may take: less than the row, so that it says which one hangs."""


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
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        yield from tried(bench, "driver", lambda: iter([Figure("", "driver", _first_line(asked))]))
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


def _first_line(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()[0]


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


def tests(bench: Bench) -> Iterator[Figure]:
    """The tests for GPUs, in a process of their own; of the small size only that they are found."""
    if importlib.util.find_spec("pytest") is None:
        raise LeftOut("pytest is not installed; pip install -e '.[dev]' in the clone installs it")
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-v", "-rs", "--durations=5", "--durations-min=1"]
    command += ["-n", "0", "-p", "no:cacheprovider", *(["--collect-only"] if bench.tiny else [])]
    output, begun, reason = bench.folder / "tests.output", time.monotonic(), ""
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        try:
            process.wait(bench.size(TESTS_S, 10 * TESTS_S))
        except subprocess.TimeoutExpired:
            reason = f"not done after {TESTS_S} s"
            process.kill()
            process.wait()
    text = output.read_text(errors="replace")
    bench.note(text)
    yield from test_figures(text, time.monotonic() - begun, reason or exit_reason(process.returncode))


def exit_reason(code: int) -> str:
    """Why pytest did not do its work; empty if it did, also if tests failed."""
    return "" if code in (0, 1) else f"pytest ended with exit code {code}"


def test_figures(text: str, seconds: float, reason: str) -> Iterator[Figure]:
    """Counts, durations and names in pytest's output; `reason`: why it is not complete."""
    results = re.findall(r"^(tests/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", text, re.MULTILINE)
    if found := re.search(r"(\d+) tests? collected", text):
        yield Figure("", "collected", float(found[1]))
    else:
        for result in ("PASSED", "SKIPPED"):
            yield Figure("", result.lower(), float(sum(each == result for _, each in results)))
    failed = [name for name, result in results if result in ("FAILED", "ERROR")]
    yield Figure("", "failed", float(len(failed)), failed=bool(failed))
    yield Figure("", "all", seconds, "s")
    for name in failed:
        yield Figure("", "failed", name)
    for times, why in re.findall(r"^SKIPPED \[(\d+)\] \S+ (.*)$", text, re.MULTILINE):
        yield Figure("", f"skipped, {times} times", why)
    for took, name in re.findall(r"^([\d.]+)s call +(tests/\S+.*)$", text, re.MULTILINE):
        yield Figure("", f"slow: {name}", float(took), "s")
    if reason:
        last = (text.strip().splitlines() or [""])[-1]  # a test's name without its result, if one hangs
        yield Figure("", "", f"{reason}; the last line of its output is {last[-300:]}", failed=True)
