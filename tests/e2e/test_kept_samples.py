"""Whole runs that keep samples, that only generate, and that only train."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("pyarrow")

from asyncrl.launch import __main__ as launch
from asyncrl.launch.commands import show
from asyncrl.launch.commands.audit import audit
from asyncrl.observe.samples import read_samples, sample_files
from tests.unit.test_documented_snippets import commands_that_read

pytestmark = pytest.mark.slow

STEPS, BATCH = 4, 4
HELD_LOSS = """
from pathlib import Path
from threading import Event
from asyncrl.algorithms.grpo import decoupled_ppo
from asyncrl.algorithms.registry import policy_loss

@policy_loss("held")
def held(inputs):
    "The default; in the run with these metrics it waits in step 3 until there is a file."
    pause, rows = Event(), Path("{metrics}")
    while rows.exists() and len(rows.read_text().splitlines()) == 2 and not Path("{free}").exists():
        Path("{held}").touch()
        pause.wait(0.05)
    return decoupled_ppo(inputs)
"""


def read_as_documented(
    run_dir: Path,
    command: Any,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Execute each command of the pages that reads a run, on this one; export, which imports torch, in a process."""
    monkeypatch.chdir(folder)
    (folder / "launchers").mkdir()  # where a page keeps the dashboard's token
    documented = commands_that_read(run_dir, STEPS)
    assert len(documented) > 8
    for number, words in enumerate(documented):
        if words[0] == "export":
            ended = command(*words[:-1], folder / f"exported{number}")
            assert ended.code == 0, ended.output
            assert (folder / f"exported{number}" / "config.json").is_file()
        else:
            code = launch.main(words)
            reported = capsys.readouterr()
            assert code == 0 or (words[0] == "doctor" and code == 1), (words, reported.err)
            assert reported.out or reported.err or "--report" in words, words


def test_two_ranks_servers_and_workers_share_the_work_and_a_replay_whose_brain_is_killed_repeats_what_was_kept(
    start_run: Any,
    command: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The replay goes on after its last step, and trains what was recorded."""
    held, free, killed = tmp_path / "held", tmp_path / "free", tmp_path / "tiny" / "killed"
    loss = HELD_LOSS.format(metrics=killed / "metrics.jsonl", held=held, free=free)
    (tmp_path / "loss.py").write_text(loss)
    settings = {"total_train_steps": STEPS, "eval__interval": 0, "algorithm__reference__mode": "frozen"}
    settings |= {"algorithm__kl_coef": 0.01, "trainer__parallel": "d2"}
    settings |= {"algorithm__policy_loss__name": f"{tmp_path / 'loss.py'}:held", "algorithm__policy_loss__params": "{}"}
    kept = {"samples__every": 1, "trainer__score_ahead": "true"}
    first = start_run(**kept, generation__servers=2, rollout__workers=2, **settings)
    assert first.wait() == 0, first.output + first.logs()
    assert audit(first.run_dir).findings == ()
    assert [row["step"] for row in first.rows()] == list(range(1, STEPS + 1))
    assert max(row["staleness/max"] for row in first.rows()) <= 2
    assert all(
        0 <= row["rollout/scored_ahead"] <= 1 for row in first.rows()
    )  # how much came before its step, time says
    counts = first.summary()["books"]
    assert counts["submitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["abandoned"]
    assert first.survivors() == []

    rows = list(read_samples(sample_files(first.run_dir / "samples")))
    assert Counter(row["step"] for row in rows) == {step: BATCH * 2 for step in range(1, STEPS + 1)}
    assert {file.name.split(".")[1] for file in sample_files(first.run_dir / "samples")} == {"head-0", "head-1"}
    for row in rows:
        length = len(row["tokens"])
        for name in ("behave_logprobs", "prox_logprobs", "ref_logprobs"):
            assert len(row[name]) == length
            assert all((value != 0.0) == bool(mask) for value, mask in zip(row[name], row["loss_mask"], strict=True))
        assert row["staleness"] >= 0
    fresh = [row for row in rows if row["step"] == 1]
    for row in fresh:  # the first version is behaviour, proximal and reference policy at once
        for name in ("prox_logprobs", "ref_logprobs"):
            assert row[name] == pytest.approx(row["behave_logprobs"], abs=1e-3)
    assert show.main([str(first.run_dir), "-n", "2"], "asyncrl") == 0
    assert capsys.readouterr().out.count("log-probabilities: behaviour") == 2

    read_as_documented(first.run_dir, command, monkeypatch, tmp_path, capsys)

    replay = f"replay async_ppo samples={first.run_dir}"
    second = start_run(replay, trial_name=killed.name, checkpoint__interval=0, **settings)
    assert second.run_dir == killed
    second.wait_for_file(str(held))
    reader = second.worker("rollout_worker/0").pid
    second.worker("gserver_manager/0").kill()
    second.wait_for_line("the brain went on after")
    assert second.worker("rollout_worker/0").pid == reader
    free.touch()
    assert second.wait() == 0, second.output + second.logs()
    assert "started 5 processes" in second.output, "no server, and one RolloutWorker, which reads"
    check_it_repeats(first, second)
    assert second.summary()["restarts"] == {"the brain": 1}
    assert "going on after step 2," in (second.run_dir / "logs" / "master_worker-0.log").read_text()


def check_it_repeats(first: Any, second: Any) -> None:
    """The second run has trained what the first has kept, and has become the same policy."""
    for recorded, repeated in zip(first.rows(), second.rows(), strict=True):
        for name in ("reward/mean", "staleness/mean", "tokens/batch", "loss", "grad_norm"):
            assert math.isclose(recorded[name], repeated[name], rel_tol=1e-3, abs_tol=1e-5), name
    weights = Path("weights", "actor", f"v{STEPS}", "model.safetensors")
    before, again = (load_file(run.run_dir / weights) for run in (first, second))
    assert before.keys() == again.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-3, atol=1e-4)
    counts = second.summary()["books"]
    assert (counts["submitted"], counts["trained"], counts["dropped"]) == (STEPS * BATCH, STEPS * BATCH, {})
    assert audit(second.run_dir).findings == ()
    assert second.survivors() == []
    assert "Traceback" not in second.logs()


def test_rollouts_are_generated_without_training_and_a_killed_launch_goes_on(start_run: Any) -> None:
    settings = {"total_train_steps": 40, "eval__interval": 0}
    first = start_run("rollout async_ppo", **settings)
    first.wait_for_file("samples/step-00000000.part-000001.parquet")
    first.kill_tree()
    before = {row["rollout"] for row in read_samples(sample_files(first.run_dir / "samples"))}

    second = start_run("rollout async_ppo", **settings)
    assert second.wait() == 0, second.output + second.logs()
    rows = list(read_samples(sample_files(second.run_dir / "samples")))
    rollouts = {row["rollout"] for row in rows}
    assert before <= rollouts
    assert len(rollouts) == 40 * BATCH
    assert len({row["prompt"] for row in rows}) == 40 * BATCH, "no prompt twice"
    assert {version for row in rows for version in row["versions"]} == {-1, 0}

    offline = start_run(
        f"replay async_ppo samples={second.run_dir}", trial_name="offline", total_train_steps=3, eval__interval=0
    )
    assert offline.wait() == 0, offline.output + offline.logs()
    assert [row["staleness/max"] for row in offline.rows()] == [0, 1, 2]


def test_a_replay_without_samples_is_refused(start_run: Any, tmp_path: Path) -> None:
    run = start_run(f"replay async_ppo samples={tmp_path}")
    assert run.wait() == 2
    assert "0 rollouts are kept there, fewer than train_batch_size=4" in run.output
