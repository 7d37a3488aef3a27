"""All code asks for what a back end can do: nothing but the table knows one by its name, so that another can join."""

from __future__ import annotations

import ast
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import asyncrl
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import settings
from asyncrl.config.setting import ConfigError, setting
from asyncrl.inference.backend import Backend, ProgramConfig
from asyncrl.inference.process import GenerationServer
from asyncrl.inference.program_host import AdoptedHost
from asyncrl.inference.settings import BACKENDS, GenerationConfig
from asyncrl.launch.before_start import setting_checks as checks
from asyncrl.launch.before_start.machine import check_reachable, device_lines
from asyncrl.manager.settings import PolicyConfig
from asyncrl.runtime.plan import plan_workers, with_types

ROOT = Path(asyncrl.__file__).parent
TABLE = ROOT / "inference" / "settings.py"
PACKAGE = "asyncrl.inference"
ALLOWED = {
    "config/aliases.py": "translates AReaL's words, which name an engine",
    "manager/settings.py": "help of two settings, for readers who look for an engine's name",
    "plugins/rewards/srpo.py": "`embedded` is a method of an encoder",
    "reference.py": "one process with the engine that is made of torch",
}
"""Files that may name a back end, and why."""


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
            if getattr(each, "value", None) in BACKENDS:
                yield each.lineno


def names(code: str, *, texts: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the lines that name a back end, with its name: an attribute, an import, with `texts` a setting in one."""
    if not any(name in code for name in BACKENDS):
        return
    tree = ast.parse(code)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        for name in BACKENDS if isinstance(node, ast.expr | ast.stmt) else ():
            match node:
                case ast.Attribute(attr=attr):
                    found = attr == name
                case ast.Import() | ast.ImportFrom():
                    package = f"{PACKAGE}.{name}"
                    reported = [alias.name for alias in node.names]
                    if isinstance(node, ast.ImportFrom):
                        reported = [node.module or "", *(f"{node.module}.{alias}" for alias in reported)]
                    found = any(f"{module}.".startswith(f"{package}.") for module in reported)
                case ast.Constant(value=str() as text) if texts and id(node) not in docstrings:
                    found = f"generation.{name}." in text or f"backend={name}" in text or f"{PACKAGE}.{name}" in text
                case _:
                    found = False
            if found:
                yield node.lineno, name


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("python = config.generation.sglang.python", "sglang"),
        ("python = config.generation.embedded", "embedded"),
        ("from asyncrl.inference.sglang.host import SGLangHost", "sglang"),
        ("from asyncrl.inference import embedded", "embedded"),
        ("import asyncrl.inference.sglang", "sglang"),
        ("said = f'generation.sglang.args.{key}: no'", "sglang"),
        ("said = 'use generation.backend=embedded'", "embedded"),
        ("host = 'asyncrl.inference.sglang.host:make'", "sglang"),
    ],
)
def test_a_name_is_found(line: str, name: str) -> None:
    assert [found for _, found in names(line)] == [name]


def test_no_code_but_a_back_ends_own_and_the_table_names_it() -> None:
    """A back end's own messages may advise another one."""
    found = []
    for file in ROOT.rglob("*.py"):
        where = file.relative_to(ROOT).as_posix()
        if where in ALLOWED or file == TABLE:
            continue
        own = next((name for name in BACKENDS if where.startswith(f"inference/{name}/")), "")
        found += [f"{file}:{line} {name}" for line, name in names(file.read_text(), texts=not own) if name != own]
    assert found == [], "ask `generation.engine`, whose `named` has the names of its settings"


def test_each_exception_is_needed() -> None:
    assert [where for where in ALLOWED if not any(names((ROOT / where).read_text()))] == []


@pytest.mark.parametrize(
    "line",
    [
        "ok = generation.backend == 'embedded'",
        "ok = 'sglang' != generation.backend",
        "ok = generation.backend in ('sglang',)",
        "from asyncrl.inference.sglang.backend import SGLang",
        "match backend:\n    case 'sglang':\n        pass",
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
    (choices,) = (info.choices for path, _, info in settings(GenerationConfig) if path == "backend")
    assert choices == tuple(BACKENDS)
    for kind in BACKENDS.values():
        code = filter(None, [kind.host, kind.checks, kind.server_check])
        assert all(map(callable, map(pkgutil.resolve_name, code)))


class Pretend(Backend):
    """A third engine, which can do no more than generate."""

    label = "Pretend"
    host = "pretend_engine:make_host"
    checks = "pretend_engine:check"
    memory_flag = "memory"


class PretendProgram(Pretend):
    """One that is a program of its own."""

    package = "pretend_package"


CHOICES = (*BACKENDS, "pretend")


@dataclass
class WithPretend(GenerationConfig):
    """Settings once the table has a third line."""

    backend: str = setting("pretend", choices=CHOICES)


@dataclass
class WithPretendProgram(WithPretend):
    """Settings with the field of a third program."""

    pretend: ProgramConfig = field(default_factory=ProgramConfig)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> ExperimentConfig:
    """An experiment with a third back end, which is one folder and one line in the table."""
    module = ModuleType("pretend_engine")
    vars(module)["check"] = lambda config: ["pretend: checked"]
    monkeypatch.setitem(sys.modules, "pretend_engine", module)
    monkeypatch.setitem(BACKENDS, "pretend", Pretend)
    return ExperimentConfig(generation=WithPretend())


@pytest.fixture
def program(config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch) -> ProgramConfig:
    """The settings of the third back end, as a program of its own."""
    monkeypatch.setitem(BACKENDS, "pretend", PretendProgram)
    config.generation = generation = WithPretendProgram()
    return generation.pretend


def messages_of(config: ExperimentConfig) -> list[str]:
    return [message for check in checks._CHECKS for message in check(config)]


def test_another_back_end_passes_the_plan_and_every_check(config: ExperimentConfig) -> None:
    assert [plan.name for plan in plan_workers(config)] == [plan.name for plan in plan_workers(ExperimentConfig())]
    assert with_types(config).generation.dtype == with_types(ExperimentConfig()).generation.dtype
    assert messages_of(config) == [*messages_of(ExperimentConfig()), "pretend: checked"]
    assert any("pretend server" in line for line in device_lines(config))


def test_what_another_back_end_cannot_do_is_refused_by_its_name(config: ExperimentConfig) -> None:
    config.manager.weight_transport, config.moe.replay_routing = "tensor", True
    named = [message for message in messages_of(config) if "generation.backend='pretend'" in message]
    refused = [message.partition(":")[0] for message in named]
    assert refused == ["manager.weight_transport='tensor'", "moe.replay_routing=True"]


def test_messages_on_another_program_name_its_own_settings(config: ExperimentConfig, program: ProgramConfig) -> None:
    program.urls, config.generation.colocated = ["http://127.0.0.1:9", "no address"], "all"
    config.policies = [PolicyConfig("judge", path="/models/judge"), PolicyConfig("other", url="http://127.0.0.1:9")]
    reported = [message for message in messages_of(config) if ".urls" in message]
    assert len(reported) == 4
    assert all("generation.pretend.urls" in message for message in reported)


def test_servers_of_an_engine_that_is_not_chosen_are_refused(config: ExperimentConfig, program: ProgramConfig) -> None:
    config.generation.backend, program.urls = "embedded", ["http://127.0.0.1:9"]
    reported = [message for message in messages_of(config) if "urls" in message]
    assert reported == [
        "generation.pretend.urls=['http://127.0.0.1:9']: servers of Pretend, which generation.backend='embedded' does "
        "not use; set generation.backend=pretend, or leave them out"
    ]


def test_another_programs_interpreter_is_asked_for_its_package(
    config: ExperimentConfig, program: ProgramConfig
) -> None:
    program.python = sys.executable
    with pytest.raises(ConfigError, match=r"generation\.pretend\.python=.*: pretend_package is not installed"):
        check_reachable(config)


def test_another_programs_ranks_are_its_tensor_axis(config: ExperimentConfig, program: ProgramConfig) -> None:
    program.tensor_parallel = 3
    shape = config.generation.engine.shape
    assert (shape.gpus, shape.settings) == (3, "generation.pretend.tensor_parallel=3")


def test_an_adopted_server_is_the_same_for_every_back_end(config: ExperimentConfig, program: ProgramConfig) -> None:
    program.urls, config.model.path = ["http://127.0.0.1:9/"], "/models/one"
    server = object.__new__(GenerationServer)
    vars(server).update(config=config, spec=SimpleNamespace(index=0), http_security=None)
    assert isinstance(server._make_host(), AdoptedHost)
