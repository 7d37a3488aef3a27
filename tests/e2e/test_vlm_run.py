"""A whole run of the vision-language demo, with a RolloutWorker killed on the way."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.commands.audit import audit

pytestmark = pytest.mark.slow

STEPS = 8


def test_the_demo_trains_on_its_pictures_and_survives_a_killed_rollout_worker(start_run: Any) -> None:
    run = start_run(
        "vlm_shapes",
        experiment_name="vlm_shapes",
        model__path=None,
        reward__path=None,
        dataset__max_prompt_tokens=None,
        rollout__sampling__max_new_tokens=None,
        total_train_steps=STEPS,
        train_batch_size=8,
        eval__interval=STEPS,
        eval__size=64,
        checkpoint__interval=STEPS,
    )
    run.wait_for_step(2)
    run.worker("rollout_worker/0").kill()
    run.wait_for_line("rollout_worker/0 went on after")
    assert run.wait() == 0, run.output + run.logs()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert run.summary()["restarts"] == {"rollout_worker/0": 1}
    assert 0 < max(row["ppo/engine_gap_max"] for row in rows) < 1e-3, "server and trainer see the same pictures"
    assert run.summary()["eval"]["held_out"]["accuracy"] > 0.25, "blind guesses are right once in six"
    assert audit(run.run_dir).findings == ()
