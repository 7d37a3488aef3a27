"""A sample of `benchmarks/models.py`, which tries every causal model of transformers, finds what the page says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import models

FIX = "write it anew: python benchmarks/models.py --out FILE, then --write FILE"


@pytest.mark.parametrize("model_type", ["phimoe", "moshi", "minicpm3"])
def test_a_sample_is_trained_and_served_as_the_page_says(model_type: str) -> None:
    found = models.row(models.examine(model_type, length=24))
    assert found in models.rows_of(models.PAGE.read_text(encoding="utf-8")), FIX


def test_the_page_has_every_model_and_none_that_is_accepted_and_differs() -> None:
    page = models.PAGE.read_text(encoding="utf-8")
    rows = models.rows_of(page)
    assert [each.name for each in rows] == sorted(models.NAMES), FIX
    assert not [each for each in rows if "**" in each.trained + each.served]
    assert set(models.table(rows)) < set(page.splitlines()), FIX


@pytest.mark.parametrize(
    ("found", "row"),
    [
        ({"name": "a", "not_made": "no"}, ("a", "not tried", "not tried", "")),
        (
            {
                "name": "a",
                "train": {"layout": "tree", "logprobs": 1e-6, "gradients": 1e-6},
                "packed": {"layout": "packed", "logprobs": 1e-6, "gradients": 0.1},
                "serve": {
                    "refused": "A is not served by the embedded engine: it is big. Use generation.backend=sglang"
                },
            },
            ("a", "**gradients differ by 0.1**", "refused", "served: it is big"),
        ),
        (
            {
                "name": "a",
                "train": {"layout": "padded", "logprobs": 1e-6, "gradients": 1e-6},
                "serve": {"logprobs": 2.0},
            },
            ("a", "padded rows", "**differs by 2 nats**", ""),
        ),
    ],
)
def test_a_row_says_what_is_right_and_what_differs(found: models.Found, row: tuple[str, ...]) -> None:
    assert models.row(found) == row
