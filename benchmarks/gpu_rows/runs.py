"""Whole runs, in which trainer and server share the GPU: steps, idle time, memory; and some that fail."""

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from asyncrl.observe.history import History
from asyncrl.runtime.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from gpu_rows import machine
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
TOO_MUCH = 1 << 50
"""Bytes that no device has; the allocator of the device refuses them as it refuses any that it has not."""
LOSS = f"""
import torch

from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.policy_losses import reinforce

calls = 0


def large(inputs: PolicyLossInputs) -> PolicyLossOutput:
    global calls
    calls += 1
    if calls > 6:
        torch.empty({TOO_MUCH}, dtype=torch.uint8, device=inputs.logprobs_T.device)
    return PolicyLossOutput(reinforce(inputs).loss_T, inputs.mask_T)
"""
LARGE_SERVER = f"""
import sys

if "generation_server" in sys.orig_argv:
    import torch

    from asyncrl.inference.embedded.scheduler import DecodeBatch

    calls, step = [], DecodeBatch.step

    def large(self):
        calls.append(1)
        if len(calls) == 12:
            torch.empty({TOO_MUCH}, dtype=torch.uint8, device=self.runner.device)
        return step(self)

    DecodeBatch.step = large
"""
"""A `sitecustomize` by which the embedded engine runs out of memory once."""
IN_SMALL_MEMORY = """
import os, subprocess, sys

subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={sys.argv[1]}", "tmpfs", "/dev/shm"], check=True)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
SMALL_MEMORY = "256k"
"""Size of a /dev/shm without room for the small model's in-memory checkpoint."""
FAILURE_S = 80.0
"""Longest that the runs of the small model may take."""
SHORTAGES = 3
TIMES = ("step_s", "train_s", "wait_for_batch_s", "publish_s", "memory_checkpoint_s", "generation_idle_s")


def runs(bench: Bench) -> Iterator[Figure]:
    """Runs with the staleness bounds 0 and 4."""
    for staleness in (0, 4):
        yield from tried(bench, f"eta {staleness}", partial(_run, bench, f"eta {staleness}", staleness, kill=False))


def failures(bench: Bench) -> Iterator[Figure]:
    """Runs that run out of memory, in the trainer, the server and /dev/shm; and one whose server is killed goes on.

    All at once: most of the time their processes start.
    """
    with contextlib.ExitStack() as ending:
        small, shortages = _small(bench), [*_shortages(bench)]
        runs = [(each, _begin(small, each, ending), time.time()) for each in shortages]
        ends = time.monotonic() + FAILURE_S * bench.size(1, 10)
        yield from tried(bench, "server killed", partial(_run, bench, "server killed", 4, kill=True))
        for shortage, process, begun in runs:
            yield from tried(bench, shortage.name, partial(_ended, small, shortage, process, begun, ends))
        if len(runs) < SHORTAGES:
            yield Figure("/dev/shm full", "left out", "a small one can only be mounted by root")


@dataclass(frozen=True)
class _Shortage:
    """A run of the small model in which `process` runs out of memory; "": the launch remarks that /dev/shm is full."""

    name: str
    process: str
    ends: int = EXIT_OK
    settings: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""
    before: Sequence[str] = ()


def _small(bench: Bench) -> Bench:
    """The same with the small model, in a folder of its own."""
    root = bench.folder / "small"
    root.mkdir()
    for _ in machine.model(replace(bench, tiny=True, folder=root, device=torch.device("cpu"))):
        pass
    return replace(bench, tiny=True, folder=root, sglang=None)


def _shortages(bench: Bench) -> Iterator[_Shortage]:
    root = bench.folder / "small"
    (root / "losses.py").write_text(LOSS)
    loss = {"algorithm.policy_loss.name": f"{root / 'losses.py'}:large"}
    yield _Shortage("trainer out of memory", "model_worker/0", EXIT_FAILED, loss)
    (root / "server").mkdir()
    (root / "server" / "sitecustomize.py").write_text(LARGE_SERVER)
    yield _Shortage("server out of memory", "generation_server/0", module="server")
    if not subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        mounted = ("unshare", "--mount", sys.executable, "-c", IN_SMALL_MEMORY, SMALL_MEMORY)
        yield _Shortage("/dev/shm full", "", before=mounted)


def _begin(bench: Bench, shortage: _Shortage, ending: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    root = _folder_of(bench, shortage.name)
    settings = _settings(bench, root, 4, 6, shortage.settings)
    python = os.pathsep.join(filter(None, [str(bench.folder / shortage.module), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [*(shortage.before or [sys.executable]), "-m", "asyncrl.launch", "own_model", *settings],
        stdout=(root / "output").open("wb"),
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": python},
    )
    ending.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what still runs of a run."""
    if process.poll() is None:
        launcher = psutil.Process(process.pid)
        for each in (*launcher.children(recursive=True), launcher):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def _ended(
    bench: Bench, shortage: _Shortage, process: subprocess.Popen[bytes], begun: float, ends: float
) -> Iterator[Figure]:
    """What the run showed and how it ended; one that went on did so to its last step."""
    root = _folder_of(bench, shortage.name)
    code = process.wait(max(1.0, ends - time.monotonic()))
    yield Figure(shortage.name, "ended after", (root / "output").stat().st_mtime - begun, "s")
    lines = (root / "output").read_text(errors="replace").splitlines()
    if code != shortage.ends:
        raise RuntimeError(f"the run ended with {code}: {' | '.join(lines[-4:])}")
    history = History(root / "gpu" / "run")
    short = history.processes[shortage.process].last.get("shortage") if shortage.process else None
    told = history.remarks if short is None else [short["what"], short["advice"]]
    if not told or (shortage.process and short is None):
        raise RuntimeError(f"the run did not say what it lacked: {' | '.join(lines[-4:])}")
    yield Figure(shortage.name, "said", " ".join(told))
    if shortage.ends == EXIT_OK:
        yield Figure(shortage.name, "went on, steps", float(len(_rows(root / "gpu" / "run"))))


def _run(bench: Bench, name: str, staleness: int, *, kill: bool) -> Iterator[Figure]:
    root = _folder_of(bench, name)
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


def _folder_of(bench: Bench, name: str) -> Path:
    folder = bench.folder / name.replace(" ", "_").replace("/", "_")
    folder.mkdir(exist_ok=True)
    return folder


def _settings(
    bench: Bench, root: Path, staleness: int, steps: int, further: Mapping[str, Any] | None = None
) -> list[str]:
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
    return [f"{name}={value}" for name, value in (settings | dict(further or {})).items()]


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
