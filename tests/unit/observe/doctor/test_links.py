"""Every finding has its section in the troubleshooting page, and every section is of a finding."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import asyncrl.observe.doctor
from asyncrl.observe.doctor.bottleneck import ADVICE_OF_CALL
from asyncrl.observe.doctor.finding import PAGE

ROOM = Path(asyncrl.observe.doctor.__file__).parent
KIND = re.compile(r"[a-z]+(-[a-z]+)*")


def kinds() -> set[str]:
    """First arguments of `Finding` and second ones of `bottleneck`, and the kinds that rules choose among."""
    found = {f"slow-{what}" for what in ADVICE_OF_CALL} | {"publish", "checkpoint-disk", "trainer"}
    for file in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                place = {"Finding": 0, "bottleneck": 1}.get(node.func.id)
                if place is not None and isinstance(kind := node.args[place], ast.Constant):
                    found.add(str(kind.value))
    return found


def page_text() -> str:
    return (Path(asyncrl.__file__).parents[1] / PAGE).read_text()


def findings_of_questions() -> list[set[str]]:
    """Of each question of `benchmarks/questions.py`, the findings that answer it."""
    source = (Path(asyncrl.__file__).parents[1] / "benchmarks" / "questions.py").read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    questions = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Question"]
    return [set(ast.literal_eval(call.args[3])) if len(call.args) > 3 else set() for call in questions]


def test_the_symptoms_lead_to_an_answer_of_each_of_the_24_questions() -> None:
    """`benchmarks/questions.py` records the answers; some questions are answered by figures of stages alone."""
    table = page_text().partition("## Find your symptom")[2].partition("\n## ")[0]
    linked = set(re.findall(r"\(#([a-z-]+)\)", table))
    asked = findings_of_questions()
    assert len(asked) == 24
    assert set().union(*asked) <= kinds()
    assert [kinds_of for kinds_of in asked if kinds_of and not kinds_of & linked] == []
    assert linked - kinds() == {"error-messages"}


def test_every_finding_has_its_section() -> None:
    page = page_text()
    sections = set(re.findall(r"^### (\S+)$", page, re.MULTILINE))
    assert all(KIND.fullmatch(kind) for kind in kinds())
    assert sections == kinds()
