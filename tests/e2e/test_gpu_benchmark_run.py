"""The rows of `benchmarks/gpu.py` that play whole runs, on a CPU with small sizes; in one the server is killed.

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
@pytest.mark.parametrize(("name", "parts", "steps"), [("runs", 2, 3), ("failures", 1, 4)])
def test_whole_runs_of_the_benchmark_end_well_and_one_outlives_its_server(
    tmp_path: Path, name: str, parts: int, steps: int
) -> None:
    rows = {row.name: row for row in gpu.ROWS}
    bench = Bench(torch.device("cpu"), tiny=True, folder=tmp_path)
    list(rows[gpu.NEEDED].measure(bench))
    measured = list(rows[name].measure(bench))
    assert not [figure for figure in measured if figure.failed]
    by_part = {
        figure.part: {each.name: each.value for each in measured if each.part == figure.part} for figure in measured
    }
    assert len(by_part) == parts
    for figures in by_part.values():
        assert float(figures["steps"]) >= steps
        assert float(figures["step_s, median after the first"]) > 0
        assert figures["rollouts missing in the books"] == 0
        assert figures["processes left behind"] == 0
