from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT_MODULES = (
    "asyncrl.commands.export",
    "asyncrl.datasets",
    "asyncrl.datasets.arithmetic",
    "asyncrl.datasets.demonstrations",
    "asyncrl.datasets.chat",
    "asyncrl.datasets.files",
    "asyncrl.datasets.mixture",
    "asyncrl.datasets.readers",
    "asyncrl.datasets.survey",
    "asyncrl.datasets.order",
    "asyncrl.datasets.prompts",
    "asyncrl.datasets.tokenizers",
    "asyncrl.envs.single_turn",
    "asyncrl.envs.retry",
    "asyncrl.rewards.arithmetic",
    "asyncrl.rewards.code_tests",
    "asyncrl.rewards.format",
    "asyncrl.rewards.length",
    "asyncrl.rewards.math_answer",
    "asyncrl.rewards.remote",
    "asyncrl.rewards.text",
    "asyncrl.rollout.offload.child",
    "asyncrl.sandbox",
    "asyncrl.agents.single_turn",
    "asyncrl.agents.retry",
)


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_the_plug_ins_of_a_rollout_worker_import_neither_torch_nor_transformers(module: str) -> None:
    program = f"import sys, {module}; sys.exit(int('torch' in sys.modules or 'transformers' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], timeout=170, check=False).returncode == 0
