"""Commands of `python -m asyncrl.launch`: each has a module or folder here, with its own `main`.

`USES` is the only table of them: `--help`, the shells' completion and docs/commands.md are made from it.
"""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.describe import list_experiments, program

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
    "doctor RUN": "explain why a run is slow, stands still or learns nothing",
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
_PAGE = """\
{program} <experiment> [setting=value ...] [options]
{program} COMMAND --help

commands:
{commands}
(`asyncrl` and `python -m asyncrl.launch` are the same command)

options:
  --help             this page; with an experiment: its settings
  --cfg job          print the resolved config and stop
  --dry-run          print the processes a run would start and stop
  --show-allocation  print where each training rank goes and what memory it will need, and stop
  --show-graph [F]   print the training step's graph and stop, or write it to F as SVG
  --config-dir DIR   folder of your own experiments, beside the built-in ones
"""


def help_page(folder: Path | None) -> str:
    """Return the usage, and every experiment with its one-line description, those of the user's `folder` first.

    Raises:
        ConfigError: there is no such folder.
    """
    width = max(map(len, USES))
    commands = "\n".join(f"  {use:<{width}}  {what}" for use, what in USES.items())
    return _PAGE.format(program=program(), commands=commands) + list_experiments(folder)
