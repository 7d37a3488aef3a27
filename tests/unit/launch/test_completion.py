"""Completion in a real bash and a real zsh: what a tab offers, and that a tab starts no Python."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from asyncrl.launch.commands import COMMANDS
from asyncrl.launch.commands.completion import script

BASH = shutil.which("bash")
ZSH = shutil.which("zsh")
pytestmark = pytest.mark.skipif(BASH is None, reason="no bash")
LAUNCH = "python -m asyncrl.launch"
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "asyncrl.bash"
    path.write_text(script("bash"))
    return path


def offered(file: Path, line: str, folder: Path) -> list[str]:
    """Replies to a tab at the end of `line`, without anything on PATH that could be started."""
    asked = 'source "$1"; COMP_LINE=$2; COMP_POINT=${#2}; _asyncrl; printf "%s\\n" "${COMPREPLY[@]}"'
    assert BASH is not None
    done = subprocess.run(
        [BASH, "--norc", "-c", asked, "bash", str(file), line],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env={"PATH": "/nonexistent", "COMP_WORDBREAKS": " \t\n\"'><=;|&(:"},
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("start", [LAUNCH, "asyncrl", "/usr/bin/python3 -m asyncrl.launch"])
def test_commands_and_experiments_come_first(file: Path, tmp_path: Path, start: str) -> None:
    found = offered(file, f"{start} ", tmp_path)
    assert set(COMMANDS) <= set(found)
    assert {"async_ppo", "sft"} <= set(found)
    assert offered(file, f"{start} async_da", tmp_path) == ["async_dapo"]


def test_settings_follow_an_experiment(file: Path, tmp_path: Path) -> None:
    assert offered(file, f"{LAUNCH} async_ppo optimizer.l", tmp_path) == ["optimizer.lr="]
    assert offered(file, f"{LAUNCH} async_ppo seed=3 rollout.pac", tmp_path) == ["rollout.pacing="]
    assert "warmup_steps=" in offered(file, f"{LAUNCH} sft ", tmp_path)
    assert "max_head_offpolicyness=" in offered(file, f"{LAUNCH} doctor async_ppo max_", tmp_path)


def test_values_of_a_setting_follow_its_name(file: Path, tmp_path: Path) -> None:
    """Bash replaces only the word behind the `=`, so only that is offered."""
    assert offered(file, f"{LAUNCH} async_ppo rollout.pacing=", tmp_path) == ["eager", "deadline"]
    assert offered(file, f"{LAUNCH} async_ppo model.lora.publish=", tmp_path)
    (tmp_path / "rows.jsonl").touch()
    assert offered(file, f"{LAUNCH} async_ppo dataset.path=ro", tmp_path) == ["rows.jsonl"]


def test_options_are_those_of_the_command(file: Path, tmp_path: Path) -> None:
    assert "--plan" in offered(file, f"{LAUNCH} doctor --", tmp_path)
    assert "--report" in offered(file, f"{LAUNCH} dashboard runs/a --re", tmp_path)
    assert "--dry-run" in offered(file, f"{LAUNCH} async_ppo --", tmp_path)


def test_experiments_of_a_folder_of_ones_own_are_read_at_the_tab(file: Path, tmp_path: Path) -> None:
    (tmp_path / "yard.yaml").touch()
    assert offered(file, f"{LAUNCH} --config-dir . ya", tmp_path) == ["yard"]
    assert offered(file, f"{LAUNCH} ya", tmp_path) == []


def test_other_python_commands_are_left_alone(file: Path, tmp_path: Path) -> None:
    assert offered(file, "python -m pytest te", tmp_path) == []


def typed(shell: list[str], file: Path, line: str, folder: Path) -> str:
    """Type `line` into an interactive `shell`; return the arguments of the command that Enter then starts."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*shell, "-i"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=folder,
        env={"PS1": "> ", "TERM": "dumb", "HOME": str(folder), "PATH": "/nonexistent"},
    )
    os.close(slave)
    reported = folder / "told"
    functions = "".join(
        f'{name}() {{ [ "$1" = --version ] || echo "$*" >{reported}; }}\n' for name in ("python", "asyncrl")
    )
    os.write(master, f"source {file}\n{functions}{line}\n".encode())
    seen, deadline = "", time.monotonic() + LIMIT_S
    try:
        while not (reported.exists() and reported.read_text()) and time.monotonic() < deadline:
            if select.select([master], [], [], 0.1)[0]:
                seen += os.read(master, 65536).decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert reported.exists(), seen
    return reported.read_text().strip()


def test_a_tab_in_an_interactive_bash_completes(file: Path, tmp_path: Path) -> None:
    assert BASH is not None
    line = f"{LAUNCH} async_da\trollout.pac\td\t"
    assert typed([BASH, "--norc", "--noprofile"], file, line, tmp_path).endswith(
        "-m asyncrl.launch async_dapo rollout.pacing=deadline"
    )


@pytest.mark.skipif(ZSH is None, reason="no zsh")
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (f"{LAUNCH} async_da\trollout.pac\td\t", "-m asyncrl.launch async_dapo rollout.pacing=deadline"),
        ("asyncrl doctor --pl\t4", "doctor --plan 4"),
        (f"{LAUNCH} doctor async_ppo optimizer.l\t3", "-m asyncrl.launch doctor async_ppo optimizer.lr=3"),
        (f"{LAUNCH} async_ppo dataset.path=ro\tseed=1", "-m asyncrl.launch async_ppo dataset.path=rows.jsonl seed=1"),
        (f"{LAUNCH} --config-dir ow\t ya\tseed=1", "-m asyncrl.launch --config-dir own yard seed=1"),
        ("python scr\t-q", "script.py -q"),
    ],
)
def test_a_tab_in_an_interactive_zsh_completes(line: str, wanted: str, tmp_path: Path) -> None:
    assert ZSH is not None
    (tmp_path / "asyncrl.zsh").write_text(script("zsh"))
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "script.py").touch()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "yard.yaml").touch()
    assert typed([ZSH, "-f"], tmp_path / "asyncrl.zsh", line, tmp_path) == wanted
