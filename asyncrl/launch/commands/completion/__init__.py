"""`python -m asyncrl.launch completion bash|zsh`: print a script that completes commands, experiments and settings.

The script holds all names, so that a tab starts no Python. Experiments of `--config-dir DIR` are read from that folder
at the tab. Run the command again after an update of asyncrl.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from string import Template
from typing import Any

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import experiment_folders, settings
from asyncrl.launch.commands import COMMANDS, OF_EXPERIMENTS
from asyncrl.launch.help import help_page
from asyncrl.runtime.settings import EXIT_OK
from asyncrl.trainer.supervised.settings import SFTConfig

SHELLS = ("bash", "zsh")
SHARED = Path(__file__).with_name("completion.sh")
"""Functions for both shells, as a template; the neighbouring file named after a shell calls them."""
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"{program} completion",
        description="Print a script that completes commands, experiments, settings and options.",
    )
    parser.add_argument("shell", choices=SHELLS)
    args = parser.parse_args(argv)
    print(script(args.shell), end="")
    return EXIT_OK


def script(shell: str) -> str:
    """Return the script for `shell`."""
    files = {file.stem: file for folder in experiment_folders(None) for file in sorted(folder.glob("*.yaml"))}
    supervised = [name for name, file in files.items() if "sft_schema" in file.read_text(encoding="utf-8")]
    options = {command: _options(help_of(command)) for command in COMMANDS}
    shared = Template(SHARED.read_text(encoding="utf-8")).substitute(
        commands=" ".join(COMMANDS),
        experiments=" ".join(files),
        supervised=" ".join(supervised),
        settings=" ".join(path for path, _, _ in settings(ExperimentConfig)),
        supervised_settings=" ".join(path for path, _, _ in settings(SFTConfig)),
        of_experiments=" ".join(sorted(OF_EXPERIMENTS)),
        choices="\n".join(_choices(ExperimentConfig)),
        options="\n".join(f"        {name}) echo '{' '.join(each)}' ;;" for name, each in options.items()),
        launch_options=" ".join(_options(help_of(None))),
    )
    return f"{shared}\n{SHARED.with_suffix(f'.{shell}').read_text(encoding='utf-8')}"


def help_of(command: str | None) -> str:
    """Return the text of `COMMAND --help`; None: of `--help`."""
    if command is None:
        return help_page(None)
    module = importlib.import_module(f"asyncrl.launch.commands.{command}")
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        module.main(["--help"], "python -m asyncrl.launch")
    return output.getvalue()


def _options(text: str) -> list[str]:
    return list(dict.fromkeys(_OPTION.findall(text)))


def _choices(schema: type[Any]) -> Iterator[str]:
    """Yield a line of the shell's `case` for each setting with a fixed set of values."""
    for path, kind, info in settings(schema):
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            values = [str(each) for each in kind]
        elif kind is bool:
            values = ["true", "false"]
        else:
            values = [str(each) for each in info.choices or ()]
        if values:
            yield f"        {path}) echo '{' '.join(values)}' ;;"
