"""`asyncrl install NAME ...`: install packages that conflict with asyncrl's, each in its own virtual environment."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path

_SCRIPT = "install_{}.sh"


def installers_dir() -> Path:
    """Return the folder of the scripts: inside the installed package, or beside it in a source tree."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "installers"
    return installed if installed.is_dir() else package.parent / "launchers"


def main(argv: Sequence[str], program: str) -> int:
    """Run the command with the arguments after `install`; return the exit code of the script."""
    scripts = sorted(installers_dir().glob(_SCRIPT.format("*")))
    names = [path.stem.removeprefix("install_") for path in scripts]
    parser = argparse.ArgumentParser(
        prog=f"{program} install",
        description="Install a package that clashes with asyncrl's into a virtual environment; print its interpreter.",
    )
    parser.add_argument("name", choices=names, help="package")
    parser.add_argument("args", nargs="*", help="verifiers: VERSION [FOLDER]; sglang_cpu and sglang_gpu: [FOLDER]")
    args = parser.parse_args(argv)
    script = installers_dir() / _SCRIPT.format(args.name)
    return subprocess.run(["bash", str(script), *args.args], check=False).returncode
