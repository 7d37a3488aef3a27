"""`python -m asyncrl.launch show RUN`: print samples that a run saved (`samples.every`), or with `--eval` its answers
in evaluations (`samples.eval_every`).

Generated text is coloured by the policy version that produced it, or marked with it if there are no colours.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from asyncrl.api.trajectory import role_of
from asyncrl.config.run_dir import ANSWERS_DIR, SAMPLES_DIR
from asyncrl.config.setting import did_you_mean
from asyncrl.launch.commands import refuse
from asyncrl.observe.samples import Row, answer_files, read_samples, sample_files, step_of

COLOURS = ("green", "cyan", "yellow", "magenta", "blue", "red")
"""Colours of generated text by version, in turn, so that successive versions in a sample have different ones."""
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
"""Control characters except tab and line feed, including C1: a model's text must not control the terminal."""


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; return the exit code."""
    args = _parse(argv, program)
    folder = args.run.expanduser()
    inside, setting = (SAMPLES_DIR, "every") if args.eval is None else (ANSWERS_DIR, "eval_every")
    folder = folder / inside if (folder / inside).is_dir() else folder
    files = sample_files(folder) if args.eval is None else answer_files(folder)
    if importlib.util.find_spec("pyarrow") is None:
        return refuse("show reads Parquet: pip install 'asyncrl[data]'")
    if not folder.is_dir():
        return refuse(f"{args.run}: no such folder")
    if not files:
        return refuse(
            f"{args.run} holds no {'samples' if args.eval is None else 'answers of evaluations'}: give the folder of a "
            f"run with the setting samples.{setting}=1 or more"
        )
    if args.eval:
        known = sorted({file.parent.name for file in files})
        files = [file for file in files if file.parent.name == args.eval]
        if not files:
            hint = did_you_mean(args.eval, known) or ";"
            return refuse(f"--eval {args.eval}: no such set{hint} there are {', '.join(known)}")
    console = Console(highlight=False, markup=False, soft_wrap=True, no_color="NO_COLOR" in os.environ or None)
    try:
        shown = _show(args, files, console)
    except ValueError as error:
        return refuse(error)
    if not shown:
        print(f"none of the samples in {folder} fits", file=sys.stderr)
    return 0


def _show(args: argparse.Namespace, files: Sequence[Path], console: Console) -> int:
    shown = 0
    for row in islice(_chosen(args, files), args.number or None):
        console.print(rendered(row, colours=console.color_system is not None and not console.no_color))
        shown += 1
    return shown


def _chosen(args: argparse.Namespace, files: Sequence[Path]) -> Iterator[Row]:
    low, high = args.step
    files = [file for file in files if low <= step_of(file) <= high]
    if args.newest_first:
        files = files[::-1]
    for row in read_samples(files):
        if not args.reward[0] <= row["total_reward"] <= args.reward[1]:
            continue
        if not args.staleness[0] <= (row["staleness"] or 0) <= args.staleness[1]:
            continue
        group = row.get("group") or ""
        if args.group is not None and args.group not in (group, role_of(group)):
            continue
        group_of_answers = row["rollout"].rpartition("-")[0] if row.get("set") is not None else row["rollout"]
        if args.prompt in (None, row["prompt"]) and args.rollout in (None, row["rollout"], group_of_answers):
            yield row


def rendered(row: Row, *, colours: bool) -> Text:
    """Return a sample for people: a line of figures, then its text."""
    text = Text()
    evaluated = row.get("set") is not None
    text.append(f"{'version' if evaluated else 'step'} {row['step']}  ", style="bold")
    which = f"answer {row['episode']}" if evaluated else f"sample {row['sample']}"
    of_group = f"  {row['group']}" if row.get("group") else ""
    text.append(f"{row['prompt']}  {which}{of_group}  reward {row['total_reward']:g}")
    if row["reward_parts"]:
        text.append(f" ({_numbers(row['reward_parts'])})")
    if row.get("right") is not None:
        text.append("  right" if row["right"] else "  wrong")
    if row["staleness"] is not None:
        text.append(f"  staleness {row['staleness']}")
    text.append(f"  {sum(row['loss_mask'])} of {len(row['tokens'])} tokens generated")
    if row["truncated"]:
        text.append("  cut off", style="red")
    if row["metrics"]:
        text.append(f"  {_numbers(row['metrics'])}")
    text.append(f"\n  log-probabilities: {_means(row)}\n", style="dim")
    for segment in row["segments"]:
        _append_segment(text, segment, colours=colours)
    text.append("\n")
    return text


def _append_segment(text: Text, segment: Row, *, colours: bool) -> None:
    written = segment["text"].translate(_CONTROL)
    version = segment["version"]
    if not segment["generated"]:
        text.append(written, style="dim")
    elif colours:
        text.append(written, style=COLOURS[version % len(COLOURS)])
    else:
        text.append(f"[v{version}|{written}]")


def _numbers(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sorted(numbers.items()))


def _means(row: Row) -> str:
    """Return the mean of each policy's log-probabilities over the generated tokens."""
    names = {"behaviour": "behave_logprobs", "proximal": "prox_logprobs", "reference": "ref_logprobs"}
    mask = row["loss_mask"]
    means = []
    for label, name in names.items():
        if row[name] is not None and any(mask):
            values = [value for value, generated in zip(row[name], mask, strict=True) if generated]
            means.append(f"{label} {sum(values) / len(values):.3f}")
    return ", ".join(means) or "none"


def _range(text: str) -> tuple[float, float]:
    """Parse `3`, from 3 to 3, or `2:5`, from 2 to 5; either end may be left out."""
    low, colon, high = text.partition(":")
    try:
        first = float(low) if low else float("-inf")
        last = (float(high) if high else float("inf")) if colon else first
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number or a range such as 2:5, 2: or :5") from None
    if not first <= last:
        raise argparse.ArgumentTypeError(f"{text!r} is empty: the first number is to be the smaller one")
    return first, last


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of samples; 0 means all")
    return int(text)


def _parse(argv: Sequence[str], program: str) -> argparse.Namespace:
    everything: Any = (float("-inf"), float("inf"))
    parser = argparse.ArgumentParser(
        prog=f"{program} show",
        description="Print samples that a run kept. A range is a number, or two with a colon: 2:5, 2: or :5.",
    )
    parser.add_argument("run", type=Path, help="folder of the run, or of its samples")
    parser.add_argument(
        "--eval", nargs="?", const="", metavar="SET", help="answers in evaluations instead: of one set, or of all"
    )
    parser.add_argument(
        "--step", type=_range, default=everything, metavar="RANGE", help="train steps; with --eval: versions"
    )
    parser.add_argument("--reward", type=_range, default=everything, metavar="RANGE", help="rewards")
    parser.add_argument("--staleness", type=_range, default=everything, metavar="RANGE", help="ages of oldest tokens")
    parser.add_argument(
        "--group", help="one comparison group, or the role before its /: judge has all samples of the policy judge"
    )
    parser.add_argument("--prompt", help="one prompt, e<epoch>-<row>; with --eval: <set>-<row>")
    parser.add_argument(
        "--rollout",
        help="one rollout, by its id, as in the ledger; with --eval: one answer, <set>-<row>-v<version>-<number>, or "
        "without its number all answers to the row",
    )
    parser.add_argument("-n", "--number", type=_count, default=10, help="largest number shown (default: 10; 0: all)")
    parser.add_argument("--newest-first", action="store_true", help="the last step first")
    return parser.parse_args(argv)
