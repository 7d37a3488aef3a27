"""`benchmarks/gpu.py` on a CPU with small sizes: each row works, so that it does on the first GPU that it sees."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.inference import checks
from asyncrl.runtime.process import hardware
from asyncrl.weights.transports import TRANSPORTS, distributed
from asyncrl.weights.transports.base import weight_transport

from ..conftest import SGLANG_ENV

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu  # noqa: E402
from gpu_rows import machine, sglang_server  # noqa: E402
from gpu_rows.bench import Bench, Figure, LeftOut, one_line  # noqa: E402

SGLANG_PYTHON = os.environ.get("ASYNCRL_SGLANG_PYTHON")


@pytest.mark.slow
def test_every_row_works_on_a_cpu_and_measures_what_the_targets_are_of(tmp_path: Path, warm_python: str) -> None:
    command = [warm_python, str(BENCHMARKS / "gpu.py"), "--tiny", "--device", "cpu", "--log", str(tmp_path / "log")]
    environment = {name: value for name, value in os.environ.items() if name != "ASYNCRL_SGLANG_PYTHON"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows, _, targets = done.stdout.partition("targets")
    assert re.findall(r"^(\w+): ", rows, re.MULTILINE) == [row.name for row in gpu.ROWS]
    assert "left out: no SGLang" in rows
    measured = {
        line.split("  ")[1] for line in targets.splitlines() if "not measured" not in line and "target " in line
    }
    assert measured == {target.name for target in gpu.TARGETS if not all_of_sglang(target)}


def all_of_sglang(target: gpu.Target) -> bool:
    """True if every way to the target needs a real server."""
    return all(any(row == "sglang" for row, _ in variant) for variant in target.variants.values())


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.skipif(SGLANG_PYTHON is None, reason="ASYNCRL_SGLANG_PYTHON names no interpreter with SGLang")
def test_a_real_server_is_measured_and_serves_the_weights_of_each_transport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = sglang_server.settings

    def settings(bench: Bench, dtype: Dtype) -> ExperimentConfig:
        config = made(bench, dtype)
        config.generation.sglang.env |= SGLANG_ENV
        return config

    monkeypatch.setattr(sglang_server, "settings", settings)
    bench = Bench(torch.device("cpu"), tiny=True, folder=tmp_path, sglang=SGLANG_PYTHON, log=tmp_path / "log")
    bench.figures["machine"] = {"memory bandwidth": 10.0}
    list(machine.model(bench))
    found = list(sglang_server.sglang(bench))
    assert not [figure for figure in found if figure.failed], (tmp_path / "log").read_text()[-5000:]
    assert "left out" not in {figure.name for figure in found}
    values = {figure.key: figure.value for figure in found}
    for target in gpu.TARGETS:
        for terms in target.variants.values():
            assert all(name in values for row, name in terms if row == "sglang"), target.name
    for part in ("agreement", *(f"update by {name}" for name in TRANSPORTS)):
        assert float(values[f"{part}: worst distance"]) < 1e-5, part
    assert not [command for command in commands_below() if "sglang" in command]


def commands_below() -> list[str]:
    """Command lines of the running processes below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie, which has none
            found.append(" ".join(process.cmdline()))
    return found


@pytest.mark.parametrize("gpus", [["0"], ["0", "1"]])
def test_a_server_is_on_the_gpu_that_a_run_would_give_it_and_one_gpu_has_no_nccl_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[str]
) -> None:
    for name in gpus:
        (tmp_path / "gpus" / name).mkdir(parents=True)
    monkeypatch.setattr(hardware, "_GPUS", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(distributed, "installed", lambda python: None)
    bench = Bench(torch.device("cuda"), tiny=True, folder=tmp_path, sglang=sys.executable)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = sglang_server.settings(bench, Dtype.bfloat16)
    assert config.generation.sglang.env == {"CUDA_VISIBLE_DEVICES": gpus[-1]}
    assert [*checks.gpu_problems(config)] == []
    for transport in TRANSPORTS:
        config.manager.weight_transport = transport
        problems = list(weight_transport(transport).check(config))
        assert bool(problems) == (transport == "distributed" and len(gpus) == 1), problems


def test_the_limits_of_all_rows_are_less_than_half_an_hour() -> None:
    assert sum(row.limit_s for row in gpu.ROWS) <= gpu.BUDGET_S


def raises(bench: Bench) -> Iterator[Figure]:
    """Figures of a row that fails, and leaves files."""
    (bench.folder / "version").mkdir()
    (bench.memory / "checkpoint").touch()
    yield Figure("", "first", 1.0)
    raise ValueError("no such kernel")


def dies(_: Bench) -> Iterator[Figure]:
    yield Figure("", "first", 1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(_: Bench) -> Iterator[Figure]:
    yield Figure("", "first", 1.0)
    time.sleep(600)


@pytest.mark.parametrize(
    ("measure", "limit_s", "reason"),
    [(raises, 60, "ValueError: no such kernel"), (dies, 60, "exit code -9"), (hangs, 0.5, "longer than 5 s")],
)
def test_a_row_that_fails_keeps_what_it_has_and_says_why(
    tmp_path: Path, measure: Any, limit_s: float, reason: str
) -> None:
    bench = Bench(torch.device("cpu"), tiny=True, folder=tmp_path, memory=tmp_path)
    first, last = gpu.measured(gpu.Row("broken", limit_s, measure), bench)
    assert (first.key, first.value) == ("first", 1.0)
    assert last.failed
    assert reason in str(last.value)


def test_a_command_that_is_ended_leaves_no_process_of_a_row(tmp_path: Path) -> None:
    coming = gpu.measured(gpu.Row("hangs", 60, hangs), Bench(torch.device("cpu"), tiny=True, folder=tmp_path))
    next(coming)
    assert multiprocessing.active_children()
    coming.close()
    assert not multiprocessing.active_children()


def test_what_has_no_room_is_left_out(tmp_path: Path) -> None:
    bench = Bench(torch.device("cpu"), tiny=True, folder=tmp_path)
    bench.need_space(tmp_path, 1)
    with pytest.raises(LeftOut, match=r"has room for .* GiB, and 1073741824\.0 GiB are written"):
        bench.need_space(tmp_path, 1 << 60)


def test_an_error_is_said_with_its_end_where_the_cause_is() -> None:
    assert one_line(ValueError("no kernel")) == "ValueError: no kernel"
    log = "SGLang ended; the end of its log:\nline\nline\nthe first error in its log: OutOfMemoryError\nlower it"
    assert one_line(RuntimeError(log)) == (
        "RuntimeError: SGLang ended; the end of its log: | the first error in its log: OutOfMemoryError | lower it"
    )


def met(bench: Bench) -> Iterator[Figure]:
    """Figures of a row that works."""
    yield Figure("", "speed", 1.0)
    yield Figure("", "before", bench.earlier("broken", "first") or 0.0)
    assert not [*bench.folder.iterdir(), *bench.memory.iterdir()]


def test_a_row_that_fails_is_printed_and_the_next_begins_and_the_targets_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "ROWS", (gpu.Row("broken", 60, raises), gpu.Row("works", 60, met)))
    targets = [
        gpu.Target("fast", {"": (("works", "speed"),)}, 0.5, at_least=True),
        gpu.Target("small", {"": (("works", "speed"), ("works", "before"))}, 0.5),
        gpu.Target("share", {"": (("works", "speed"),)}, 2.0, over=("broken", "first")),
        gpu.Target("agrees", {"": (("broken", "second"),)}, 1.0),
        gpu.Target("best", {"a": (("works", "speed"), ("works", "before")), "b": (("works", "speed"),)}, 1.0),
    ]
    monkeypatch.setattr(gpu, "TARGETS", targets)
    log = tmp_path / "gpu.log"
    command = ["gpu.py", "--tiny", "--device", "cpu", "--log", str(log), "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert gpu.main() == 1
    printed = capsys.readouterr().out
    rows = printed.partition("targets")[0]
    figures = re.findall(r"^    (first|speed|before|FAILED: ValueError: no such kernel)(?: +1 )?$", rows, re.MULTILINE)
    assert figures == ["first", "FAILED: ValueError: no such kernel", "speed", "before"], printed
    verdicts = [line.split()[-1] for line in printed.split("targets")[1].splitlines()[1:6]]
    assert verdicts == ["met", "MISSED", "met", "1.0", "(b)"], printed
    assert "agrees" in printed
    assert "not measured" in printed
    assert "1 failed" in printed
    assert "ValueError: no such kernel" in log.read_text()
