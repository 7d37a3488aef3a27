"""docs/walkthrough.md and docs/architecture.md name files and functions that exist; the routes stay short."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "walkthrough.md").read_text()
NAMED = re.compile(r"`(?!tests/)([a-z_]+/[a-z_/]+\.py|reference\.py)(?::([A-Za-z_.]+))?`")
STOPS = sorted(set(NAMED.findall(TEXT + (ROOT / "docs" / "architecture.md").read_text())))
LIMITS = {"One rollout": 28, "One train step": 22, "One weight version": 20}
QUESTIONS = {"From the gate to the ledger": 8, "From an answer to its reward": 6}


@cache
def defined(file: Path) -> frozenset[str]:
    """Return the names of functions, classes and methods in `file`: `name` or `Class.name`."""
    names = set[str]()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names.update(
                f"{node.name}.{part.name}"
                for part in node.body
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            )
    return frozenset(names)


@pytest.mark.parametrize(("file", "name"), STOPS, ids=lambda part: part)
def test_every_file_and_function_that_the_pages_name_exists(file: str, name: str) -> None:
    path = ROOT / "asyncrl" / file
    assert path.is_file()
    assert not name or name in defined(path)


@pytest.mark.parametrize("route", LIMITS)
def test_a_route_has_a_dozen_stops_and_says_how_many_files_it_opens(route: str) -> None:
    section = TEXT.partition(f"## {route}\n")[2].partition("\n## ")[0]
    files = {file for file, _ in NAMED.findall(section)}
    assert len(re.findall(r"^\d+\. ", section, re.M)) == 12
    assert f" {len(files)} files." in section
    assert len(files) <= LIMITS[route]


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_becomes_of_a_rollout_or_an_answer_is_decided_in_a_few_files(question: str) -> None:
    answer = TEXT.partition(f"- **{question}**")[2].partition("\n- **")[0].partition("\n## ")[0]
    files = {file for file, _ in NAMED.findall(answer)}
    assert answer.startswith(f", {len(files)} files.")
    assert len(files) <= QUESTIONS[question]
