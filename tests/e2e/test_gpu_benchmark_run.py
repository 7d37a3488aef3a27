"""The rows of `benchmarks/gpu.py` that play whole runs, on a CPU with small sizes; in some something fails.

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
    """Its runs are forked from the template, but those in an environment or a mount of their own."""
    start = subprocess.Popen

    def popen(command: list[str], *, stdout: IO[bytes], stderr: int, env: dict[str, str] | None = None) -> Any:
        assert template is not None
        if env is not None:
            return start(command, stdout=stdout, stderr=stderr, env=env)
        return template.popen(command, stdout=stdout, stdin=subprocess.DEVNULL, stderr=stderr, start_new_session=True)

    if template is not None:
        names = {name: getattr(subprocess, name) for name in ("STDOUT", "SubprocessError", "run")}
        monkeypatch.setattr(runs, "subprocess", SimpleNamespace(Popen=popen, **names))


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("name", "parts", "steps"), [("runs", 2, 3), ("failures", 4, 4)])
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
    if name == "failures":
        _check_shortages({part: by_part.pop(part) for part in [*by_part] if part != "server killed"})
    for figures in by_part.values():
        assert float(figures["steps"]) >= steps
        assert float(figures["step_s, median after the first"]) > 0
        assert figures["rollouts missing in the books"] == 0
        assert figures["processes left behind"] == 0


def _check_shortages(by_part: dict[str, dict[str, float | str]]) -> None:
    trainer, server = by_part.pop("trainer out of memory"), by_part.pop("server out of memory")
    assert "out of memory: model_worker/0 on the CPU in call 'actor_train' (role 'actor') of step " in str(
        trainer["said"]
    )
    assert "out of memory: the embedded engine on the CPU in a step: " in str(server["said"])
    assert all("to need less memory, in this order: " in str(each["said"]) for each in (trainer, server))
    (memory,) = by_part.values()
    if "left out" not in memory:  # not root
        assert "No space left on device" in str(memory["said"])
        assert memory["went on, steps"] == server["went on, steps"] == 6
