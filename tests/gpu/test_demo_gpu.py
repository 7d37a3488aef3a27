"""A whole run on one GPU: the trainer and the embedded engine share it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_trains_on_a_gpu_from_end_to_end(start_run: Any, dtype: str) -> None:
    """Finite losses, balanced rollout counts, and what the engine on the GPU says of its tokens is what the trainer
    says.
    """
    run = start_run(
        trainer__device="cuda",
        generation__device="cuda",
        model__dtype=dtype,
        generation__dtype=dtype,
        total_train_steps=4,
        eval__interval=0,
        max_head_offpolicyness=0,
    )
    assert run.wait() == 0, run.output + run.logs()
    rows = run.rows()
    assert [row["policy_version"] for row in rows] == [1, 2, 3, 4]
    assert all(math.isfinite(value) for row in rows for key, value in row.items() if key.endswith("loss"))
    ratios = [value for row in rows for key, value in row.items() if key.endswith("behave_imp_weight_mean")]
    assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-3 if dtype == "float32" else 0.05)
    assert run.survivors() == []
