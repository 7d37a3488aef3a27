"""`doctor RUN --plan`: rates from a run's files, and what the formula predicts with them for runs of `virtual_run`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.run_dir import CONFIG_FILE
from asyncrl.launch.commands import doctor
from asyncrl.launch.commands.doctor.plan import MeasuredRun, _server_devices, measured_run, plan, predicted
from asyncrl.observe.doctor.measured import measure
from asyncrl.observe.history import History
from tests.unit.observe.doctor.virtual_run import Knobs, VirtualRun

NEAR = 0.15
LONG_ETA = 8
"""The virtual trainer takes any rollout, however old: with it none is too old."""
SMALL = Knobs(batch=8, group=2, eta=LONG_ETA, slots=12, speed=1000.0, steps=16)
KNOBS = {
    "generation-bound": SMALL,
    "trainer-bound": replace(SMALL, train_s=1.5),
    "synchronous": Knobs(eta=0),
    "slow environment": replace(SMALL, env_s=1.0),
    "full servers": replace(SMALL, slots=32, speed=500.0),
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
    own = predicted(run, run.layout, run.servers, run.eta, run.slots)
    assert own.step_s == pytest.approx(true_s, rel=NEAR)


def test_a_run_whose_trainer_is_the_bottleneck_gets_training_ranks(tmp_path: Path) -> None:
    knobs = replace(SMALL, train_s=3.0)
    run, true_s = played(knobs, tmp_path / "run")
    found = plan(run, 4)
    assert found.own.step_s == pytest.approx(true_s, rel=NEAR)
    assert found.best.eta < LONG_ETA, "older tokens have to be worth it"
    true = {}
    for each in found.candidates:
        speed, ranks = knobs.speed * each.servers, each.training
        split = replace(knobs, train_s=knobs.train_s / ranks, speed=speed, slots=each.slots, eta=each.eta)
        true[each] = VirtualRun(split, tmp_path / f"{ranks}-{each.eta}").play()
        assert 0.9 * true[each] < each.step_s < 1.6 * true[each], "what the run did not show is taken to be slow"
    assert true[found.best] < 1.1 * min(true.values())


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
    reported = json.loads(capsys.readouterr().out)
    best = reported["best"]
    assert reported["settings"].startswith(f"trainer.parallel={best['layout']} generation.servers={best['servers']} ")
    assert {"sequence_s", "train_s"} <= reported["rates"].keys()
    assert doctor.main([str(folder), "--plan", "2"], "asyncrl") == 0
    shown = capsys.readouterr().out
    assert reported["settings"] in shown
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


@pytest.mark.parametrize(
    ("settings", "devices"),
    [
        ({}, 1),
        ({"backend": "sglang"}, 1),
        ({"backend": "sglang", "sglang": {"tensor_parallel": 2, "args": {"pp_size": 2}}}, 4),
        ({"backend": "embedded", "sglang": {"tensor_parallel": 2}}, 1),
    ],
)
def test_a_servers_devices_are_those_of_its_engines_settings(
    settings: dict[str, object], devices: int, tmp_path: Path
) -> None:
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"generation": settings}))
    assert _server_devices(History(tmp_path)) == devices
