"""A whole run of the vision-language demo; one process of each kind that sees pictures is killed, then the launcher."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.launch.commands import show
from asyncrl.launch.commands.audit import audit
from asyncrl.observe.samples import read_samples, sample_files
from asyncrl.weights.logprob_probe import read_probe

pytestmark = pytest.mark.slow

STEPS, BATCH, GROUP = 12, 8, 8
KILLED = ("rollout_worker", "generation_server")
"""One after the other, each once the one before went on."""


def test_the_demo_trains_on_its_pictures_whatever_process_is_killed_and_its_export_answers_alike(
    start_run: Any, command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = dict(
        experiment_name="vlm_shapes",
        model__path=None,
        reward__path=None,
        dataset__max_prompt_tokens=None,
        rollout__sampling__max_new_tokens=None,
        total_train_steps=STEPS,
        train_batch_size=BATCH,
        group_size=GROUP,
        eval__interval=STEPS,
        eval__size=64,
        checkpoint__interval=2,
        samples__every=1,
    )
    run = start_run("vlm_shapes", **settings)
    for number, kind in enumerate(KILLED, start=1):
        run.wait_for_step(1 + number)
        run.worker(f"{kind}/0").kill()
        run.wait_for_line(" went on after", times=number)
    run.wait_for_step(2 + len(KILLED))
    run.worker("model_worker/0").kill()
    run.wait_for_line(" went on after", times=1 + len(KILLED))
    run.process.kill()
    again = start_run("vlm_shapes", **settings)
    assert again.wait() == 0, again.output + again.logs()
    rows = again.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert 0 < max(row["ppo/engine_gap_max"] for row in rows) < 1e-3, "server and trainer see the same pictures"
    accuracy = again.summary()["eval"]["held_out"]["accuracy"]
    assert accuracy > 0.25, "blind guesses are right once in six"
    assert audit(again.run_dir).findings == ()
    kept = list(read_samples(sample_files(again.run_dir / "samples")))
    assert Counter(row["step"] for row in kept) == {step: BATCH * GROUP for step in range(1, STEPS + 1)}
    assert {len(row["pictures"]) for row in kept} == {1}
    assert show.main([str(again.run_dir), "-n", "1"], "asyncrl") == 0
    assert "[picture 16x16 " in capsys.readouterr().out

    probe = read_probe(again.run_dir / "weights" / "actor" / f"v{STEPS}")
    assert probe is not None
    assert probe.sequences[-1].picture is not None
    log = "".join(file.read_text() for file in (again.run_dir / "logs").glob("gserver_manager*"))
    assert f"agrees with the trainer on v{STEPS} to" in log, log

    exported, out = tmp_path / "exported", tmp_path / "out.json"
    assert command("export", again.run_dir, exported).code == 0
    ended = command("eval", exported, "--experiment", "vlm_shapes", "eval.size=64", "--out", out)
    assert ended.code == 0, ended.output
    (row,) = json.loads(out.read_text())["sets"]
    assert row["eval/held_out/accuracy"] == pytest.approx(accuracy)
