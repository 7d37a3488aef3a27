"""The row of `benchmarks/gpu.py` that plays a whole run, whose server is killed, on a CPU with small sizes.

That rows are measured by the command and written down, `tests/integration/test_gpu_benchmark.py` shows.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch

from ..warm import Template

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
from gpu_rows import runs
from gpu_rows.bench import Bench


@pytest.fixture
def forked(template: Template | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run is forked from the template."""

    def popen(command: list[str], *, stdout: IO[bytes], stderr: int) -> Any:
        assert template is not None
        return template.popen(command, stdout=stdout, stdin=subprocess.DEVNULL, stderr=stderr, start_new_session=True)

    if template is not None:
        names = {name: getattr(subprocess, name) for name in ("STDOUT", "SubprocessError", "run")}
        monkeypatch.setattr(runs, "subprocess", SimpleNamespace(Popen=popen, **names))


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_run_of_the_benchmark_outlives_its_server(tmp_path: Path) -> None:
    rows = {row.name: row for row in gpu.ROWS}
    bench = Bench(torch.device("cpu"), tiny=True, folder=tmp_path)
    list(rows[gpu.NEEDED].measure(bench))
    measured = list(rows["failures"].measure(bench))
    assert not [figure for figure in measured if figure.failed]
    figures = {figure.name: figure.value for figure in measured}
    assert figures["steps"] >= 4
    assert figures["rollouts missing in the books"] == 0
    assert figures["processes left behind"] == 0
