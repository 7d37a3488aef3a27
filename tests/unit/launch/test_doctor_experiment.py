"""`doctor EXPERIMENT`: the checks of a start, and nothing is started."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.launch.__main__ import main

SHORT = ["rollout.sampling.max_new_tokens=16", "eval.sampling.max_new_tokens=16"]


def reported(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    lines = capsys.readouterr().out.splitlines()
    return {line[2:15].strip(): f"{line[0]} {line[15:]}" for line in lines if line[:1] in "✓✗-"}


def test_what_can_start_is_told_check_by_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # where no base model was made yet
    monkeypatch.setattr("asyncrl.trainer.supervised.base_model.SHIPPED_DIR", "nothing")  # nor does the package have one
    assert main(["doctor", "async_ppo", f"fileroot={tmp_path}"]) == 0
    lines = reported(capsys)
    assert list(lines) == ["settings", "data", "model", "hosts", "devices", "code"]
    assert "100 steps of 32 x 8 answers" in lines["settings"]
    assert lines["code"].endswith("can be called as the settings say")
    assert "the base model is made at the first start" in lines["model"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("setting", ["rollout.rehearse=true", "rollout.rehearse=false"])
def test_wrong_arguments_of_code_are_told_where_nothing_is_played(
    setting: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("asyncrl.trainer.supervised.base_model.SHIPPED_DIR", "nothing")
    model = [f"model.path={tiny_model}", *SHORT] if setting.endswith("false") else []
    assert main(["doctor", "async_ppo", f"fileroot={tmp_path}", *model, setting, "agent.args={nope: 1}"]) == 2
    assert reported(capsys)["code"].startswith("✗ agent.args={'nope': 1}: ")
    assert main(["doctor", "async_ppo", f"fileroot={tmp_path}", *model, setting]) == 0
    assert reported(capsys)["code"].endswith("can be called as the settings say")


def test_a_base_model_that_nobody_knows_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "async_ppo", f"fileroot={tmp_path}", "model.base_experiment=nowhere"]) == 2
    assert reported(capsys)["model"].startswith("✗ model.base_experiment='nowhere': ")


def test_code_of_other_hosts_is_not_said_to_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("asyncrl.trainer.supervised.base_model.SHIPPED_DIR", "nothing")
    monkeypatch.setattr("asyncrl.launch.before_start.pipeline.check_reachable", lambda config: [])
    kinds = "master_worker, model_worker, gserver_manager, generation_server"
    here, there = f"address: 127.0.0.1, runs: [{kinds}]", "name: far, address: 127.0.0.2, runs: [rollout_worker]"
    hosts = ["system.launcher=ssh", f"system.hosts=[{{{here}}}, {{{there}}}]"]
    assert main(["doctor", "async_ppo", f"fileroot={tmp_path}", *hosts]) == 0
    assert reported(capsys)["code"].startswith("- not checked: all RolloutWorkers are on other hosts")


def test_a_folder_of_runs_with_an_experiments_name_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `fileroot=.` leaves it."""
    (tmp_path / "async_ppo" / "trial0").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "async_ppo", "reward.path=nothing:here"]) == 2
    assert "no module or file 'nothing'" in reported(capsys)["settings"]
    (tmp_path / "async_ppo" / "config.yaml").write_text("{}")
    assert main(["doctor", "async_ppo"]) == 1
    assert "died, step 0" in capsys.readouterr().out


def test_a_wrong_setting_is_told_and_nothing_else_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "async_ppo", "reward.path=nothing:here"]) == 2
    lines = reported(capsys)
    assert list(lines) == ["settings"]
    assert "reward.path='nothing:here': no module or file 'nothing'" in lines["settings"]


def test_a_model_is_checked_with_its_prompts_and_the_first_row(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "async_ppo", f"model.path={tiny_model}", f"fileroot={tmp_path}", *SHORT]) == 0
    lines = reported(capsys)
    assert "GiB free at" in lines["disk"]
    assert "rows; prompts of up to" in lines["prompts"]
    assert lines["first row"].endswith("agent and reward took made-up answers to it")
    assert not list(tmp_path.iterdir())


def test_a_reward_that_fails_on_the_first_row_is_told(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text("def score(data, completion):\n    return data['no such key']\n")
    settings = [f"model.path={tiny_model}", f"reward.path={reward}:score", f"fileroot={tmp_path}"]
    assert main(["doctor", "async_ppo", *settings, *SHORT]) == 2
    reported_of_row = reported(capsys)["first row"]
    assert reported_of_row.startswith("✗")
    assert "no such key" in reported_of_row


def test_a_disk_without_room_is_told(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 10))
    assert main(["doctor", "async_ppo", f"model.path={tiny_model}", f"fileroot={tmp_path}"]) == 2
    assert "choose another fileroot, or a smaller checkpoint.keep" in reported(capsys)["disk"]
