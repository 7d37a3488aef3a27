"""Agent programs are installed once for each version."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers import install_programs

FAKE = """#!/bin/sh
echo "$0 $@" >> {log}
[ ! -e {broken} ]
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stand-ins of uv, npm and node are called with; they fail while there is a file `broken`."""
    log = tmp_path / "log"
    for name in ("uv", "npm", "node"):
        (tmp_path / name).write_text(FAKE.format(log=log, broken=tmp_path / "broken"))
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return log


def test_a_program_is_installed_once_for_each_version(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "programs")
    (tmp_path / "broken").touch()
    with pytest.raises(SystemExit, match="failed with 1: uv venv"):
        install_programs.main([folder, "aider"])
    (tmp_path / "broken").unlink()
    log.unlink()
    for _ in range(2):
        install_programs.main([folder, "aider"])
        made, installed = log.read_text().splitlines()
        assert made.endswith(f"{folder}/aider")
        assert installed.endswith("--exclude-newer=2026-11-28 aider-chat==0.86.2")
        assert capfd.readouterr().out == f"{folder}/aider/bin/aider\n"
    monkeypatch.setattr(install_programs, "AS_OF", "2026-11-29")
    install_programs.main([folder, "aider"])
    assert len(log.read_text().splitlines()) == 4


def test_what_is_missing_is_said(tmp_path: Path, log: Path) -> None:
    with pytest.raises(SystemExit, match="no program vim: there are claude-code, codex"):
        install_programs.main([str(tmp_path), "aider", "vim"])
    (tmp_path / "node").write_text("#!/bin/sh\necho v18.20.4\n")
    with pytest.raises(SystemExit, match=r"claude-code@2.1.197 needs npm, and Node 20 or newer; node here: v18.20.4"):
        install_programs.main([str(tmp_path), "claude-code"])


def test_a_folder_that_has_something_else_is_left_alone(tmp_path: Path, log: Path) -> None:
    (tmp_path / "aider").mkdir()
    (tmp_path / "aider" / "work.txt").write_text("mine")
    with pytest.raises(SystemExit, match=f"{tmp_path}/aider is not by this command"):
        install_programs.main([str(tmp_path), "aider"])
    assert (tmp_path / "aider" / "work.txt").read_text() == "mine"
    assert not log.exists()
    (tmp_path / "aider" / "work.txt").unlink()
    install_programs.main([str(tmp_path), "aider"])
