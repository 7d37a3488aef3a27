"""Install agent programs in the versions with which the endpoint is tested, each into a folder of its own.

    install_programs.py [FOLDER [NAME...]]        FOLDER is .programs by default; without names: all programs

Prints the executable of each. Programs of npm need Node 20 or newer, openhands needs Python 3.12. Python programs are
installed by uv, or by pip if there is no uv. All of them need 3 GB and four minutes; a second call does nothing.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

AS_OF = "2026-11-28"
"""What the programs depend on is as new as it was on this day; pip takes today's."""
NODE = 20
"""Oldest major version of Node for all programs."""
STAMP = ".asyncrl-program"


@dataclass(frozen=True)
class Program:
    """A program as its registry has it.

    Attributes:
        requirements: packages with their versions; the first one is the program.
        command: name of the executable.
        registry: `npm` or `pypi`.
        script: script of the first package that puts the executable in its place; npm 11 does not run it.
        python: the interpreter that it needs; empty: this one.
    """

    requirements: tuple[str, ...]
    command: str
    registry: str = "pypi"
    script: str = ""
    python: str = ""

    @property
    def version(self) -> str:
        return re.split("==|(?<=.)@", self.requirements[0])[-1]


PROGRAMS: Mapping[str, Program] = {
    "claude-code": Program(("@anthropic-ai/claude-code@2.1.197",), "claude", "npm", "install.cjs"),
    "codex": Program(("@openai/codex@0.171.0",), "codex", "npm"),
    "opencode": Program(("opencode-ai@1.18.33",), "opencode", "npm", "postinstall.mjs"),
    "pi": Program(("@mariozechner/pi-coding-agent@0.73.1",), "pi", "npm"),
    "qwen-code": Program(("@qwen-code/qwen-code@0.15.10",), "qwen", "npm"),
    "mini-swe-agent": Program(("mini-swe-agent==2.4.6",), "mini"),
    "openhands": Program(("openhands-sdk==1.58.2", "openhands-tools==1.58.2"), "python", python="python3.12"),
    "aider": Program(("aider-chat==0.86.2",), "aider"),
    "smolagents": Program(("smolagents[openai]==1.26.0",), "python"),
    "qwen-agent": Program(("qwen-agent==0.0.34", "numpy", "tqdm", "soundfile", "python-dateutil"), "python"),
}


def executable(folder: Path, name: str) -> Path:
    """Return where program `name` is started, in the folder of all programs."""
    return folder / name / "bin" / PROGRAMS[name].command


def install(folder: Path, name: str) -> None:
    """Install program `name` below `folder`, unless it is there in this version."""
    program, root = PROGRAMS[name], folder / name
    stamp, wanted = root / STAMP, f"{program} {AS_OF}"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    if not stamp.is_file() and root.exists() and (not root.is_dir() or any(root.iterdir())):
        sys.exit(f"{root} is not by this command, which would replace it; name another FOLDER, or move it away")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    stamp.write_text(f"{program}")  # of an installation that is not complete
    (_from_npm if program.registry == "npm" else _from_pypi)(program, root)
    stamp.write_text(wanted)


def _from_npm(program: Program, root: Path) -> None:
    node = shutil.which("node")
    found = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout if node else "none"
    if not re.match(r"v(\d+)", found) or int(found[1:].partition(".")[0]) < NODE or not shutil.which("npm"):
        sys.exit(f"{program.requirements[0]} needs npm, and Node {NODE} or newer; node here: {found.strip()}")
    quiet = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")
    place = ("--global", "--prefix", str(root))
    _run("npm", "install", *place, *quiet, "--ignore-scripts", f"--before={AS_OF}", *program.requirements)
    if program.script:
        package = root / "lib" / "node_modules" / program.requirements[0].rpartition("@")[0]
        _run("node", program.script, cwd=package)


def _from_pypi(program: Program, root: Path) -> None:
    python = program.python or sys.executable
    if shutil.which(python) is None:
        sys.exit(f"{program.requirements[0]} needs {program.python} on the PATH")
    if shutil.which("uv"):
        _run("uv", "venv", "--quiet", "--allow-existing", "--python", python, str(root))
        install = ("uv", "pip", "install", "--quiet", "--python", str(root / "bin" / "python"))
        _run(*install, f"--exclude-newer={AS_OF}", *program.requirements)
    else:
        _run(python, "-m", "venv", str(root))
        pip = (str(root / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        _run(*pip, *program.requirements)


def _run(*command: str, cwd: Path | None = None) -> None:
    code = subprocess.run(command, check=False, stdout=sys.stderr, stdin=subprocess.DEVNULL, cwd=cwd).returncode
    if code:
        sys.exit(f"failed with {code}: {shlex.join(command)}")


def main(arguments: Sequence[str]) -> None:
    """Install the programs that the arguments name, and print where they are started."""
    folder = Path(arguments[0] if arguments else ".programs").absolute()
    names = arguments[1:] or list(PROGRAMS)
    if unknown := sorted(set(names) - PROGRAMS.keys()):
        sys.exit(f"no program {', '.join(unknown)}: there are {', '.join(PROGRAMS)}")
    for name in names:
        install(folder, name)
        print(executable(folder, name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
