"""All code asks for what a back end can do: nothing but the table knows one by its name, so that another can join."""

from __future__ import annotations

import ast
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import asyncrl
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.settings import BACKENDS, Backend, GenerationBackend
from asyncrl.launch.before_start import checks
from asyncrl.launch.before_start.devices import device_lines
from asyncrl.runtime.planning.plan_workers import plan_workers, with_types

ROOT = Path(asyncrl.__file__).parent
TABLE = ROOT / "inference" / "settings.py"


def comparisons(code: str) -> Iterator[int]:
    """Yield the lines that ask which back end there is."""
    if not any(name in code.lower() for name in BACKENDS):
        return
    classes = {kind.__name__ for kind in BACKENDS.values()}
    for node in ast.walk(ast.parse(code)):
        compared: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            compared = [each for side in sides for each in getattr(side, "elts", [side])]
        elif isinstance(node, ast.MatchValue):
            compared = [node.value]
        elif isinstance(node, ast.ImportFrom) and classes.intersection(alias.name for alias in node.names):
            yield node.lineno
        for each in compared:
            if ast.unparse(each).startswith("GenerationBackend.") or getattr(each, "value", None) in BACKENDS:
                yield each.lineno


@pytest.mark.parametrize(
    "line",
    [
        "ok = generation.backend == GenerationBackend.embedded",
        "ok = 'sglang' != generation.backend",
        "ok = generation.backend in (GenerationBackend.sglang,)",
        "from asyncrl.inference.settings import SGLang",
        "match backend:\n    case GenerationBackend.sglang:\n        pass",
    ],
)
def test_a_comparison_is_found(line: str) -> None:
    assert list(comparisons(line))


def test_no_code_but_the_table_compares_with_a_back_ends_name() -> None:
    files = [file for file in ROOT.rglob("*.py") if file != TABLE]
    assert len(files) > 100
    found = [f"{file}:{line}" for file in files for line in comparisons(file.read_text())]
    assert found == [], "ask `generation.engine` for what it can do"


def test_the_table_has_each_value_of_the_setting_and_its_code() -> None:
    assert list(BACKENDS) == list(GenerationBackend)
    for kind in BACKENDS.values():
        assert all(map(callable, map(pkgutil.resolve_name, filter(None, [kind.host, kind.server_check]))))
        module = pkgutil.resolve_name(kind.checks)
        assert callable(module.check)
        assert callable(module.warnings)


class Pretend(Backend):
    """A third engine, which can do no more than generate."""

    label = "Pretend"
    host = "pretend_engine:make_host"
    checks = "pretend_engine"
    memory_flag = "memory"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> ExperimentConfig:
    """The default experiment with a third back end, which is one folder and one line in the table."""
    module = ModuleType("pretend_engine")
    vars(module).update(check=lambda config: ["pretend: checked"], warnings=lambda config: ["pretend: warned"])
    monkeypatch.setitem(sys.modules, "pretend_engine", module)
    monkeypatch.setitem(BACKENDS, "pretend", Pretend)
    config = ExperimentConfig()
    vars(config.generation)["backend"] = "pretend"
    return config


def messages_of(config: ExperimentConfig) -> list[str]:
    return [message for check in checks._ROOMS for message in check(config)]


def test_another_back_end_passes_the_plan_and_every_check(config: ExperimentConfig) -> None:
    assert [plan.name for plan in plan_workers(config)] == [plan.name for plan in plan_workers(ExperimentConfig())]
    assert with_types(config).generation.dtype == with_types(ExperimentConfig()).generation.dtype
    assert messages_of(config) == [*messages_of(ExperimentConfig()), "pretend: checked"]
    assert "pretend: warned" in checks.warnings(config)
    assert any("pretend server" in line for line in device_lines(config))


def test_what_another_back_end_cannot_do_is_refused_by_its_name(config: ExperimentConfig) -> None:
    config.manager.weight_transport, config.moe.replay_routing = "tensor", True
    named = [message for message in messages_of(config) if "generation.backend='pretend'" in message]
    refused = [message.partition(":")[0] for message in named]
    assert refused == ["moe.replay_routing=True", "manager.weight_transport='tensor'"]
