"""The cost benchmark covers every algorithm and writes what it measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from asyncrl.config.plugin_code.catalog import known


@pytest.mark.slow
def test_the_quick_benchmark_measures_every_loss_correction_and_advantage(tmp_path, warm_python):
    script = Path(__file__).parents[3] / "benchmarks" / "losses.py"
    target = tmp_path / "losses.json"
    subprocess.run([warm_python, script, "--quick", "--json", target], check=True, timeout=600, capture_output=True)
    rows = {row["name"]: row for row in json.loads(target.read_text())["rows"]}
    for kind in ("policy_loss", "correction", "value_loss", "advantage"):
        for name in known(kind):
            assert rows[f"{kind} {name}"]["ratios"].keys() == {"17", "512"}
            assert rows[f"{kind} {name}"]["peak_mib"] > 0
