"""`clean`: what an ended run does not need."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from asyncrl.comm import names
from asyncrl.comm.files import FileLock
from asyncrl.launch.__main__ import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "mine" / "trial0"
    files = [
        "config.yaml", "lock", "metrics.jsonl", "ledger/000001.jsonl",
        *(f"checkpoints/v{version}/state.json" for version in (5, 10)),
        *(f"weights/actor/v{version}/model.safetensors" for version in (8, 9, 10)),
        "spilled/0/x", "staged/host/y",
    ]  # fmt: skip
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def left(run: Path) -> list[str]:
    return sorted(str(file.relative_to(run)) for file in run.rglob("*") if file.is_file())


KEPT = [
    "checkpoints/v10/state.json",
    "config.yaml",
    "ledger/000001.jsonl",
    "lock",
    "metrics.jsonl",
    "weights/actor/v10/model.safetensors",
]


def test_the_newest_versions_and_all_records_stay(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", str(run), "--yes"]) == 0
    assert left(run) == KEPT
    assert "weights/actor/v9" in capsys.readouterr().out
    assert main(["clean", str(run)]) == 0
    assert "nothing that it does not need" in capsys.readouterr().out


def test_nothing_is_removed_without_a_yes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = left(run)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert main(["clean", str(run)]) == 1
    assert left(run) == before
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert main(["clean", str(run)]) == 0
    assert left(run) == KEPT


def test_all_is_the_whole_folder(run: Path) -> None:
    assert main(["clean", str(run), "--all", "--yes"]) == 0
    assert not run.exists()


def test_a_run_that_goes_on_is_left_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    holder = names.TrialHolder("x", socket.gethostname(), "m", os.getpid(), 1, "now", str(run))
    (run / "lock").write_text(holder.encode())
    lock = FileLock(run / "lock")
    assert lock.take()
    assert main(["clean", str(run), "--all", "--yes"]) == 2
    lock.close()
    assert "is running; end it first" in capsys.readouterr().err
    assert run.exists()


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    assert main(["clean", str(tmp_path), "--all", "--yes"]) == 2
    assert tmp_path.exists()
