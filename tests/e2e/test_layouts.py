"""Whole runs whose models are spread over ranks train to the end.

That a run goes on in another layout, `tests/faults/test_resume.py` shows.
"""

from __future__ import annotations

import gzip
import json
import math
from typing import Any

import pytest

from asyncrl.weights.manifest import read_manifest

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, str]] = {
    "a critic in slices on the ranks of a sharded actor": {
        "trainer__parallel": "d2",
        "algorithm__critic__parallel": "t2",
        "algorithm__critic__warmup_steps": "1",
        "profile__steps": "[2]",
        "profile__ranks": "[0,1]",
    },
    "idle roles, moments and activations in host memory; published in bfloat16": {
        "trainer__parallel": "d2",
        "trainer__offload": "true",
        "optimizer__moments_on": "host",
        "trainer__gradient_checkpointing": "true",
        "trainer__activations_on": "host",
        "model__publish_dtype": "bfloat16",
        "algorithm__kl_coef": "0.01",
    },
    "tensor slices, and a critic in stages on ranks of its own": {
        "trainer__parallel": "t2",
        "algorithm__critic__parallel": "p2",
        "algorithm__critic__warmup_steps": "1",
        "algorithm__critic__ranks": "own",
    },
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_trains_in_any_layout(start_run: Any, name: str) -> None:
    """Finite losses, balanced rollout counts, every version published; a critic with a warm-up is trained alone at
    first.
    """
    layout = LAYOUTS[name]
    with_critic = any("critic" in setting for setting in layout)
    experiment = "async_ppo_critic" if with_critic else "async_ppo"
    run = start_run(experiment, **layout, total_train_steps=3, eval__interval=0)
    assert run.wait() == 0, run.output + run.logs()
    rows = run.rows()
    assert [row["policy_version"] for row in rows] == [1, 2, 3]
    warmup = int(layout.get("algorithm__critic__warmup_steps", 0))
    assert [row["optimizer/steps"] > 0 for row in rows] == [step >= warmup for step in range(3)]
    check_losses(rows, with_critic=with_critic)
    counts = run.summary()["books"]
    assert counts["trained"] == 3 * 4
    assert counts["submitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["abandoned"]
    published = read_manifest(run.run_dir / "weights" / "actor" / "v3").tensors.values()
    assert {each.dtype for each in published} == {"BF16" if "model__publish_dtype" in layout else "F32"}
    assert run.survivors() == []
    if "profile__steps" in layout:
        check_profile(run)


def check_profile(run: Any) -> None:
    """Step 2 was looked at on both ranks, and the terminal says where."""
    folder = run.run_dir / "profile"
    files = ["step-2.rank-0.trace.json.gz", "step-2.rank-1.trace.json.gz", "step-2.stacks.txt"]
    assert sorted(file.name for file in folder.iterdir()) == files
    assert "profile of step 2: " in run.output
    trace = json.loads(gzip.decompress((folder / files[1]).read_bytes()))
    calls = {event.get("name") for event in trace["traceEvents"]}
    assert {"actor_train", "critic_train"} <= calls
    stacks = (folder / files[2]).read_text()
    kinds = ("model_worker/0", "model_worker/1", "master_worker/0", "gserver_manager/0", "rollout_worker/0")
    assert all(f"== asyncrl {kind} [" in stacks for kind in kinds), stacks[:2000]


def check_losses(rows: list[dict[str, Any]], *, with_critic: bool) -> None:
    """Those of every model that is trained are there, and finite."""
    losses = {key: value for row in rows for key, value in row.items() if key.endswith("loss") or "grad_norm" in key}
    assert any("critic" in key for key in losses) == with_critic, losses
    assert losses, rows[-1].keys()
    assert all(math.isfinite(value) for row in rows for key, value in row.items() if key in losses)
