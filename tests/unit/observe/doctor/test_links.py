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


def test_each_of_the_24_questions_has_an_answer_of_a_recorded_run() -> None:
    """`benchmarks/questions.py` writes the page; that findings are still called so, the test of links says."""
    page = (Path(asyncrl.__file__).parents[1] / PAGE).with_name("questions.md").read_text()
    assert [int(number) for number in re.findall(r"^## (\d+)\. ", page, re.MULTILINE)] == list(range(1, 25))
    answers = re.findall(r"^```text\n\$ asyncrl doctor RUN\n(.+?)\n```$", page, re.MULTILINE | re.DOTALL)
    assert len(answers) == 24


def test_every_finding_has_its_section() -> None:
    page = (Path(asyncrl.__file__).parents[1] / PAGE).read_text()
    sections = set(re.findall(r"^### (\S+)$", page, re.MULTILINE))
    assert all(KIND.fullmatch(kind) for kind in kinds())
    assert sections == kinds()
