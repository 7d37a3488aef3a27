"""The end of a run in words."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

from msgspec.structs import replace

from asyncrl.comm.ended_rollouts import CUT_SHORT, RolloutCounts
from asyncrl.launch.train import summary_lines
from asyncrl.master.run_state import write_counts, write_summary
from asyncrl.runtime.run_log import WHOLE_RUN, note_restart, note_resumed


def test_the_summary_tells_steps_counts_accuracies_and_failed_evaluations(tmp_path: Path) -> None:
    counts = RolloutCounts(submitted=12, running=0, finished_untrained=0, trained=8, dropped={"stale": 3}, abandoned=1)
    failed = [
        {"version": 5, "set": "hard", "reason": "no answer within 300 s"},
        {"version": 6, "set": "hard", "reason": CUT_SHORT},
    ]
    metrics_log = Mock(evaluations=Mock(ended=[], failed=failed))
    figures = {"reward_mean": 0.5, "len_mean": 33.4, "truncated": 0.125, "prompts": 8.0}
    metrics_log.evaluations.newest.return_value = {
        "held_out": {"version": 6, "accuracy": 0.5, "pass@4": 0.75, **figures},
        "graded": {"version": 5, **figures},
    }
    for what in ("rollout_worker/0", WHOLE_RUN, "rollout_worker/0"):
        note_restart(tmp_path, what, "was killed by signal SIGKILL")
    note_resumed(tmp_path, "rollout_worker/0", 1.5)
    note_resumed(tmp_path, "rollout_worker/0", 3.0)
    write_summary(tmp_path, 6, 6, counts, metrics_log)
    lines = summary_lines(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["restarts"] == {"rollout_worker/0": 2, WHOLE_RUN: 1}
    assert lines[:7] == [
        "steps      6",
        "evaluated  graded: reward 0.500, 33 tokens, 12 % cut off (8 prompts, version 5)",
        "evaluated  held_out: accuracy 0.500, pass@4 0.750, reward 0.500, 33 tokens, 12 % cut off "
        "(8 prompts, version 6)",
        "FAILED     evaluation of version 5 on hard: no answer within 300 s",
        "CUT SHORT  evaluation of version 6 on hard: the run was stopped before it had ended",
        "rollouts   submitted 12 = trained 8 + dropped 3 (stale 3) + abandoned 1",
        "restarts   rollout_worker/0 2, the whole run 1; 4.5 s until they went on",
    ]
    assert f"logs       {tmp_path / 'logs'}" in lines


def test_an_end_without_a_summary_tells_the_counts_as_of_the_last_step(tmp_path: Path) -> None:
    counts = RolloutCounts(
        submitted=14, trained=8, dropped={"stale": 1, "failed: reward my.py:score": 2}, abandoned=0, running=3
    )
    write_counts(tmp_path, 2, counts)
    lines = summary_lines(tmp_path)
    assert lines[0] == "the run ended before it could write a summary"
    balance = "submitted 14 = trained 8 + dropped 3 (failed: reward my.py:score 2, stale 1) + abandoned 0 + under way 3"
    assert lines[1] == f"rollouts   {balance}, as of step 2"
    assert lines[2].startswith("FAILED     2 rollouts in reward my.py:score (failed: reward my.py:score)")
    lost = "rollout/lost_episodes: env my.py:Game.step raised ValueError"
    rows = [{"step": 1, lost: 2.0}, {"step": 2}, {"step": 3, lost: 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    message = (
        "LOST       3 episodes, as env my.py:Game.step raised ValueError; the logs of the rollout_workers say more"
    )
    assert message in summary_lines(tmp_path)
    write_counts(tmp_path, 3, replace(counts, running=1, finished_untrained=1))
    assert "submitted 14 ≠ trained 8" in summary_lines(tmp_path)[1]


def test_a_run_without_a_summary_says_where_to_look(tmp_path: Path) -> None:
    first, *others = summary_lines(tmp_path)
    assert "before it could write a summary" in first
    assert f"logs       {tmp_path / 'logs'}" in others
