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
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from asyncrl.comm.files import PRIVATE_UMASK
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.run_dir import ANSWERS_DIR, CONFIG_FILE, METRICS_FILE, read_run_config, run_dir_of
from asyncrl.config.setting import ConfigError, Device
from asyncrl.config.values import literal, to_yaml
from asyncrl.config.variants import config_of_policy, evaluation_sets
from asyncrl.inference.settings import COLOCATE_NONE
from asyncrl.launch.before_start.data import keep_inputs
from asyncrl.launch.before_start.pipeline import StartChecks
from asyncrl.launch.before_start.setting_checks import is_hub_name, resolve_hub_names, validate
from asyncrl.launch.commands import refuse
from asyncrl.models.folder_checks import folder_faults
from asyncrl.observe.display import PlainDisplay
from asyncrl.observe.samples import Row, answer_files, read_samples
from asyncrl.observe.settings import SamplesConfig
from asyncrl.observe.tail import read_rows
from asyncrl.plugins.named_inputs import is_file, named_inputs, texts_in_args
from asyncrl.runtime.launcher import Launcher
from asyncrl.runtime.plan import Purpose, with_types
from asyncrl.runtime.settings import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from asyncrl.runtime.trials.claim import TrialError, read_holder
from asyncrl.trainer.settings import LoraConfig

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
    with StartChecks(config, Purpose.evaluate) as checks:
        notes = checks.notes()
    for group, found in checks.statistics.items():
        for line in found.lines(config.dataset.max_prompt_tokens, config.dataset.overlong):
            console.print(f"{group}: {line}")
    for note in notes:
        console.print(note)
    launcher = Launcher(with_types(config, Purpose.evaluate), _Progress(console, total_steps=0), Purpose.evaluate)
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


class _Progress(PlainDisplay):
    """Prints the launcher's notices, and each set when its evaluation ends."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Print that a set is done, or why it failed."""
        self.note(f"{row['set']}: FAILED, {row['failed']}" if "failed" in row else f"{row['set']}: done")


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


_NO_LIMIT_GB = 1e6
_NAME = "run"
"""Name under which a run's own settings are loaded as an experiment."""


def load_settings(args: argparse.Namespace, run: Path | None, scratch: Path) -> ExperimentConfig:
    """Return the experiment's settings, or without an experiment the run's, with those of the command line."""
    name, folder = args.experiment, args.config_dir
    if name is None:
        assert run is not None
        name, folder = _NAME, scratch / "experiments"
        folder.mkdir()
        own = msgspec.to_builtins(_settings_from_anywhere(run))
        text = to_yaml({"defaults": ["experiment_schema", "_self_"], **literal(own)})
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    config = load_experiment(name, args.overrides, folder)
    if not isinstance(config, ExperimentConfig):
        raise ConfigError(f"--experiment {name}: supervised training has no evaluation sets; name an RL experiment")
    return config


def _settings_from_anywhere(run: Path) -> ExperimentConfig:
    """Return the settings of `run`, with relative paths resolved against the folder in which it was started."""
    config, holder = read_run_config(run), read_holder(run)
    if holder is None or not holder.folder:
        return config
    started_in = Path(holder.folder)
    for named in list(named_inputs(config, training=False)):
        if named.path is not None and not named.path.is_absolute():
            named.put_path(started_in / named.path)
    for text in list(texts_in_args(config, training=False)):
        if not Path(text.value).is_absolute() and is_file(str(started_in / text.value)):
            text.put(str(started_in / text.value))
    return config


def policy_folder(run: Path, step: int | None, scratch: Path, policy: str) -> Path:
    """Return a Hugging Face folder with a policy of `run` after `step` steps. `policy` is one of the further trained
    policies; empty: the run's own.
    """
    if step == 0:
        return Path(str(config_of_policy(read_run_config(run), policy).model.path))
    from asyncrl.launch.commands.export.policy import export  # imports torch
    from asyncrl.weights.manifest import ManifestError, WeightUpdateError
    from asyncrl.weights.stored import ExportError

    folder = scratch / f"model-{policy}"
    if folder.exists():
        return folder
    try:
        export(run, step, folder, policy=policy)
    except (ExportError, WeightUpdateError, ManifestError, ValueError, OSError) as error:
        raise ConfigError(f"{run}: {error}") from error
    return folder


def evaluation_config(config: ExperimentConfig, scratch: Path, *, answers: bool) -> ExperimentConfig:
    """Return `config` for a launch that evaluates every set once and trains nothing. It keeps its logs, and answers if
    `answers` is set.
    """
    sets = [replace(each, interval=None) for each in config.eval.sets]
    path = Path(str(config.model.path)).expanduser().resolve()
    return replace(
        config,
        experiment_name="eval",
        trial_name="0",
        fileroot=str(scratch),
        model=replace(config.model, path=str(path), lora=LoraConfig()),
        eval=replace(config.eval, interval=1, sets=sets),
        rollout=replace(config.rollout, rehearse=False),  # the code alone: the data of training need not be here
        samples=SamplesConfig(eval_every=int(answers), max_gb=_NO_LIMIT_GB),
        checkpoint=replace(config.checkpoint, keep_best=None),
        manager=replace(config.manager, weight_transport="disk"),
        generation=replace(config.generation, colocated=COLOCATE_NONE),
        trainer=replace(config.trainer, device=Device.cpu),  # so that all GPUs are the servers'
    )


def write_measured_answers(config: ExperimentConfig, out: Path, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Write the answers to the measured sets to `out`; return True if every answer was kept."""
    measured = {str(row["set"]): row for row in rows if "failed" not in row}
    written = write_answers(run_dir_of(config) / ANSWERS_DIR, out, list(measured))
    missing = False
    for each in evaluation_sets(config):
        if each.name not in measured:
            continue
        wanted = int(measured[each.name][f"eval/{each.name}/prompts"]) * each.n_samples
        if written[each.name] != wanted:
            missing = True
            refuse(f"{out} has {written[each.name]} of {wanted} answers to {each.name}")
    return not missing


def write_answers(folder: Path, out: Path, sets: Sequence[str]) -> Mapping[str, int]:
    """Write the answers saved in `folder` to `out`, for each of `sets` in the order of rows and members.

    Returns:
        The number of answers of each set.

    Raises:
        ValueError: a file is not a file of answers.
        OSError: `out` cannot be written.
    """
    files: defaultdict[str, list[Path]] = defaultdict(list)
    for file in answer_files(folder):
        files[file.parent.name].append(file)
    counts: Counter[str] = Counter()
    with out.open("w", encoding="utf-8") as lines:
        for name in sets:
            rows = sorted(read_samples(files[name]), key=lambda row: (row["order"], row["episode"], row["sample"]))
            counts[name] = len({(row["order"], row["episode"]) for row in rows})
            lines.writelines(json.dumps(_line(row), ensure_ascii=False) + "\n" for row in rows)
    return counts


def _line(row: Row) -> dict[str, Any]:
    """Return the line of a sample; an answer has several if its conversation was cut into several."""
    texts = [(part["generated"], part["text"]) for part in row["segments"]]
    first = next((number for number, (generated, _) in enumerate(texts) if generated), len(texts))
    return {
        "set": row["set"],
        "row": row["order"],
        "answer": row["episode"],
        "sample": row["sample"],
        "prompt": "".join(text for _, text in texts[:first]),
        "completion": "".join(text for _, text in texts[first:]),
        "reward": row["total_reward"],
        "reward_parts": row["reward_parts"],
        "right": row["right"],
        "generated_tokens": sum(row["loss_mask"]),
        "truncated": row["truncated"],
        "metrics": row["rollout_metrics"],
    }
