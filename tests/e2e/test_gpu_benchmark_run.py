"""The row of `benchmarks/gpu.py` that plays a whole run, whose server is killed, on a CPU with small sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_a_run_of_the_benchmark_outlives_its_server(tmp_path: Path) -> None:
    record = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--device", "cpu", "--json", str(record), "--rows", "failures"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = {each["name"]: each["value"] for each in json.loads(record.read_text())["rows"]["failures"]["figures"]}
    assert figures["steps"] >= 4
    assert figures["rollouts missing in the books"] == 0
    assert figures["processes left behind"] == 0
