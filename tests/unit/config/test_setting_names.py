"""Every setting that the doctor, hints, errors and pages name exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config.load import SCHEMAS, settings

ROOT = Path(__file__).resolve().parents[3]
KNOWN = {path: kind for schema in SCHEMAS.values() for path, kind, _ in settings(schema)}
GROUPS = sorted({path.partition(".")[0] for path in KNOWN if "." in path})
NAME = re.compile(rf"(?<![\w./:\[\]-])(?:{'|'.join(GROUPS)})(?:\.[a-z_][a-z0-9_]*)+(?![\w(])")
NO_SETTINGS = {
    "agent.py": "a file of a new project",
    "reward.py": "a file of a new project",
    "samples.md": "a page",
    "agent.harness.id": "a setting of verifiers",
    "agent.runtime.type": "a setting of verifiers",
    "env.reset": "a method",
    "generation.engine": "an attribute",
    "env.step": "a method",
    "model.generate": "a method",
    "rollout.age": "an attribute",
    "rollout.rewards": "an attribute",
    "manager.fleet": "a package",
    "trainer.model.layout_parity": "a package",
    "model.layers": "names of a model's weights",
    "model.norm.weight": "names of a model's weights",
    "model.safetensors": "a file of a model",
    "model.safetensors.index.json": "a file of a model",
}
ELSEWHERE = ("asyncrl/config/aliases.py", "docs/coming_from.md")
"""Have the settings of other systems; test_aliases.py looks at asyncrl's in them."""


def texts(file: Path) -> Iterator[str]:
    """Yield the texts of a page, or the strings of a module: messages, help, docstrings."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        yield text
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def exists(name: str) -> bool:
    """Return True for a setting, a group of settings, and an entry of a mapping or of a list's items."""
    in_free_form = any(name.startswith(f"{path}.") and ("dict" in str(kind)) for path, kind in KNOWN.items())
    return name in KNOWN or in_free_form or any(path.startswith(f"{name}.") for path in KNOWN)


FILES = [
    file
    for file in (*sorted(ROOT.glob("asyncrl/**/*.py")), *sorted(ROOT.glob("docs/*.md")), ROOT / "README.md")
    if str(file.relative_to(ROOT)) not in ELSEWHERE
]


def test_every_setting_that_a_message_or_page_names_exists() -> None:
    named = {(match[0], str(file)) for file in FILES for text in texts(file) for match in NAME.finditer(text)}
    assert len({name for name, _ in named} & KNOWN.keys()) > 150
    assert {(name, file) for name, file in named if not exists(name) and name not in NO_SETTINGS} == set()
    assert NO_SETTINGS.keys() <= {name for name, _ in named}, "an exception that nothing needs"


@pytest.mark.parametrize(("name", "known"), [("algorithm.entropy_bonus", False), ("algorithm.entropy_coef", True)])
def test_a_name_that_does_not_exist_is_found(name: str, known: bool) -> None:
    assert NAME.fullmatch(name)
    assert exists(name) == known
