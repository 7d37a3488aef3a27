"""A run on a generation back end of somebody else's: `own_backend.py` knows of asyncrl the documented endpoints
alone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..conftest import LIMIT_S
from ..warm import Template
from .clusters import await_that

pytestmark = pytest.mark.slow


@pytest.fixture
def backend(tiny_model: Path, tmp_path: Path, template: Template | None) -> Iterator[tuple[str, Path]]:
    """Its address, and the file of its weight updates."""
    output, start = tmp_path / "backend.log", subprocess.Popen if template is None else template.popen
    with output.open("wb") as file:
        process = start(
            [sys.executable, "-m", "tests.e2e.own_backend", str(tiny_model)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def addresses() -> list[str]:
        return re.findall(r"^http://\S+$", output.read_text(), re.MULTILINE)

    try:
        await_that(lambda: bool(addresses() or process.poll() is not None), f"address in {output}", LIMIT_S)
        (address,) = addresses()
        yield address, output
    finally:
        process.kill()
        process.wait(LIMIT_S)


@pytest.mark.parametrize("mode", ["interrupt", "in_place"])
def test_a_run_trains_on_a_server_that_knows_only_the_documented_endpoints(
    start_run: Any, backend: tuple[str, Path], mode: str
) -> None:
    url, errors = backend
    run = start_run(
        total_train_steps=4,
        generation__backend="sglang",
        generation__sglang__urls=f"[{url}]",
        generation__max_running_requests=None,
        manager__update_mode=mode,
        eval__interval=2,
    )
    assert run.wait() == 0, run.output + run.logs() + errors.read_text()
    rows = run.rows()
    assert [row["policy_version"] for row in rows] == [1, 2, 3, 4]
    assert max(row["ppo/engine_gap_max"] for row in rows if "ppo/engine_gap_max" in row) < 1e-4, "token-exact"
    assert max(row["staleness/max"] for row in rows) <= 2
    counts = run.summary()["books"]
    assert counts["trained"] == 4 * 4
    assert counts["submitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["abandoned"]
    assert json.loads((run.run_dir / "weights" / "actor" / "v4" / "manifest.json").read_text())
