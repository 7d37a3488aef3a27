"""Every finding has its section in the troubleshooting page, and every section is of a finding."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import asyncrl.observe.doctor
from asyncrl.observe.doctor.bottleneck import ADVICE_OF_CALL
from asyncrl.observe.doctor.finding import PAGE

PACKAGE = Path(asyncrl.observe.doctor.__file__).parent
KIND = re.compile(r"[a-z]+(-[a-z]+)*")
ANSWERS: dict[str, set[str]] = {
    "verl#6693": {"slow-generation", "trainer", "balanced", "no-cpu", "too-few-slots"},
    "verl#3895": {"no-step-yet"},
    "verl#7180": {"stalled"},
    "verl#7155": {"stalled"},
    "verl#6387": {"rewards-that-always-fail"},
    "verl#4449": set(),
    "verl#6747": {"server-batch-too-small"},
    "slime#1072": {"kv-cache-too-small"},
    "slime#1487": {"stalled"},
    "slime#1332": {"blocked-event-loop"},
    "slime#638": {"memory-grows"},
    "AReaL#137": {"too-few-slots"},
    "prime-rl#2812": {"eta-never-reached"},
    "prime-rl#1372": {"eta-too-small"},
    "prime-rl#964": {"entropy-collapses", "nothing-learnt", "old-data"},
    "trl#2971": {"slow-generation"},
    "trl#6796": {"stalled"},
    "RL#3238": {"stalled"},
    "ROLL#394": {"eta-too-small"},
    "ROLL#215": {"blocked-user-code"},
    "ms-swift#6962": {"died"},
    "UniRL#455": set(),
    "tinker-cookbook#822": {"stale-drops"},
    "marin#8936": set(),
}
"""By the public issue where it was asked, the findings that answer a question; none: figures of stages alone do."""


def kinds() -> set[str]:
    """First arguments of `Finding` and second ones of `bottleneck`, and the kinds that rules choose among."""
    found = {f"slow-{what}" for what in ADVICE_OF_CALL} | {"publish", "checkpoint-disk", "trainer"}
    for file in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                place = {"Finding": 0, "bottleneck": 1}.get(node.func.id)
                if place is not None and isinstance(kind := node.args[place], ast.Constant):
                    found.add(str(kind.value))
    return found


def page_text() -> str:
    return (Path(asyncrl.__file__).parents[1] / PAGE).read_text()


def test_the_symptoms_lead_to_an_answer_of_each_of_the_24_questions() -> None:
    table = page_text().partition("## Find your symptom")[2].partition("\n## ")[0]
    linked = set(re.findall(r"\(#([a-z-]+)\)", table))
    assert len(ANSWERS) == 24
    assert set().union(*ANSWERS.values()) <= kinds()
    assert [where for where, answers in ANSWERS.items() if answers and not answers & linked] == []
    assert linked - kinds() == {"error-messages"}


def test_every_finding_has_its_section() -> None:
    page = page_text()
    sections = set(re.findall(r"^### (\S+)$", page, re.MULTILINE))
    assert all(KIND.fullmatch(kind) for kind in kinds())
    assert sections == kinds()
