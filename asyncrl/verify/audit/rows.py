"""The rows of metrics, compared with the ledger's steps and the evaluations in the run's summary."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from asyncrl.config.run_dir import CHECKPOINT_STATE_FILE
from asyncrl.observe.history.tail import Appended
from asyncrl.verify.audit.ledger_files import Report
from asyncrl.verify.audit.outcome import Outcome, StepTotals
from asyncrl.verify.audit.policy_checks import wrong_row
from asyncrl.verify.audit.run_files import Settings, Summary, one_line

_TOLERANCE = 1e-6
"""Relative tolerance, since sums are computed in another order."""
_SUMMARY = "summary.json"
_DROPPED = "rollout/dropped_"
Row: TypeAlias = tuple[str, dict[str, Any]]
"""A row of metrics and its place."""


def check_metrics(
    file: Path, checkpoints: Path, settings: Settings | None, summary: Summary | None, outcome: Outcome, report: Report
) -> None:
    """Check that the rows have no gap, reach the last step, and agree with the ledger's lines."""
    if not file.is_file():
        report(file.name, "is not there")
        return
    written = [*_written_rows(file, report)]
    newest = written[-1][1]["step"] if written else -1
    held = [] if summary is None or summary.steps >= summary.total_steps else held_rows(checkpoints, outcome)
    rows = written + [(place, row) for place, row in held if row["step"] > newest]
    last: int | None = None
    for place, row in rows:
        step, version = row["step"], row["policy_version"]
        if step != version:
            report(place, f"the row of step {step} is of policy version {version}")
        if (last is None and step not in (0, 1)) or (last is not None and step != last + 1):
            report(place, f"the row of step {step} comes after {'nothing' if last is None else f'that of {last}'}")
        last = step
        if step in outcome.steps:
            _check_row(place, row, outcome.steps[step], report)
            _check_drops(place, row, outcome, report)
    _check_end(file.name, -1 if last is None else last, settings, outcome, report)
    if summary is not None and outcome.ended:
        _check_evaluations(file.name, rows, outcome, summary, report)


def held_rows(checkpoints: Path, outcome: Outcome) -> list[Row]:
    """Return the rows in the last checkpoint of a run that was stopped.

    They belong to versions that wait for their evaluation, and to later ones. A complete run has written all of its
    rows. Errors of the checkpoint itself are reported by the check of checkpoints.
    """
    folder = checkpoints / f"v{outcome.version}"
    try:
        held = json.loads((folder / CHECKPOINT_STATE_FILE).read_bytes())["master_state"]["metrics_log"]["rows"]
        return [(f"{checkpoints.name}/{folder.name}", _checked({"step": each["step"]} | each["row"])) for each in held]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []


def _written_rows(file: Path, report: Report) -> Iterator[Row]:
    for number, raw in enumerate(Appended(file).read(), 1):
        place = f"{file.name}:{number}"
        try:
            yield place, _checked(json.loads(raw))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            report(place, f"not a row of metrics: {one_line(error)}")


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    """Return `row`; raises KeyError or TypeError if it lacks a field that every row has."""
    for name in ("step", "policy_version"):
        if type(row[name]) is not int:
            raise TypeError(f"{name} is {row[name]!r:.50}")
    return row


def _check_row(place: str, row: Mapping[str, Any], totals: StepTotals, report: Report) -> None:
    samples = max(1, totals.samples)
    means = {
        "reward/mean": totals.reward / max(1, totals.episodes),
        "rollout/samples_per_episode": totals.samples / max(1, totals.episodes),
        "rollout/len_mean": totals.tokens / samples,
        "staleness/mean": totals.ages / max(1, totals.young_tokens),
        "staleness/max": float(totals.oldest_age),
        "tokens/trained": float(totals.young_tokens),
        "data/epoch": float(totals.newest_epoch),
    }
    if totals.whole_tokens is not None:
        means["tokens/batch"] = totals.whole_tokens
        means["rollout/context_len_mean"] = (totals.whole_tokens - totals.tokens) / samples
    for name, value in means.items():
        if not _close(told := row.get(name), value):
            report(place, f"step {row['step']} has {name} {told}, its rollouts in the ledger have {value:.6g}")
    for wrong in wrong_row(row, totals):
        report(place, wrong)


def _check_drops(place: str, row: Mapping[str, Any], outcome: Outcome, report: Report) -> None:
    """Check the drops since the previous step that someone has to look into, by the books of both steps."""
    now, before = (outcome.books_at.get(row["step"] - back) for back in (0, 1))
    if now is None or before is None:
        return
    for name, told in row.items():
        reason = name.removeprefix(_DROPPED)
        if reason == name:
            continue
        if not _close(told, added := now.dropped.get(reason, 0) - before.dropped.get(reason, 0)):
            report(place, f"step {row['step']} has {name} {told}, the books of the ledger {added}")


def _check_end(place: str, last: int, settings: Settings | None, outcome: Outcome, report: Report) -> None:
    """Check the last row. Rows of a run that still runs, or was killed, may wait for an evaluation."""
    if last > outcome.version + (not outcome.ended):
        report(place, f"has a row of step {last}; the ledger's last step is {outcome.version}")
    if last >= outcome.version or not outcome.version:
        return
    if outcome.is_over:
        report(place, f"ends with step {last}; the run ended at {outcome.version}")
    elif settings is not None and not settings.eval.is_due(last + 1, settings.total_train_steps):
        report(
            place,
            f"ends with step {last}; the ledger's last step is {outcome.version}, and version {last + 1} waits for no "
            "evaluation",
        )


def _check_evaluations(place: str, rows: list[Row], outcome: Outcome, summary: Summary, report: Report) -> None:
    """Check that rows and summary have the same evaluations."""
    told: dict[Any, dict[str, Any]] = {}
    newest: dict[str, dict[str, Any]] = {}
    for evaluation in summary.evaluations:
        version = evaluation.get("version")
        told.setdefault(version, {}).update(evaluation)
        for name in evaluation.keys() - {"version"}:
            figures = newest.setdefault(name.split("/")[1] if "/" in name else name, {})
            if figures.get("version") != version:
                figures.clear()
            figures |= {"version": version, name.split("/", 2)[-1]: evaluation[name]}
    if summary.eval != newest:
        report(_SUMMARY, f"has {summary.eval} as the newest evaluations, and {newest} among all of them")
    failed = {(each.get("version"), each.get("set")) for each in summary.evaluations_failed}
    for where, row in rows:
        measured = {name: value for name, value in row.items() if name.startswith("eval/")}
        said = told.pop(row["step"], {})
        for name in sorted(measured.keys() | said.keys() - {"version"}):
            if name.endswith(("/failed", "/cut_short")):
                if (row["step"], name.split("/")[1]) not in failed:
                    report(where, f"has {name}, and {_SUMMARY} no such failure")
            elif not _close(measured.get(name), said.get(name)):
                report(where, f"has {name} {measured.get(name)}, {_SUMMARY} {said.get(name)}")
    last = rows[-1][1]["step"] if rows else -1
    for version in told:  # a row that is still held may have its evaluation
        if not isinstance(version, int) or not last < version <= outcome.version:
            report(_SUMMARY, f"has an evaluation of version {version}, and {place} has none")


def _close(one: Any, other: Any) -> bool:
    if not isinstance(one, int | float) or not isinstance(other, int | float):
        return False
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE) or (math.isnan(one) and math.isnan(other))
