"""The whole system against a real SGLang server, started as its child."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from ..conftest import SGLANG_ENV, SHARED_MEMORY, left_in_memory

PYTHON = os.environ.get("ASYNCRL_SGLANG_PYTHON")


needs_sglang = pytest.mark.skipif(PYTHON is None, reason="ASYNCRL_SGLANG_PYTHON names no interpreter with SGLang")


@pytest.mark.slow
@pytest.mark.sglang
@needs_sglang
@pytest.mark.parametrize(
    ("transport", "ranks", "mode", "lora"),
    [("tensor", 2, "interrupt", 4), ("distributed", 1, "in_place", 0)],
)
def test_a_run_takes_its_weights_from_the_trainers_memory(
    start_run: Any, transport: str, ranks: int, mode: str, lora: int
) -> None:
    """One of several ranks sends. Only the last version is written to disk. Adapters are merged. How weights come from
    disk, `tests/integration/test_generation_contract.py` shows; that each server is sent to apart from the others,
    `tests/integration/test_weight_sender.py`.
    """
    shared_memory = set(SHARED_MEMORY.iterdir())
    run = start_run(
        generation__backend="sglang",
        generation__sglang__python=PYTHON,
        **{f"+generation.sglang.env.{name}": value for name, value in SGLANG_ENV.items()},
        generation__device="cpu",
        manager__weight_transport=transport,
        manager__update_mode=mode,
        model__lora__rank=lora,
        trainer__parallel=f"d{ranks}",
        rollout__sampling__temperature=0.7,
        rollout__sampling__top_p=0.9,
        total_train_steps=3,
        max_head_offpolicyness=1,
        checkpoint__interval=0,
        eval__interval=0,
    )
    assert run.wait() == 0, run.output + run.logs()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["staleness/max"] for row in rows) <= 1  # so version 1 was served before step 3
    assert rows[0]["ppo/behave_kl"] < 1e-8, "SGLang's log-probabilities of version 0 are not the trainer's"
    assert rows[0]["ppo/behave_imp_weight_max"] == pytest.approx(1.0, abs=1e-4)
    assert max(row["ppo/behave_kl"] for row in rows) < 1e-2
    log = (run.run_dir / "logs" / "gserver_manager-0.log").read_text()
    assert "does not serve the trainer's" not in log
    if mode == "interrupt":  # else a server is checked while it serves, and a newer version may overtake the check
        assert re.findall(r"generation server \d agrees with the trainer on v\d", log), log
    assert [path.name for path in (run.run_dir / "weights" / "actor").glob("v*")] == ["v3"]
    assert (run.run_dir / "weights" / "actor" / "v3" / "model.safetensors").is_file()
    books = run.summary()["books"]
    assert books["submitted"] == books["trained"] + sum(books["dropped"].values()) + books["abandoned"]
    assert run.survivors() == []
    assert left_in_memory(run.run_dir, shared_memory) == []
