"""`asyncrl eval MODEL [setting=value ...]`: evaluate a fixed model, without a trainer.

MODEL is a Hugging Face folder, a name on the hub, or the folder of a run, whose settings are then used. Generation
servers, a GserverManager and workers are started as in training. The policy answers each set of `eval` once. The
results are printed as a table. With `--out` they are written as JSON, and so is each answer with its scores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncrl.comm.files.private_files import PRIVATE_UMASK
from asyncrl.config.run_dir import CONFIG_FILE, METRICS_FILE, read_run_config, run_dir_of
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.checks import validate
from asyncrl.launch.before_start.hub import is_hub_name, resolve_hub_names
from asyncrl.launch.before_start.prompt_checks import check_prompts
from asyncrl.launch.before_start.same_data import keep_inputs
from asyncrl.launch.before_start.served_policies import check_served_policies
from asyncrl.launch.before_start.whole_models import check_models
from asyncrl.launch.commands.eval.answers import write_measured_answers
from asyncrl.launch.commands.eval.config import evaluation_config, load_settings, policy_folder
from asyncrl.launch.refusal import refuse
from asyncrl.models.folder_checks import folder_faults
from asyncrl.observe.doctor.standing import Standing
from asyncrl.observe.history.tail import read_rows
from asyncrl.runtime.exit_codes import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from asyncrl.runtime.launcher import Launcher
from asyncrl.runtime.planning.plan_workers import with_types
from asyncrl.runtime.planning.process_kinds import Purpose
from asyncrl.runtime.trials.resume import TrialError

_MEASURED, _ANSWERS = ".json", ".jsonl"
"""File name endings of the measurements and of the answers."""


def main(argv: Sequence[str], program: str) -> int:
    """The command line after `eval`; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"{program} eval", description="Evaluate a model without training.")
    parser.add_argument("model", metavar="MODEL", help="folder of a run, Hugging Face folder, or name on the hub")
    parser.add_argument("overrides", nargs="*", metavar="setting=value")
    parser.add_argument("--step", type=int, metavar="N", help="of a run: the policy after N steps; default: the newest")
    parser.add_argument("--policy", default="", metavar="NAME", help="of a run: one of `policies` that it trains too")
    parser.add_argument(
        "--experiment", metavar="NAME", help="experiment whose settings are used; default for a run: its own"
    )
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="folder of your own experiments")
    parser.add_argument(
        "--out",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="write the results there too: what was measured (FILE.json), or each answer with its scores "
        "(FILE.jsonl); may be given twice",
    )
    args = parser.parse_intermixed_args(argv)
    os.umask(PRIVATE_UMASK)
    scratch = Path(tempfile.mkdtemp(prefix="asyncrl-eval-"))
    code = EXIT_CONFIG
    try:
        code = _evaluate(args, scratch)
    except (ConfigError, TrialError) as error:
        refuse(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = EXIT_INTERRUPTED
    if code in (EXIT_OK, EXIT_CONFIG):
        shutil.rmtree(scratch)
    else:
        print(f"logs are in {scratch}", file=sys.stderr)
    return code


def _evaluate(args: argparse.Namespace, scratch: Path) -> int:
    """Run the evaluation that `args` describe; files of the launch are below `scratch`. Return the exit code."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    named = str(args.model)
    given = Path(named).expanduser()
    is_run = (given / CONFIG_FILE).is_file()
    if not is_run and not (given / "config.json").is_file() and not is_hub_name(named):
        why = next(folder_faults(given), "no config.json")
        raise ConfigError(f"{named!r} is not a run (it has no {CONFIG_FILE}) and not a Hugging Face folder: {why}")
    if not is_run and args.experiment is None:
        raise ConfigError("--experiment: name an experiment for the settings; a Hugging Face folder has none")
    if args.step is not None and not is_run:
        raise ConfigError(f"--step {args.step}: {named!r} is not a run and has no steps")
    if args.policy and not is_run:
        raise ConfigError(f"--policy {args.policy}: {named!r} is not a run; give the folder of the policy itself")
    for out in args.out:
        if out.suffix not in (_MEASURED, _ANSWERS):
            raise ConfigError(
                f"--out {out}: name a file that ends in {_MEASURED}, for what was measured, or in {_ANSWERS}, for the "
                "answers"
            )
        if not out.expanduser().absolute().parent.is_dir():
            raise ConfigError(f"--out {out}: its folder is not there; make it first")
    answers = any(out.suffix == _ANSWERS for out in args.out)
    config = load_settings(args, given if is_run else None, scratch)
    config.model.path = str(policy_folder(given, args.step, scratch, args.policy)) if is_run else named
    for policy in config.policies if is_run else ():
        if policy.trained and policy.name in read_run_config(given).trained_policies:
            policy.path = str(policy_folder(given, args.step, scratch, policy.name))
    resolve_hub_names(config)
    config = evaluation_config(config, scratch, answers=answers)
    validate(config)
    check_models(config, evaluates=True)
    for note in check_served_policies(config):
        console.print(f"WARNING: {note}")
    for group, found in check_prompts(config, of_evaluation_alone=True).items():
        for line in found.lines(config.dataset.max_prompt_tokens, config.dataset.overlong):
            console.print(f"{group}: {line}")
    launcher = Launcher(with_types(config, Purpose.evaluate), _Progress(console), Purpose.evaluate)
    launcher.prepare()
    keep_inputs(config, training=False)
    code = launcher.run()
    rows = read_rows(run_dir_of(config) / METRICS_FILE)
    console.print(_table(named, rows))
    complete = True
    for out in (out.expanduser() for out in args.out):
        if out.suffix == _MEASURED:
            measured = {"model": named, "step": args.step, "sets": rows}
            out.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
        else:
            complete = write_measured_answers(config, out, rows) and complete
    if code == EXIT_OK and (not complete or any("failed" in row for row in rows)):
        return EXIT_FAILED
    return code


class _Progress:
    """Prints the launcher's remarks, and each set when its evaluation ends."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        """Print the remark."""
        self._console.print(text)

    def row(self, row: Mapping[str, Any]) -> None:
        """Print that a set is done, or why it failed."""
        self._console.print(f"{row['set']}: FAILED, {row['failed']}" if "failed" in row else f"{row['set']}: done")

    def standing(self, lines: Sequence[Standing]) -> None:
        """Do nothing: an evaluation has no training state to show."""

    def outlook(self, text: str) -> None:
        """Do nothing: an evaluation has no steps."""

    def close(self) -> None:
        """Do nothing: no resource is held."""


def _table(model: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a column for each set, and a row for each metric that any set has."""
    figures = [_figures(row) for row in rows]
    table = Table(title=model, title_justify="left")
    table.add_column("")
    for row in rows:
        table.add_column(str(row["set"]), justify="right", overflow="fold")
    for name in dict.fromkeys(name for found in figures for name in found):
        table.add_row(name, *(found.get(name, "") for found in figures))
    return table


def _figures(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures of a set as text."""
    if "failed" in row:
        return {"failed": str(row["failed"])}
    prefix = f"eval/{row['set']}/"
    found = {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}
    shown = {key: f"{value:.0f}" if key == "prompts" else f"{value:.3f}" for key, value in found.items()}
    return shown | ({"left out": str(row["left_out"])} if row["left_out"] else {})
