"""Summary of a finished run in a few lines: its progress, the counts of rollouts, and the paths of its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.comm.ended_rollouts import CUT_SHORT, failure, lost_episodes
from asyncrl.config.run_dir import (
    BOOKS_FILE,
    LOGS_DIR,
    METRICS_FILE,
    RESTARTS_FILE,
    WEIGHTS_DIR,
    DamagedFile,
    read_document,
)
from asyncrl.observe.history.tail import read_rows
from asyncrl.observe.metrics.learning import FlatSteps
from asyncrl.runtime.trials.restarts import restarts_in, seconds_in
from asyncrl.runtime.trials.resume import read_summary

SUMMARY_INDENT = 11
"""Columns of a line's label in the summary."""


def summary_lines(run_dir: Path) -> list[str]:
    """Return the summary as lines; without one, the counts at the last step, and the logs to read.

    A damaged file is named in place of what it would say.
    """
    try:
        lines = _told_lines(run_dir)
    except DamagedFile as error:
        lines = [f"DAMAGED    {error}"]
    return [
        *lines,
        f"metrics    {run_dir / METRICS_FILE}",
        f"weights    {run_dir / WEIGHTS_DIR}",
        f"logs       {run_dir / LOGS_DIR}",
    ]


def _told_lines(run_dir: Path) -> list[str]:
    summary = read_summary(run_dir)
    lines = []
    if summary is None:
        lines.append("the run ended before it could write a summary")
        known = read_document(run_dir / BOOKS_FILE, {"books": dict, "step": int})
        lines += (
            ["books      nothing was submitted"]
            if known is None
            else _books_lines(known["books"], f", as of step {known['step']}")
        )
    else:
        lines.append(f"steps      {summary['steps']}")
        lines += [f"evaluated  {evaluated_line(name, figures)}" for name, figures in sorted(summary["eval"].items())]
        lines += map(_without_result, summary["evaluations_failed"])
        lines += _books_lines(summary["books"])
    rows, restarts = read_rows(run_dir / METRICS_FILE), read_rows(run_dir / RESTARTS_FILE)
    flat, lost = FlatSteps(), Counter[str]()
    for row in rows:
        flat.take(row)
        lost += lost_episodes(row)  # missing from trained groups, by the kind of failure
    lines += [
        f"LOST       {count} episodes, as {name}; the logs of the rollout_workers say more"
        for name, count in sorted(lost.items())
    ]
    if (told := flat.summary()) is not None:
        lines.append(f"NO SIGNAL  {told}")
    if counts := ", ".join(f"{what} {count}" for what, count in sorted(restarts_in(restarts).items())):
        lines.append(f"restarts   {counts}; {seconds_in(restarts):.1f} s until they went on")
    return lines


def _without_result(evaluation: Mapping[str, Any]) -> str:
    """Return a line on an evaluation that failed or was cut short."""
    which = f"evaluation of version {evaluation['version']} on {evaluation['set']}"
    if evaluation["reason"] == CUT_SHORT:
        return f"CUT SHORT  {which}: the run was stopped before it had ended"
    return f"FAILED     {which}: {evaluation['reason']}"


def _books_lines(books: dict[str, Any], when: str = "") -> list[str]:
    """Return the balance of rollouts, and the rollouts that someone has to look at."""
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(books["dropped"].items()))
    under_way = books["running"] + books["finished_untrained"]
    total = books["trained"] + sum(books["dropped"].values()) + books["abandoned"] + under_way
    line = (
        f"books      submitted {books['submitted']} {'=' if books['submitted'] == total else '≠'} "
        f"trained {books['trained']} + dropped {sum(books['dropped'].values())} {f'({dropped}) ' if dropped else ''}"
        f"+ abandoned {books['abandoned']}"
    )
    if under_way:
        line += f" + under way {under_way}"
    failed = [
        f"FAILED     {count} rollouts {what} ({reason}); the logs of the rollout_workers say why"
        for reason, count in sorted(books["dropped"].items())
        if count and (what := failure(reason)) is not None
    ]
    return [line + when, *failed]


def evaluated_line(name: str, figures: Mapping[str, float]) -> str:
    """Return a line on the newest evaluation of the set `name`; accuracy and pass@k only with verdicts.

    Example: `held_out: accuracy 0.953, pass@4 0.984, reward 0.953, 33 tokens, 0 % cut off (256 prompts, version 60)`.
    """
    parts = [f"{key} {value:.3f}" for key, value in figures.items() if key == "accuracy" or key.startswith("pass@")]
    parts.append(f"reward {figures['reward_mean']:.3f}")
    parts.append(f"{figures['len_mean']:.0f} tokens")
    parts.append(f"{100 * figures['truncated']:.0f} % cut off")
    return f"{name}: {', '.join(parts)} ({figures['prompts']:.0f} prompts, version {figures['version']:.0f})"
