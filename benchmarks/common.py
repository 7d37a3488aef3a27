"""What several benchmarks share: their command line, tables, turns, runs of an experiment, processes and servers.

Nothing here imports torch, so that processes which measure other things stay small; `tiny_models` does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameBackend, make_resolver
from asyncrl.comm.security import HttpSecurity, RunSecret
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_supervised
from asyncrl.config.run_dir import SECRET_FILE, write_run_config
from asyncrl.runtime.supervisor import STOP_SIGNAL, supervised
from asyncrl.trainer.supervised.base_model import ensure_base_model

T = TypeVar("T")
START_S = 600.0
"""Longest that a server may take to start."""
RANKS_S = 1800.0
"""Longest that processes of `on_ranks` may take."""
TITLE = re.compile(r"^asyncrl (\w+)/")
MEASURED_RUN = ("eval.interval=0", "checkpoint.interval=0", "logging.tensorboard=false", "resume=restart")
"""Settings of runs whose steps are timed: nothing but training."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a command line whose help is the script's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


class Table:
    """A table in Markdown whose rows are printed as they are measured; the first column is text, the others numbers."""

    def __init__(self, *heads: str) -> None:
        self.row(*heads)
        print(f"|---{'|--:' * (len(heads) - 1)}|", flush=True)

    def row(self, *cells: object) -> None:
        """Print a row."""
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def with_block(text: str, begin: str, end: str, block: str) -> str:
    """Return a page's text with what stands between the lines `begin` and `end` replaced."""
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{block}{end}{rest.partition(end)[2]}"


def in_turns(variants: Iterable[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield the number of the round with each of `variants`, in one order and then in the other.

    So a machine whose speed changes from minute to minute disturbs the ratios of a round little.
    """
    order = [*variants]
    for number in range(rounds):
        for variant in order[:: -1 if number % 2 else 1]:
            yield number, variant


def verdict(value: float, target: float, *, at_least: bool = False) -> str:
    """Return `met` or `MISSED`."""
    return "met" if (value >= target if at_least else value <= target) else "MISSED"


def demo_model() -> Path:
    """Return the folder of the demo's base model; it is made first if there is none."""
    return Path(ensure_base_model(load_supervised("arithmetic_base")))


def start_run(
    experiment: str, settings: Iterable[str], environment: Mapping[str, str] = os.environ
) -> subprocess.Popen[bytes]:
    """Start a run of `experiment`; what it prints goes to standard error."""
    command = [sys.executable, "-m", "asyncrl.launch", experiment, *settings]
    return subprocess.Popen(command, stdout=sys.stderr, env=environment)


def wait_for_step(process: subprocess.Popen[bytes], metrics: Path, step: int) -> None:
    """Return once the run's file of metrics has a row for each of `step` steps and the initial model, or it ended."""
    while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") <= step):
        time.sleep(0.05)  # a benchmark looks; it synchronises nothing


def cpu_seconds(process: subprocess.Popen[bytes]) -> Counter[str]:
    """Return the CPU seconds of a run's processes so far, by kind of process."""
    seconds: Counter[str] = Counter()
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one that has ended meanwhile is none of the run's
            if named := TITLE.search(" ".join(child.cmdline())):
                seconds[named[1]] += sum(child.cpu_times()[:2])  # type: ignore[assignment]
    return seconds


def memory_of_process(name: str) -> int:
    """Bytes of this process by /proc: VmRSS, resident now, or VmHWM, the most since the program began.

    rusage would count the parent's too.
    """
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def on_ranks(be_rank: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Call `be_rank(rank, *arguments)` in a fresh process for each rank; return what they return, in any order."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    processes = [
        context.Process(target=_be_rank, args=(be_rank, rank, arguments, results), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=RANKS_S) for _ in processes]
    for process in processes:
        process.join(RANKS_S)
    return found


def _be_rank(be_rank: Callable[..., Any], rank: int, arguments: tuple[Any, ...], results: Any) -> None:
    results.put(be_rank(rank, *arguments))


@contextmanager
def serving(config: ExperimentConfig, run_dir: Path) -> Iterator[tuple[str, HttpSecurity]]:
    """A generation server in a process of its own, started as a run starts it: its URL, and what its callers need."""
    config.generation.start_timeout_s = START_S
    run_dir.mkdir(exist_ok=True)
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
