"""Whole runs of the tool agent on a small model that has learnt the form of a call, and little else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

STEPS = 2
HOSTILE = """
import os
import time


def calculator(expression: str) -> str:
    fate = sum(map(ord, expression)) % 4
    if fate == 0:
        os._exit(3)
    if fate == 1:
        raise ValueError("boom")
    if fate == 2:
        time.sleep(3600)
    return "1"
"""


@pytest.fixture(scope="session")
def calling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes calls with wrong digits in them."""
    from asyncrl.config.load import load_supervised
    from asyncrl.trainer.supervised.settings import SFTPhaseConfig
    from asyncrl.trainer.supervised.supervised_loop import make_base_model

    config = load_supervised("tool_calculator_base")
    config.model.architecture |= {"hidden_size": 48, "intermediate_size": 96}
    config.batch_size, config.warmup_steps = 16, 10
    config.phases = [SFTPhaseConfig(steps=120, args={"seed": 1001, "num_rows": 48})]
    return make_base_model(config, tmp_path_factory.mktemp("calling") / "model")


def finished(start_run: Any, experiment: str, model: Path, **overrides: Any) -> list[dict[str, float]]:
    own = {
        "experiment_name": experiment,
        "model__path": model,
        "reward__path": "asyncrl.plugins.rewards.format:FormatReward",
        "reward__args": "{pattern: 'It is -?[0-4].*'}",
        "max_head_offpolicyness": 1,
        "total_train_steps": STEPS,
        "group_size": 4,  # of two, all groups of these few steps may happen to agree
        "rollout__sampling__max_new_tokens": 64,
        "dataset__max_prompt_tokens": 64,
        "generation__max_total_tokens": 8192,
        "eval__interval": STEPS,
    }
    run = start_run(experiment, **(own | overrides))
    assert run.wait() == 0, run.output + run.logs()
    rows: list[dict[str, float]] = run.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["eval/held_out/tool/calculator/calls"] > 0
    assert rows[-1]["eval/held_out/agent/turns"] > 1
    assert run.summary()["eval"]["held_out"]["chat/calls"] > 1
    return rows


@pytest.mark.parametrize("experiment", ["tool_calculator", "tool_function", "tool_mcp"])
def test_the_examples_call_their_tool_and_train(start_run: Any, calling_model: Path, experiment: str) -> None:
    if experiment == "tool_mcp":
        pytest.importorskip("mcp")
    rows = finished(start_run, experiment, calling_model)
    assert all(row["tool/calculator/calls"] > 0 for row in rows)
    assert any(row["tool/calculator/errors"] < row["tool/calculator/calls"] for row in rows)
    assert all(row["agent/turns"] > 1 for row in rows)
    assert sum(row["optimizer/steps"] for row in rows) > 0


def test_a_hostile_tool_costs_calls_and_never_the_run(start_run: Any, calling_model: Path, tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    path = tmp_path / "hostile.py"
    tools = f"[{{path: '{path}:calculator', run_in: process, timeout_s: 0.5}}]"
    few = {"group_size": 2, "eval__size": 4}  # most calls cost a process
    rows = finished(start_run, "tool_calculator", calling_model, tools=tools, **few)
    assert all(0 < row["tool/calculator/errors"] <= row["tool/calculator/calls"] for row in rows)
