"""The reference tables name every algorithm with its parameters and defaults, and the example works."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.algorithms import filters
from asyncrl.algorithms.arithmetic import stat_values
from asyncrl.algorithms.inputs import CorrectionInputs, KLInputs, SelectionInputs
from asyncrl.algorithms.registry import KINDS
from asyncrl.config.plugin_code.catalog import known, resolve
from tests.unit.algorithms.test_advantages import advantage_inputs

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "algorithms.md").read_text(encoding="utf-8")


def section(kind: str) -> str:
    """The section whose heading ends with the kind: `## Group filters, reward shaping: filter, shaping`."""
    parts = re.split(r"^## ", TEXT, flags=re.M)
    (found,) = (part for part in parts if kind in part.split("\n", 1)[0].rpartition(": ")[2].split(", "))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_algorithm_stands_in_the_table_with_its_parameters(kind):
    rows = [line for line in section(kind).splitlines() if line.startswith("|")]
    for name, entry in known(kind).items():
        (row,) = (r for r in rows if f"| `{name}` |" in r)
        documented = {item for item in re.findall(r"`([^`]+)`", row) if " = " in item or item in entry.params}
        described = {p.name if p.required else f"{p.name} = {p.default}" for p in entry.params.values()}
        assert described <= documented, f"{kind} {name}"


@pytest.mark.parametrize("name", known("filter"))
def test_the_reasons_of_a_filter_stand_in_its_row(name):
    (row,) = (line for line in section("filter").splitlines() if line.startswith(f"| filter | `{name}` |"))
    given = re.findall(
        r'FilterDecision\(False, "(\w+)"', inspect.getsource(getattr(filters, known("filter")[name].function))
    )
    assert given
    assert re.findall(r"`(\w+)`", row.split("|")[4]) == given


def documented(kind: str, name: str) -> dict[str, Any]:
    """The defaults that stand in the table."""
    (row,) = (line for line in section(kind).splitlines() if line.startswith(f"| `{name}` |"))
    params = known(kind)[name].params
    texts = dict(re.findall(r"`(\w+) = ([^`]+)`", row))
    return {
        param: text if isinstance(params[param].default, str) else ast.literal_eval(text)
        for param, text in texts.items()
    }


def run(kind: str, name: str, params: dict[str, Any], batch) -> Any:
    inputs, mask_T = batch.inputs(), torch.tensor(batch.mask)
    reported = (inputs.prox_logprobs_T, inputs.behave_logprobs_T, inputs.mask_T, inputs.seq_ids_T, inputs.num_seqs)
    generator = torch.Generator().manual_seed(0)
    both = [torch.randn(len(mask_T), 3, generator=generator).double().mul(9).log_softmax(-1) for _ in range(2)]
    ref_T = torch.tensor(batch.ref)
    given: dict[str, Any] = {
        "policy_loss": inputs,
        "correction": CorrectionInputs(*reported, inputs.logprobs_T, inputs.advantages_T),
        "selection": SelectionInputs(*(each[mask_T] for each in (*reported[:2], inputs.advantages_T))),
        "kl": KLInputs(inputs.logprobs_T, ref_T, mask_T, *both, behave_logprobs_T=inputs.behave_logprobs_T),
        "advantage": advantage_inputs(batch, 0, truncated=True, token_rewards=True),
    }
    return resolve(kind, name, params)(given[kind])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in ("policy_loss", "correction", "selection", "kl", "advantage")
        for name, entry in known(kind).items()
        if entry.params
    ],
)
def test_the_documented_defaults_are_those_that_run(ragged, kind, name):
    batch = ragged(0, num_seqs=90, longest=200, spread=2.0, group_size=3)
    outputs = [run(kind, name, params, batch) for params in ({}, documented(kind, name))]
    found, expected = ({"": each} if isinstance(each, torch.Tensor) else vars(each) for each in outputs)
    for field, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[field], value), field
        elif field == "stats":
            assert stat_values(found[field]) == stat_values(value)
        else:
            assert found[field] == value


def test_the_example_of_a_users_loss_works(ragged, tmp_path, monkeypatch):
    (code,) = (found for found in re.findall(r"```python\n(.*?)```", TEXT, flags=re.S) if "root_ratio" in found)
    (tmp_path / "documented_loss.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    batch = ragged(0)
    output = resolve("policy_loss", "documented_loss:root_ratio", {"power": 1.0})(batch.inputs())
    expected = -torch.exp(torch.tensor(batch.logprobs - batch.behave)) * torch.tensor(batch.advantages)
    torch.testing.assert_close(output.loss_T[output.mask_T], expected[output.mask_T])
