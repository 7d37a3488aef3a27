"""Whole runs, in which trainer and server share the GPU: steps, idle time, memory; and one whose server is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from asyncrl.runtime.exit_codes import EXIT_INTERRUPTED, EXIT_OK
from gpu_rows.bench import Bench, Figure, said, tried

LIMIT_S = 170.0
LOOK_S = 0.2
ENDLESS = 100_000
"""Steps of a run that is stopped: however fast its steps are, it is there when its server is to be killed."""
STEPS_BEFORE, STEPS_AFTER = 2, 2
"""Steps until the server is killed, and at least so many after that until the run is stopped."""
REWARD = """
def spread(data, completion):
    "A reward that random answers get in part, so that groups have variance."
    return (len(completion) % 7) / 7.0
"""
TIMES = ("step_s", "train_s", "wait_for_batch_s", "publish_s", "memory_checkpoint_s", "generation_idle_s")


def runs(bench: Bench) -> Iterator[Figure]:
    """Runs with the staleness bounds 0 and 4."""
    for staleness in (0, 4):
        yield from tried(bench, f"eta {staleness}", partial(_run, bench, f"eta {staleness}", staleness, kill=False))


def failures(bench: Bench) -> Iterator[Figure]:
    """A run whose server is killed with SIGKILL after the second step goes on until it is stopped."""
    yield from tried(bench, "server killed", partial(_run, bench, "server killed", 4, kill=True))


def _run(bench: Bench, name: str, staleness: int, *, kill: bool) -> Iterator[Figure]:
    root = bench.folder / name.replace(" ", "_")
    root.mkdir()
    steps, limit_s = ENDLESS if kill else bench.size(6, 3), LIMIT_S * bench.size(1, 5)
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncrl.launch", "own_model", *_settings(bench, root, staleness, steps)],
        stdout=(root / "output").open("wb"),
        stderr=subprocess.STDOUT,
    )
    folder = root / "gpu" / "run"
    seen: dict[int, psutil.Process] = {}
    memory: dict[str, float] = {}
    stop_after: int | None = None
    stopped = False
    begun, pause = time.monotonic(), threading.Event()
    try:
        while process.poll() is None and time.monotonic() - begun < limit_s:
            _look(process.pid, seen, memory if bench.cuda else {})
            done = len(_rows(folder)) if kill else 0
            if stop_after is None and done >= STEPS_BEFORE and _kill_server(seen):
                stop_after = done + STEPS_AFTER
            elif stop_after is not None and done >= stop_after and not stopped:
                process.send_signal(signal.SIGINT)
                stopped = True
            pause.wait(LOOK_S)
        if process.poll() is None:
            raise TimeoutError(f"the run had {len(_rows(folder))} steps after {limit_s:.0f} s and did not end")
        if process.returncode != (EXIT_INTERRUPTED if stopped else EXIT_OK):
            lines = (root / "output").read_text(errors="replace").splitlines()
            raise RuntimeError(f"the run ended with {process.returncode}: {' | '.join(lines[-4:])}")
        yield from _figures(name, folder, memory)
        left = [each for each in seen.values() if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        yield Figure(name, "processes left behind", float(len(left)), failed=bool(left))
    finally:
        if process.poll() is None:
            process.kill()
        for each in seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def _settings(bench: Bench, root: Path, staleness: int, steps: int) -> list[str]:
    (root / "reward.py").write_text(REWARD)
    rows = [{"prompt": " ".join(f"w{2 + (row + place) % 50}" for place in range(8))} for row in range(64)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row | {"answer": ""}) + "\n" for row in rows))
    batch, group, new = bench.size(16, 2), bench.size(8, 2), bench.size(512, 8)
    settings: dict[str, Any] = {
        "fileroot": root,
        "experiment_name": "gpu",
        "trial_name": "run",
        "model.path": bench.model,
        "dataset.path": root / "rows.jsonl",
        "dataset.max_prompt_tokens": 16,
        "reward.path": f"{root / 'reward.py'}:spread",
        "trainer.device": bench.setting,
        "generation.device": bench.setting,
        "trainer.gradient_checkpointing": "true",
        "trainer.ppo_minibatches": 1,
        "train_batch_size": batch,
        "group_size": group,
        "total_train_steps": steps,
        "max_head_offpolicyness": staleness,
        "rollout.max_concurrent": 2 * batch,
        "rollout.sampling.max_new_tokens": new,
        "rollout.rehearse": "false",
        "generation.max_running_requests": bench.size(256, 16),
        "generation.max_total_tokens": bench.size(256 * 600, 1024),
        "eval.interval": 0,
        "checkpoint.interval": 0,
        "logging.tensorboard": "false",
    }
    if bench.sglang is not None and not bench.tiny:
        settings |= {
            "generation.backend": "sglang",
            "generation.sglang.python": bench.sglang,
            "generation.sglang.args": "{mem_fraction_static: 0.3}" if bench.cuda else "{}",
        }
    return [f"{name}={value}" for name, value in settings.items()]


def _rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of the steps so far."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [row for row in map(json.loads, lines) if row.get("step")]


def _look(launcher: int, seen: dict[int, psutil.Process], memory: dict[str, float]) -> None:
    """Remember the processes below the launcher, and the most GPU memory of each."""
    with contextlib.suppress(psutil.NoSuchProcess):
        seen |= {each.pid: each for each in psutil.Process(launcher).children(recursive=True)}
    if not memory and not seen:
        return
    asked = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        for line in subprocess.run(asked, capture_output=True, text=True, check=True, timeout=5).stdout.splitlines():
            pid, mebibytes = map(int, line.split(","))
            title = _title(seen[pid]) if pid in seen else f"process {pid}"
            memory[title] = max(memory.get(title, 0.0), mebibytes / 1024)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:40]
    except psutil.NoSuchProcess:
        return f"process {process.pid}"


def _kill_server(seen: dict[int, psutil.Process]) -> bool:
    for process in seen.values():
        if _title(process).startswith("asyncrl generation_server"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
                return True
    return False


def _figures(name: str, folder: Path, memory: dict[str, float]) -> Iterator[Figure]:
    rows = _rows(folder)
    yield Figure(name, "steps", float(len(rows)))
    for time_ in TIMES:
        values = [row[f"time/{time_}"] for row in rows[1:] if f"time/{time_}" in row]
        if values:
            yield Figure(name, f"{time_}, median after the first", statistics.median(values), "s")
    for metric in ("throughput/gen_tokens_per_s", "throughput/train_tokens_per_s"):
        values = [row[metric] for row in rows[1:] if metric in row]
        if values:
            yield Figure(name, metric, statistics.median(values), "tokens/s")
    for title, gib in sorted(memory.items()):
        yield Figure(name, f"GPU memory of {title}", gib, "GiB")
    try:
        books = json.loads((folder / "summary.json").read_text())["books"]
        over = books["submitted"] - books["trained"] - sum(books["dropped"].values()) - books["abandoned"]
        yield Figure(name, "rollouts missing in the books", float(over), failed=bool(over))
    except (OSError, KeyError, ValueError) as error:
        yield Figure(name, "books", said(error), failed=True)
