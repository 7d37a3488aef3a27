"""`python -m asyncrl.launch <experiment> [setting=value ...]`, or `asyncrl ...`: check the experiment, then run it; or
run one of the `commands`.

Exit codes: 0 done, 1 failed, 2 a setting is wrong (nothing was started), 4 another run holds the trial, 130 stopped by
Ctrl-C or SIGTERM after a checkpoint.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.launch.commands import COMMANDS, program, refuse
from asyncrl.runtime.settings import EXIT_CONFIG, EXIT_INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    _open_standard_streams()
    try:
        return _main(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    except PermissionError as error:
        if error.filename is None:
            raise
        return refuse(f"{error.filename}: {error.strerror}; what a run writes is its user's alone: use it as that user")
    except (BlockingIOError, RuntimeError) as error:
        where = traceback.extract_tb(error.__traceback__)
        if isinstance(error, BlockingIOError) or any(frame.filename == threading.__file__ for frame in where[-2:]):
            return refuse(
                "no further process or thread can be started: the limit of this user (ulimit -u) or of the container "
                "(pids.max) is reached; raise it: each process of a run has some thirty threads"
            )
        if where[-1].name != "expanduser":
            raise
        return refuse(
            f"'~' stands for no folder: HOME is not set, and user {os.getuid()} has no home in the password file; set "
            "HOME to a folder of this user, or give whole paths (fileroot=/...)"
        )


def _open_standard_streams() -> None:
    """Open what the caller closed (`>&-`, some schedulers) to nowhere: else the next pipe would get its number, and be
    taken for the output of every process that is started.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - as long as this process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _main(argv: list[str]) -> int:
    if os.getcwd() not in sys.path:  # `python -m` adds the current folder; import paths must work alike in `asyncrl`
        sys.path.insert(0, os.getcwd())
    if argv and argv[0] in COMMANDS:
        command = importlib.import_module(f"asyncrl.launch.commands.{argv[0]}")
        return int(command.main(argv[1:], program()))
    args = _parse(argv, program())
    import msgspec  # here and below, so that `main` says that Ctrl-C ended it while it still imported

    from asyncrl.config.experiment import ExperimentConfig
    from asyncrl.config.load import load_experiment
    from asyncrl.config.setting import ConfigError

    folder = Path(args.config_dir) if args.config_dir else None
    try:
        if args.experiment is None:
            from asyncrl.launch.help import fitted, help_page

            _print(fitted(help_page(folder)))
            return 0 if args.help else EXIT_CONFIG
        from asyncrl.launch.before_start.data import check_data
        from asyncrl.launch.before_start.setting_checks import complete, warnings

        values: dict[str, Any] = {}
        if args.settings_file is not None:
            given, values = msgspec.msgpack.decode(Path(args.settings_file).read_bytes())
            args.overrides = [*given, *args.overrides]
        config = load_experiment(args.experiment, args.overrides, folder, values=values, commands=COMMANDS)
        if args.help:
            from asyncrl.launch.help import experiment_help, fitted

            _print(fitted(experiment_help(args.experiment, config)))
            return 0
        complete(config)
        if args.cfg:
            from asyncrl.launch.help import resolved_yaml

            _print(resolved_yaml(config).rstrip("\n"))
            return 0
        if args.show_graph is not None:
            from asyncrl.launch.previews import show_graph

            return show_graph(config, args.show_graph)
        check_data(config, folder)
        for line in warnings(config) if isinstance(config, ExperimentConfig) else ():
            print(f"warning: {line}", file=sys.stderr)
    except ConfigError as error:
        return refuse(error)
    if args.show_allocation:
        from asyncrl.launch.show_allocation import show_allocation

        return show_allocation(config, folder)
    if args.dry_run:
        from asyncrl.launch.previews import dry_run

        return dry_run(config, [item for item in argv if item != "--dry-run"])
    from asyncrl.launch.train import train

    again = [item for item in argv if item != "--detach"] if args.detach else None
    return train(config, folder, again=again, detached=args.detached)


def _print(text: str) -> None:
    """Print for a reader who may stop reading: `--help | head` ends quietly."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it at its end


def _parse(argv: list[str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=program, add_help=False, allow_abbrev=False)
    parser.add_argument("experiment", nargs="?", help="name of an experiment")
    parser.add_argument("overrides", nargs="*", help="setting=value")
    parser.add_argument("--help", "-h", action="store_true", help="the experiments, or the settings of one")
    parser.add_argument("--cfg", choices=["job"], help="print the resolved config and stop")
    parser.add_argument("--dry-run", action="store_true", help="print the processes a run would start and stop")
    parser.add_argument(
        "--show-allocation",
        action="store_true",
        help="print where each training rank and its roles go and what memory each will need, and stop",
    )
    parser.add_argument(
        "--show-graph",
        nargs="?",
        const="-",
        metavar="FILE.svg",
        help="print the training step's graph, or write it as SVG",
    )
    parser.add_argument(
        "--detach",
        action="store_true",
        help="start the run and leave it running; the same command again shows it, and Ctrl-C there ends it",
    )
    parser.add_argument("--detached", action="store_true", help=argparse.SUPPRESS)  # set by --detach
    parser.add_argument("--settings-file", help=argparse.SUPPRESS)  # set by asyncrl.run
    parser.add_argument("--config-dir", metavar="DIR", help="folder of your own experiments")
    args, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        name, _, value = unknown[0].lstrip("-").partition("=")
        name = name.replace("-", "_")
        parser.print_usage(sys.stderr)
        parser.exit(refuse(f"unknown option {unknown[0]}; a setting has no dashes: {name}={value or 'VALUE'}"))
    return args


if __name__ == "__main__":
    sys.exit(main())
