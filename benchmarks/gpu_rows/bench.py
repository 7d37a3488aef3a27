"""Common parts of the rows of `benchmarks/gpu.py`: figures, the random model, clocks, batches."""

from __future__ import annotations

import asyncio
import gc
import shutil
import statistics
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import torch
from common import sizes_of
from tiny_models import sample_of
from transformers import Qwen2Config

from asyncrl.api.trajectory import Trajectory
from asyncrl.config.setting import Device, Dtype

TOKENS: dict[str, Any] = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "tie_word_embeddings": True}
QWEN2_1_5B = sizes_of("qwen2", 151936, 1536, 28, 12, 2, 8960, max_position_embeddings=32768, **TOKENS)
"""Qwen2.5-1.5B's sizes."""
TINY = sizes_of("qwen2", 64, 64, 2, 4, 2, 64, max_position_embeddings=4096, **TOKENS)
"""Small sizes that kernels of GPUs take too: heads of 16."""
T = TypeVar("T")
GIB = 1 << 30
MODEL = "model"
"""Name of the random model's folder."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number, or a text, of a `part` of a row; `failed` marks the reason why there is no number."""

    part: str
    name: str
    value: float | str
    unit: str = ""
    failed: bool = False

    @property
    def key(self) -> str:
        """Its name within the row."""
        return f"{self.part}: {self.name}" if self.part else self.name

    def __str__(self) -> str:
        if isinstance(self.value, str):
            return f"    {'FAILED: ' if self.failed else ''}{self.name}{': ' if self.name else ''}{self.value}"
        return f"    {self.name:<44} {self.value:>12,.4g} {self.unit}{'  FAILED' if self.failed else ''}"


class LeftOut(Exception):
    """A row, or a part of one, cannot be measured on this machine; the message says why. This is no failure."""


@dataclass
class Bench:
    """What all rows are measured with.

    Attributes:
        device: where models compute.
        tiny: every size is small, to show that the row works.
        folder: of this command on a disk; all but the model is removed after each row.
        sglang: an interpreter that has SGLang; None: rows for it are left out.
        memory: folder in memory.
        log: file that gets tracebacks, and the output of tests and servers; None: it is lost.
        figures: of the rows before, by row and name.
    """

    device: torch.device
    tiny: bool
    folder: Path
    sglang: str | None = None
    memory: Path = Path("/dev/shm")
    log: Path | None = None
    figures: dict[str, dict[str, float | str]] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        """True on a GPU."""
        return self.device.type == "cuda"

    @property
    def setting(self) -> Device:
        """The device as settings name it."""
        return Device(self.device.type)

    @property
    def config(self) -> Qwen2Config:
        """The random model's sizes."""
        return Qwen2Config(**(TINY if self.tiny else QWEN2_1_5B))

    @property
    def dtype(self) -> Dtype:
        """Type of compute, as `auto` chooses it."""
        return Dtype.auto.on(self.device.type)

    @property
    def model(self) -> str:
        """Folder of the random model.

        Raises:
            RuntimeError: the row that makes it failed.
        """
        folder = self.folder / MODEL
        if not (folder / "config.json").is_file():
            raise RuntimeError("there is no model: the row 'model' failed or was not asked for")
        return str(folder)

    def size(self, full: int, tiny: int) -> int:
        """`full`, or `tiny` where everything is small."""
        return tiny if self.tiny else full

    def earlier(self, row: str, name: str) -> float | None:
        """A number of a row before this one; None if there is none."""
        value = self.figures.get(row, {}).get(name)
        return value if isinstance(value, float) else None

    def synchronise(self) -> None:
        """Wait for what the device computes."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, step: Callable[[], object], rounds: int) -> float:
        """Median seconds of `rounds` calls of `step`, after one that warms up."""
        step()
        times = []
        for _ in range(rounds):
            self.synchronise()
            begun = time.perf_counter()
            step()
            self.synchronise()
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    def note(self, text: str) -> None:
        """Append `text` to the log."""
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(text.rstrip("\n") + "\n")

    def need_space(self, folder: Path, bytes_: float) -> None:
        """Look for room before anything is written: a mapped file without room would end the process.

        Raises:
            LeftOut: `folder` has no room for `bytes_`.
        """
        free = shutil.disk_usage(folder).free
        if free < bytes_:
            raise LeftOut(f"{folder} has room for {free / GIB:.1f} GiB, and {bytes_ / GIB:.1f} GiB are written")

    def forget(self) -> None:
        """Free what nobody refers to, and begin to look for the peak of memory anew."""
        gc.collect()  # FSDP2's modules and states refer to each other
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self, part: str) -> Iterator[Figure]:
        """Peak of the memory that torch allocated on the GPU since `forget`; nothing on a CPU."""
        if self.cuda:
            yield Figure(part, "peak", torch.cuda.max_memory_allocated(self.device) / GIB, "GiB")


def tried(bench: Bench, name: str, measure: Callable[[], Iterator[Figure]]) -> Iterator[Figure]:
    """The figures of one part of a row; if it fails, why, so that the next part can begin."""
    bench.forget()
    try:
        yield from measure()
    except LeftOut as reason:
        yield Figure(name, "left out", str(reason))
    except Exception as error:  # whatever a part raises is its result
        bench.note(traceback.format_exc())
        yield Figure(name, "", one_line(error), failed=True)


def one_line(error: BaseException) -> str:
    """An exception in one line: its message's first line, and the last two, where a server's log has the cause."""
    lines = str(error).strip().splitlines()
    shown = lines[:1] + lines[1:][-2:]
    return f"{type(error).__name__}: {' | '.join(line[:300] for line in shown)}"


class Calls:
    """An event loop in a thread: connections, and the log of a server, are attended to while other threads compute."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def begin(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `call`; the future has its result."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def __call__(self, call: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Make `call` and return its result; raises as `result`."""
        return self.result(self.begin(call), limit_s)

    def result(self, begun: Future[T], limit_s: float) -> T:
        """Wait for a call that was begun.

        Raises:
            TimeoutError: it is not done after `limit_s` seconds; it is cancelled.
        """
        try:
            return begun.result(limit_s)
        except TimeoutError as error:
            if begun.done():  # by a time limit of its own
                raise
            begun.cancel()
            raise TimeoutError(f"no answer within {limit_s:g} s") from error

    def close(self) -> None:
        """End the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def grouped(lengths: list[int], prompt: int, group: int, vocabulary: int) -> list[Trajectory]:
    """Groups of `group` samples of these lengths, which share prompts of `prompt` tokens; the rest is random.

    With `prompt` 0 samples share nothing, and the first quarter of each is its prompt.
    """
    rng = np.random.default_rng(0)
    made = []
    size = group if prompt else 1
    for number, first in enumerate(range(0, len(lengths), size)):
        shared = rng.integers(2, vocabulary, prompt)
        samples = []
        for place, length in enumerate(lengths[first : first + size]):
            tokens = np.concatenate([shared, rng.integers(2, vocabulary, length - prompt)])
            sample = sample_of(tokens, prompt or max(1, length // 4))
            samples.append(replace(sample, reward=float(place % 2), episode=place))
        made.append(Trajectory(f"r{number}", f"p{number}", number, tuple(samples)))
    return made
