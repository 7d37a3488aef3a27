"""The reference tables name every algorithm with its parameters and defaults, and the example works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from asyncrl.algorithms.registry import KINDS
from asyncrl.config.plugin_code.catalog import known, resolve

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("algorithms.md", "advantages.md", "off_policy.md")
TEXT = "\n".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES)


def section(kind: str) -> str:
    (found,) = (part for part in re.split(r"^## ", TEXT, flags=re.M) if kind in part.split("\n", 1)[0].split(", "))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_algorithm_stands_in_the_table_with_its_parameters(kind):
    rows = [line for line in section(kind).splitlines() if line.startswith("|")]
    for name, entry in known(kind).items():
        (row,) = (r for r in rows if f"| `{name}` |" in r)
        documented = {item for item in re.findall(r"`([^`]+)`", row) if " = " in item or item in entry.params}
        described = {p.name if p.required else f"{p.name} = {p.default}" for p in entry.params.values()}
        assert described <= documented, f"{kind} {name}"


def test_the_example_of_a_users_loss_works(ragged, tmp_path, monkeypatch):
    (code,) = (found for found in re.findall(r"```python\n(.*?)```", TEXT, flags=re.S) if "root_ratio" in found)
    (tmp_path / "documented_loss.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    batch = ragged(0)
    output = resolve("policy_loss", "documented_loss:root_ratio", {"power": 1.0})(batch.inputs())
    expected = -torch.exp(torch.tensor(batch.logprobs - batch.behave)) * torch.tensor(batch.advantages)
    torch.testing.assert_close(output.loss_T[output.mask_T], expected[output.mask_T])
