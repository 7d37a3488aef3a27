from __future__ import annotations

import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import asyncrl

TEMPLATES = Path("asyncrl/launch/commands/init/project")
"""Files of a user's project."""
PLUGIN = Path("asyncrl/inference/sglang/plugin/asyncrl_pictures")
"""Imported by SGLang, and itself nothing of asyncrl."""

LIGHT_MODULES = (
    "asyncrl.launch.commands.export",
    "asyncrl.data.chat_template",
    "asyncrl.data.datasets",
    "asyncrl.data.demonstrations",
    "asyncrl.data.files",
    "asyncrl.data.prompt_format",
    "asyncrl.data.prompt_queue",
    "asyncrl.data.tokenizers",
    "asyncrl.chat.episode_client",
    "asyncrl.plugins.datasets.arithmetic",
    "asyncrl.plugins.envs.single_turn",
    "asyncrl.plugins.envs.retry",
    "asyncrl.plugins.rewards.arithmetic",
    "asyncrl.plugins.rewards.code_tests",
    "asyncrl.plugins.rewards.format",
    "asyncrl.plugins.rewards.length",
    "asyncrl.plugins.rewards.math_answer",
    "asyncrl.plugins.rewards.remote",
    "asyncrl.plugins.rewards.srpo",
    "asyncrl.plugins.rewards.text",
    "asyncrl.rollout.user_code_pool.child",
    "asyncrl.plugins.sandbox",
    "asyncrl.plugins.agents.single_turn",
    "asyncrl.plugins.agents.retry",
    "asyncrl.plugins.agents.vla",
)


def test_the_plug_ins_of_a_rollout_worker_import_neither_torch_nor_transformers() -> None:
    """One after the other in one process, which names the first that does."""
    program = f"""
import importlib, sys
for module in {LIGHT_MODULES!r}:
    importlib.import_module(module)
    if heavy := {{"torch", "transformers"}} & sys.modules.keys():
        sys.exit(f"{{module}} imports {{sorted(heavy)}}")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr


def test_a_run_of_one_turn_on_tokens_imports_nothing_that_it_does_not_ask_for() -> None:
    """The contract in pyproject.toml knows which doors there are; this sees that they are closed."""
    settings = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (each for each in settings["contracts"] if each["name"].startswith("What a setting, an agent"))
    (doctor,) = (each for each in settings["contracts"] if each["name"].startswith("The doctor is optional"))
    optional = tuple(contract["forbidden_modules"] + doctor["forbidden_modules"])
    program = f"""
import importlib, sys
for module in {contract["source_modules"]!r}:
    importlib.import_module(module)
    if asked := {{each for each in sys.modules if each.startswith({optional!r})}}:
        sys.exit(f"{{module}} imports {{sorted(asked)}}")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr


RANK = (
    "asyncrl.trainer.process",
    "asyncrl.trainer.engines.flat",
    "asyncrl.trainer.functions.actor",
    "asyncrl.trainer.functions.advantage",
    "asyncrl.algorithms.grpo",
)
"""What a rank of the default settings imports."""
OPTIONAL = (
    "asyncrl.algorithms.advantages",
    "asyncrl.algorithms.corrections",
    "asyncrl.algorithms.critic",
    "asyncrl.algorithms.kl",
    "asyncrl.algorithms.policy_losses",
    "asyncrl.models.fused_norms",
    "asyncrl.models.picture_rules",
    "asyncrl.models.pictures",
    "asyncrl.models.routing",
    "asyncrl.trainer.batches.column_moves",
    "asyncrl.trainer.engines.offload",
    "asyncrl.trainer.engines.sharded",
    "asyncrl.trainer.functions.critic",
    "asyncrl.trainer.functions.filters",
    "asyncrl.trainer.functions.frozen_models",
    "asyncrl.trainer.model.layers",
    "asyncrl.trainer.model.lora",
    "asyncrl.trainer.model.lora_checks",
    "asyncrl.trainer.model.value_models",
    "asyncrl.trainer.parallel.process_groups",
    "asyncrl.trainer.rank.profile",
    "asyncrl.trainer.rank.sample_log",
    "asyncrl.trainer.sizing",
)
"""What only settings, a model or a graph that name it bring."""


def test_a_rank_imports_no_feature_that_its_settings_do_not_name() -> None:
    program = f"""
import importlib, sys
for module in {RANK!r}:
    importlib.import_module(module)
sys.exit(", ".join(sorted(set({OPTIONAL!r}) & sys.modules.keys())) or None)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Whatever the imports are for: `TYPE_CHECKING` and imports within functions count."""
    grimp = pytest.importorskip("grimp", reason="it comes with import-linter")
    graph = grimp.build_graph("asyncrl", cache_dir=None)
    package = Path(asyncrl.__file__).parent
    subpackages = {file.parent.relative_to(package.parent) for file in package.rglob("*.py")} - {TEMPLATES, PLUGIN}
    assert {".".join(subpackage.parts) for subpackage in subpackages} <= graph.modules, (
        "without __init__.py no import contract sees a room"
    )
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert "asyncrl.config.experiment" in imported["asyncrl.config.load"]
    TopologicalSorter(imported).prepare()  # raises CycleError with the circle
