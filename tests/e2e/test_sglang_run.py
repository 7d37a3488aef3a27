"""The whole system against a real SGLang server, started as its child."""

from __future__ import annotations

import os
from typing import Any

import pytest

PYTHON = os.environ.get("ASYNCRL_SGLANG_PYTHON")


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.skipif(PYTHON is None, reason="ASYNCRL_SGLANG_PYTHON names no interpreter with SGLang")
def test_a_run_on_sglang_trains_keeps_its_bound_and_leaves_nothing(start_run: Any) -> None:
    run = start_run(
        generation__backend="sglang",
        generation__sglang__python=PYTHON,
        generation__device="cpu",
        total_train_steps=3,
    )
    run.wait_for_step(1, limit_s=150)
    assert run.wait() == 0, run.output + run.logs()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["staleness/max"] for row in rows) <= 2
    assert rows[0]["ppo/behave_kl"] < 1e-4, "SGLang's log-probabilities of version 0 are not the trainer's"
    books = run.summary()["books"]
    assert books["submitted"] == books["trained"] + sum(books["dropped"].values()) + books["abandoned"]
    assert run.survivors() == []
