"""docs/faults.md lists every time constant of the processes with its reason, and there are few."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
PACKAGES = ("master", "manager", "rollout", "comm", "runtime")
MOST = 50
HEAD, END = "<!-- waits: made by tests/unit/test_waits.py -->\n", "<!-- end of waits -->\n"


class Wait(NamedTuple):
    file: str
    name: str
    seconds: str
    reason: str


def waits() -> Iterator[Wait]:
    """Each module's `NAME_S = number` with the string that follows it."""
    for package in PACKAGES:
        for file in sorted((ROOT / "asyncrl" / package).rglob("*.py")):
            body = ast.parse(file.read_text(encoding="utf-8")).body
            for node, following in zip(body, [*body[1:], None], strict=True):
                if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                    continue
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                        if isinstance(each, ast.Name) and each.id.endswith("_S"):
                            yield Wait(
                                str(file.relative_to(ROOT / "asyncrl")),
                                each.id,
                                ast.unparse(node.value),
                                reason(following),
                            )


def reason(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def test_every_time_constant_has_its_reason_in_one_table_and_there_are_few() -> None:
    found = list(waits())
    assert [each for each in found if not each.reason] == []
    assert len(found) <= MOST, sorted(found)
    rows = [f"| `{name}` | {seconds} | `{file}` | {reason} |" for file, name, seconds, reason in found]
    made = "\n".join(("| Wait | s | Where | Why |", "|---|--:|---|---|", *rows, ""))
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(HEAD)
    table, after = rest.split(END)
    if table != made:
        PAGE.write_text(before + HEAD + made + END + after, encoding="utf-8")
    assert table == made, "docs/faults.md is rewritten: look at it and commit it"
