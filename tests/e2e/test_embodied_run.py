"""A whole run of the embodied demo: environments in processes, an EncoderServer; it and a RolloutWorker are killed."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config.load import recipes_dir
from asyncrl.launch.commands.audit import audit

pytestmark = pytest.mark.slow

STEPS = 3
ENCODER = recipes_dir() / "base_models" / "embodied_srpo_encoder"


def test_the_demo_trains_with_srpos_reward_and_survives_a_killed_encoder_and_a_killed_worker(start_run: Any) -> None:
    run = start_run(
        "embodied_srpo",
        experiment_name="embodied_srpo",
        model__path=None,
        reward__path=None,
        dataset__max_prompt_tokens=None,
        rollout__sampling__max_new_tokens=None,
        total_train_steps=STEPS,
        train_batch_size=4,
        group_size=8,
        env__run_in="process",
        env__processes=8,
        rewards="[{name: srpo, path: 'asyncrl.plugins.rewards.srpo:SRPOReward', args: {encoder: server}}]",
        rollout__encoder__servers=1,
        rollout__encoder__args=f"{{folder: {ENCODER}}}",
        rollout__encoder__frames=8,
        eval__interval=STEPS,
        eval__size=8,
        checkpoint__interval=STEPS,
    )
    run.wait_for_step(1)
    for worker in ("encoder_server/0", "rollout_worker/0"):
        run.worker(worker).kill()
        run.wait_for_line(f"{worker} went on after")
    assert run.wait() == 0, run.output + run.logs()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert 0 < max(row["ppo/engine_gap_max"] for row in rows) < 1e-3, "both restrict the distribution to the actions"
    for row in rows:
        assert row["agent/success"] <= 0.9, "what is trained passed the filter on success"
        assert 0 < row["reward/srpo"] < 0.6
        assert row["reward/srpo.references"] >= 1
        assert not row["rollout/dropped_failed"], "a group waits for the encoder's successor"
    assert any("reward/srpo.progress_correlation" in row for row in rows)
    assert audit(run.run_dir).findings == ()
