"""docs/faults.md lists every time constant of the processes with its reason, and there are few."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2] / "asyncrl"
PAGE = ROOT.parent / "docs" / "faults.md"
PACKAGES = ("master", "colocated", "offline", "manager", "rollout", "comm", "runtime", "clusters")
MOST = 50
HEAD, END = "<!-- waits: made by tests/unit/test_waits.py -->\n", "<!-- end of waits -->\n"


class Wait(NamedTuple):
    file: Path
    name: str
    seconds: str
    reason: str


def waits(file: Path) -> Iterator[Wait]:
    """Yield each `NAME_S = number` with the string after it; what is computed from others has their reasons."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for node, following in zip_longest(body, body[1:]):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        name = getattr(target, "id", "")
        if isinstance(getattr(node, "value", None), ast.Constant) and name.endswith("_S"):
            yield Wait(file.relative_to(ROOT), name, ast.unparse(node.value), reason(following))
        names = [ast.unparse(each) for each in target.elts] if isinstance(target, ast.Tuple) else []
        assert not [each for each in names if each.endswith("_S")], f"{file}: one constant a line"


def reason(node: ast.stmt | None) -> str:
    string = node.value if isinstance(node, ast.Expr) else None
    text = string.value if isinstance(string, ast.Constant) and isinstance(string.value, str) else ""
    return " ".join(text.partition("\n\n")[0].split())


def test_every_time_constant_has_its_reason_in_one_table_and_there_are_few() -> None:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    found = [wait for file in files for wait in waits(file)]
    assert [f"{wait.file}: {wait.name}" for wait in found if not wait.reason] == []
    assert 0 < len(found) <= MOST
    rows = [f"| `{name}` | {float(seconds):g} | `{file}` | {why} |" for file, name, seconds, why in found]
    made = "\n".join(("| Wait | s | Where | Why |", "|---|--:|---|---|", *rows, ""))
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(HEAD)
    _, _, after = rest.partition(END)
    if (new := before + HEAD + made + END + after) != text:
        PAGE.write_text(new, encoding="utf-8")
    assert new == text, "docs/faults.md is rewritten: look at it and commit it"
