"""`doctor RUN --plan`: rates from a run's files, and what the simulation predicts with them.

The runs are those of `virtual_run`, another model than the simulator, so that one checks the other.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.launch.commands import doctor
from asyncrl.observe.doctor.measured import measure
from asyncrl.observe.history import History
from asyncrl.verify.simulator.plans.fastest_split import plan
from asyncrl.verify.simulator.plans.measured_run import MeasuredRun, measured_run
from asyncrl.verify.simulator.simulation import simulate
from tests.unit.observe.doctor.virtual_run import Knobs, VirtualRun

NEAR = 0.15
LONG_ETA = 8
"""The virtual trainer takes any rollout, however old: with it none is too old."""
SMALL = Knobs(batch=8, group=2, eta=LONG_ETA, places=12, speed=1000.0, steps=16)
KNOBS = {
    "generation-bound": SMALL,
    "trainer-bound": replace(SMALL, train_s=1.5),
    "synchronous": Knobs(eta=0),
    "slow environment": replace(SMALL, env_s=1.0),
    "full servers": replace(SMALL, places=32, speed=500.0),
}


def played(knobs: Knobs, folder: Path) -> tuple[MeasuredRun, float]:
    true_s = VirtualRun(knobs, folder).play()
    history = History(folder)
    measured = measure(history)
    assert measured is not None
    return measured_run(history, measured), true_s


@pytest.mark.parametrize("name", KNOBS)
def test_the_prediction_for_a_run_as_it_was_is_near_what_it_had(name: str, tmp_path: Path) -> None:
    run, true_s = played(KNOBS[name], tmp_path / "run")
    assert run.step_s == pytest.approx(true_s, rel=0.05)
    assert simulate(run.setup).step_s == pytest.approx(true_s, rel=NEAR)


def test_a_run_whose_trainer_is_the_bottleneck_gets_training_ranks(tmp_path: Path) -> None:
    knobs = replace(SMALL, train_s=3.0)
    run, true_s = played(knobs, tmp_path / "run")
    found = plan(run, 4)
    assert found.own.step_s == pytest.approx(true_s, rel=NEAR)
    assert found.best.training == 2
    assert found.best.eta < LONG_ETA, "older tokens have to be worth it"
    faster = replace(knobs, train_s=1.5, speed=knobs.speed * found.best.servers, places=found.best.places)
    assert found.best.step_s == pytest.approx(VirtualRun(faster, tmp_path / "faster").play(), rel=NEAR)


def test_a_run_whose_servers_are_the_bottleneck_gets_servers(tmp_path: Path) -> None:
    run, true_s = played(KNOBS["full servers"], tmp_path / "run")
    found = plan(run, 4)
    assert found.best.servers > found.best.training
    assert found.best.step_s < 0.7 * true_s


def test_servers_and_copies_of_the_model_keep_their_devices(tmp_path: Path) -> None:
    run, _ = played(KNOBS["generation-bound"], tmp_path / "run")
    wide = replace(run, server_devices=2, layout=type(run.layout)(1, 2, 1))
    assert {(each.layout, each.servers) for each in plan(wide, 6).candidates} == {("t2", 2), ("d2t2", 1)}
    with pytest.raises(ValueError, match="--plan 3: a server and a copy of the trained model take 4 devices"):
        plan(wide, 3)


def test_the_command_prints_settings_figures_and_assumptions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "exp" / "run"
    VirtualRun(KNOBS["trainer-bound"], folder).play()
    assert doctor.main([str(folder), "--plan", "2", "--json"], "asyncrl") == 0
    told = json.loads(capsys.readouterr().out)
    best = told["best"]
    assert told["settings"].startswith(f"trainer.parallel={best['layout']} generation.servers={best['servers']} ")
    assert {"decode_step_s", "train_token_s"} <= told["rates"].keys()
    assert doctor.main([str(folder), "--plan", "2"], "asyncrl") == 0
    shown = capsys.readouterr().out
    assert told["settings"] in shown
    assert "assumed: " in shown
    assert "The last row is the run as it was" in shown


def test_a_plan_from_a_host_without_free_cores_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "exp" / "run"
    VirtualRun(KNOBS["trainer-bound"], folder).play()
    file = folder / "observed" / "generation_server-0.jsonl"
    assert doctor.main([str(folder), "--plan", "2"], "asyncrl") == 0
    assert "hosts whose cores are free" not in " ".join(capsys.readouterr().out.split())
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line | {"no_core_s": line["at"] - lines[0]["at"]}) + "\n" for line in lines))
    assert doctor.main([str(folder), "--plan", "2"], "asyncrl") == 0
    assert "hosts whose cores are free" in " ".join(capsys.readouterr().out.split())


def test_a_run_without_figures_of_its_servers_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "exp" / "run"
    VirtualRun(KNOBS["trainer-bound"], folder).play()
    (folder / "observed" / "generation_server-0.jsonl").unlink()
    assert doctor.main([str(folder), "--plan", "3"], "asyncrl") == 2
    assert "observed/ has no lines of generation servers" in capsys.readouterr().err
