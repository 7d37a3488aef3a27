"""What asyncrl's speed on a GPU depends on, in one command: offline, with random weights of Qwen2.5-1.5B's sizes.

    python benchmarks/gpu.py                                 all rows, on the first GPU
    python benchmarks/gpu.py --rows machine model training   some of them
    python benchmarks/gpu.py --tiny --device cpu             every row with small sizes, to see that each works

Each row is a process of its own, so that one that fails, even of the GPU's memory, says why and the next begins. Each
figure is printed as it is measured; a row that takes longer than its limit is ended and keeps what it has. Tracebacks
and servers' output are in `--log`. The row for SGLang needs an interpreter that has it (`--sglang-python`, or
ASYNCRL_SGLANG_PYTHON); without one it is left out. At the end the targets are compared. `pytest tests/gpu` shows that
what is measured is also right, and plays whole runs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to ask for a GPU must not begin CUDA before the forks
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as in a run: GPUs are numbered as nvidia-smi does

import torch
import transformers.models.qwen2.modeling_qwen2  # noqa: F401 - like the engines below
from common import parser, verdict
from gpu_rows import generation, machine, sglang_server, training, weights
from gpu_rows.bench import MODEL, Bench, Figure, LeftOut, one_line
from transformers.utils.logging import disable_progress_bar

import asyncrl.trainer.engines.flat
import asyncrl.trainer.engines.sharded.loader  # noqa: F401 - imported once, before the rows' processes are forked
from asyncrl.runtime.plan import GPU_ALLOCATOR
from asyncrl.weights.transports import TRANSPORTS


class Row(NamedTuple):
    """A part of the table that is measured in a process of its own, within `limit_s`."""

    name: str
    limit_s: float
    measure: Callable[[Bench], Iterator[Figure]]


ROWS = (
    Row("machine", 60, machine.machine),
    Row("model", 60, machine.model),
    Row("training", 360, training.training),
    Row("weights", 120, weights.weights),
    Row("embedded", 120, generation.embedded),
    Row("agreement", 60, generation.agreement),
    Row("sglang", 300, sglang_server.sglang),
)
BUDGET_S = 30 * 60
PATIENCE = 10
"""Times the limit that a row of the small size gets: it shows that the row works, on however busy a machine."""
END_S = 10.0
"""Longest that a row's process may take to end after its last figure."""
NEEDED = "model"
"""The row that makes what most others need."""


Term = tuple[str, str]
"""A row and the name of one of its numbers."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a number is to be: at least or at most `value`.

    `variants`: ways to get there by name; the numbers of each are added up, and the best way counts.
    """

    name: str
    variants: Mapping[str, tuple[Term, ...]]
    value: float
    at_least: bool = False
    over: Term | None = None
    """A number by which the sum is divided."""

    def found(self, figures: dict[str, dict[str, float | str]]) -> tuple[float, str] | None:
        """The best way's number and name; None if no way was measured to its end."""
        sums: list[tuple[float, str]] = []
        for variant, terms in self.variants.items():
            values = [figures.get(row, {}).get(name) for row, name in (*terms, *([self.over] if self.over else ()))]
            numbers = [value for value in values if isinstance(value, float)]
            if len(numbers) == len(values):
                sums.append((sum(numbers[:-1]) / numbers[-1] if self.over else sum(numbers), variant))
        return (max(sums) if self.at_least else min(sums)) if sums else None


def _ways(row: str, number: str, *names: str) -> dict[str, tuple[Term, ...]]:
    return {name: ((row, number.format(name)),) for name in names}


UTILISATION, SERVED = "{}: utilisation", "update by {}: with running requests: step until served"
TARGETS = (
    Target(
        "training, packed", _ways("training", UTILISATION, training.STEP, *training.OTHER_PACKED), 0.4, at_least=True
    ),
    Target("training, shared prefixes", _ways("training", UTILISATION, *training.SHARED), 0.4, at_least=True),
    Target(
        "decoding by SGLang, of the bandwidth",
        {"": (("sglang", "decoding: with log-probabilities: share of the memory bandwidth"),)},
        0.6,
        at_least=True,
    ),
    Target("step until served, by disk, s", _ways("sglang", SERVED, "disk"), 2.0),
    Target("step until served, by the fastest transport, s", _ways("sglang", SERVED, *TRANSPORTS), 2.0),
    Target(
        "in-memory checkpoint, of a step",
        {"": (("weights", "in-memory checkpoint: training waits"),)},
        0.05,
        over=("weights", "step alone: seconds"),
    ),
    Target(
        "embedded engine beside trainer, nats",
        {"bfloat16": (("agreement", "embedded, bfloat16: mean distance"),)},
        0.02,
    ),
    Target("SGLang beside trainer, nats", {"": (("sglang", "agreement: mean distance"),)}, 0.02),
)


def _be_row(row: Row, bench: Bench, sender: Connection) -> None:
    """Measure `row` and send its figures, in a process that is the first of a session of its own."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.setdefault("PYTORCH_ALLOC_CONF", GPU_ALLOCATOR)  # it computes as a ModelWorker does
    try:
        for figure in row.measure(bench):
            sender.send(figure)
    except LeftOut as reason:
        sender.send(Figure("", "left out", str(reason)))
    except BaseException as error:
        bench.note(traceback.format_exc())
        sender.send(Figure("", "", one_line(error), failed=True))
    sender.send(None)
    sender.close()


def measured(row: Row, bench: Bench) -> Generator[Figure]:
    """The figures of `row` as they come; the last one is a failure if it ended early or took too long."""
    context = multiprocessing.get_context("fork")  # which has imported all of it already; CUDA begins in the child
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_be_row, args=(row, bench, sender))
    process.start()
    assert process.pid is not None
    sender.close()
    limit_s = row.limit_s * (PATIENCE if bench.tiny else 1)
    ends = time.monotonic() + limit_s
    try:
        while True:
            if not receiver.poll(max(0.0, ends - time.monotonic())):
                yield Figure("", "", f"took longer than {limit_s:.0f} s", failed=True)
                return
            try:
                received = receiver.recv()
            except EOFError:
                process.join()
                yield Figure("", "", f"its process ended with exit code {process.exitcode}", failed=True)
                return
            if received is None:
                process.join(END_S)
                return
            yield received
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.kill()  # if it has no session of its own yet
        process.join()


def summary(figures: dict[str, dict[str, float | str]]) -> Iterator[str]:
    """A line for each target."""
    for target in TARGETS:
        best, wanted = target.found(figures), f"target {'>=' if target.at_least else '<='} {target.value}"
        if best is None:
            yield f"  {target.name:<48} {'not measured':>12}  {wanted}"
            continue
        value, variant = best
        met, by = verdict(value, target.value, at_least=target.at_least), f"  ({variant})" if variant else ""
        yield f"  {target.name:<48} {value:>12.4g}  {wanted}  {met}{by}"


@contextlib.contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    """A new folder in `parent`, removed at the end even if a server that is being ended still writes there."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-gpu-", dir=parent, ignore_cleanup_errors=True) as made:
        yield Path(made)


def _clear(*folders: Path) -> None:
    """Remove what a row has left in these folders of this command: one that was ended may have left a checkpoint."""
    for path in (each for folder in folders for each in folder.iterdir() if each.name != MODEL):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def main() -> int:
    """Measure the rows; returns 1 if one of them failed."""
    command = parser(__doc__)
    command.add_argument("--device", default="cuda")
    command.add_argument("--tiny", action="store_true", help="small sizes: shows that every row works")
    command.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], metavar="ROW", help="some of them")
    command.add_argument("--log", type=Path, default=Path("gpu.log"), help="tracebacks, and the output of servers")
    command.add_argument("--folder", type=Path, help="a folder on the disk to measure; default: the temporary one")
    command.add_argument("--sglang-python", default=os.environ.get("ASYNCRL_SGLANG_PYTHON"))
    options = command.parse_args()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    wanted = options.rows or [row.name for row in ROWS]
    options.log.write_text("")
    failed = 0
    with _folder(options.folder) as folder, _folder(Path("/dev/shm")) as memory:
        log = options.log.absolute()
        bench = Bench(torch.device(options.device), options.tiny, folder, options.sglang_python, memory, log)
        for row in ROWS:
            if row.name not in wanted and not (row.name == NEEDED and set(wanted) - {"machine"}):
                continue
            begun = time.monotonic()
            print(f"{row.name}: {(row.measure.__doc__ or '').splitlines()[0]}", flush=True)
            bench.note(f"---- {row.name}")
            figures: list[Figure] = []
            with contextlib.closing(measured(row, bench)) as coming:
                for figure in coming:
                    if figure.part and (not figures or figure.part != figures[-1].part):
                        print(f"  {figure.part}")
                    figures.append(figure)
                    print(figure, flush=True)
            failed += sum(figure.failed for figure in figures)
            bench.figures[row.name] = {each.key: each.value for each in figures if not each.failed}
            _clear(folder, memory)
            print(f"  ({time.monotonic() - begun:.0f} s of {row.limit_s:.0f})", flush=True)
    print("targets" + (" (of the full size: small ones say nothing)" if options.tiny else ""))
    print(*summary(bench.figures), sep="\n")
    print(f"{failed} failed; the log is {options.log}")
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # the row's process is ended first
    sys.exit(main())
