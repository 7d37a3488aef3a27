"""Commands of `python -m asyncrl.launch`, each with a module or folder here that has its own `main`, and how each
refuses what is wrong.

`USES` is the only table of commands: `--help`, the shells' completion and docs/commands.md are made from it.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path

from asyncrl.config.secrets import hide
from asyncrl.runtime.settings import EXIT_CONFIG

USES = {
    "init FOLDER": "write a small project of your own, which runs at once",
    "eval MODEL": "evaluate a run's policy, a Hugging Face folder or a model on the hub",
    "show RUN": "print samples that a run kept",
    "install NAME [VERSION] [FOLDER]": "make a real chat model (smollm2), or an environment for verifiers or SGLang",
    "export RUN [--step N] OUT": "write a run's policy as a Hugging Face folder",
    "rollout EXPERIMENT": "generate and keep samples, train nothing",
    "replay EXPERIMENT samples=FOLDER": "train on kept samples, without servers",
    "audit RUN": "check what a run left on the disk",
    "attach RUN": "show a run that was started with --detach",
    "join RUN --kind KIND": "add generation_servers or rollout_workers to a run in progress",
    "chaos EXPERIMENT": "run the experiment under kills, pauses and broken connections",
    "doctor EXPERIMENT": "make every check of a start, and start nothing",
    "doctor RUN": "explain why a run is slow, stalled or learns nothing",
    "dashboard RUN": "show runs on a page, live or as one file",
    "clean RUN": "remove what an ended run does not need",
    "trace RUN": "write a run's timeline, for ui.perfetto.dev or as a picture",
    "completion bash|zsh": "print a script that completes commands, experiments and settings",
}
"""Arguments of each command, and what it does."""
COMMANDS = tuple(sorted({use.split()[0] for use in USES}))
"""Commands, which are not names of experiments."""
OF_EXPERIMENTS = frozenset(use.split()[0] for use in USES if use.split()[1] == "EXPERIMENT")
"""Commands that take an experiment and settings."""


def program() -> str:
    """Return the command as the user called it."""
    return "asyncrl" if Path(sys.argv[0]).stem == "asyncrl" else "python -m asyncrl.launch"


ERROR = "error: "
"""Begin of each line that `refuse` prints."""


def refuse(message: object) -> int:
    """Print each line of `message` as an error; return the exit code.

    Secrets are hidden. On a terminal, lines are wrapped between words. Otherwise each error is one line.
    """
    for line in hide(str(message)).splitlines():
        text = f"{ERROR}{line}"
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns
            text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
        print(text, file=sys.stderr)
    return EXIT_CONFIG
