"""`benchmarks/gpu.py` on a CPU with small sizes: each row works, so that it does on the first GPU that it sees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu  # noqa: E402
from gpu_rows.bench import Bench, Figure  # noqa: E402

WHOLE_RUNS = {"runs", "failures"}
"""Played by tests/e2e/test_gpu_benchmark_run.py."""


def table(python: str, tmp_path: Path, rows: list[str]) -> dict[str, Any]:
    """The record of the command on these rows."""
    record = tmp_path / "gpu.json"
    command = [python, str(BENCHMARKS / "gpu.py"), "--tiny", "--device", "cpu", "--json", str(record)]
    environment = {name: value for name, value in os.environ.items() if name != "ASYNCRL_SGLANG_PYTHON"}
    done = subprocess.run([*command, "--rows", *rows], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(record.read_text())["rows"]
    return found


@pytest.mark.slow
def test_every_row_works_on_a_cpu_and_measures_what_the_targets_are_of(tmp_path: Path, warm_python: str) -> None:
    asked = [row.name for row in gpu.ROWS if row.name not in WHOLE_RUNS]
    found = table(warm_python, tmp_path, asked)
    assert list(found) == asked
    names = {row: {Figure(**each).key for each in found[row]["figures"]} for row in found}
    assert names["sglang"] == {"left out"}
    for target in gpu.TARGETS:
        for row, name in (*target.terms, *([target.over] if target.over else [])):
            assert row == "sglang" or name in names[row], target.name


def test_the_limits_of_all_rows_are_less_than_half_an_hour() -> None:
    assert sum(row.limit_s for row in gpu.ROWS) <= gpu.BUDGET_S


def raises(_: Bench) -> Iterator[Figure]:
    """Figures of a row that fails."""
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
    bench = Bench(torch.device("cpu"), tiny=True, folder=tmp_path)
    first, last = gpu.measured(gpu.Row("broken", limit_s, measure), bench)
    assert (first.key, first.value) == ("first", 1.0)
    assert last.failed
    assert reason in str(last.value)


def met(bench: Bench) -> Iterator[Figure]:
    """Figures of a row that works."""
    yield Figure("", "speed", 1.0)
    yield Figure("", "before", bench.earlier("broken", "first") or 0.0)


def test_a_row_that_fails_is_saved_and_the_next_begins_and_the_targets_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu, "ROWS", (gpu.Row("broken", 60, raises), gpu.Row("works", 60, met)))
    targets = [
        gpu.Target("fast", (("works", "speed"),), 0.5, at_least=True),
        gpu.Target("small", (("works", "speed"), ("works", "before")), 0.5),
        gpu.Target("share", (("works", "speed"),), 2.0, over=("broken", "first")),
        gpu.Target("agrees", (("broken", "second"),), 1.0),
    ]
    monkeypatch.setattr(gpu, "TARGETS", targets)
    command = ["gpu.py", "--tiny", "--device", "cpu", "--json", str(record), "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert gpu.main() == 1
    rows = json.loads(record.read_text())["rows"]
    assert [figure["failed"] for figure in rows["broken"]["figures"]] == [False, True]
    assert [figure["value"] for figure in rows["works"]["figures"]] == [1.0, 1.0]
    printed = capsys.readouterr().out
    verdicts = [line.split()[-1] for line in printed.split("targets")[1].splitlines()[1:5]]
    assert verdicts == ["met", "MISSED", "met", "1.0"], printed
    assert "agrees" in printed
    assert "not measured" in printed
    assert "1 failed" in printed
