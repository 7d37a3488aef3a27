"""`python -m asyncrl.launch audit RUN`: check a run from its files alone, and print one line for each error."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.run_dir import CHECKPOINTS_DIR, LEDGER_DIR, METRICS_FILE, SAMPLES_DIR, WEIGHTS_DIR
from asyncrl.launch.commands import refuse
from asyncrl.verify.audit.ledger_files import Outcome, read_ledger, surviving
from asyncrl.verify.audit.ledger_rules import Replay
from asyncrl.verify.audit.run_files import Documents, check_checkpoints, check_weights, role_folders, versions_in
from asyncrl.verify.audit.tables import check_metrics, check_samples

EXIT_FOUND = 1


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        findings: the errors, each as `location: what is wrong`.
        notes: events of the run that are not errors in its files, in the same form.
        outcome: the totals of the run.
    """

    findings: tuple[str, ...]
    outcome: Outcome
    notes: tuple[str, ...] = ()


def audit(run_dir: Path) -> Audit:
    """Check the run in `run_dir`, without writing anything.

    The run may continue meanwhile: the files that are compared with the ledger are listed or read before it.
    """
    findings: list[str] = []
    notes: list[str] = []

    def report(location: str, what: str) -> None:
        findings.append(f"{location}: {what}")

    def note(location: str, what: str) -> None:
        notes.append(f"{location}: {what}")

    documents = Documents.read(run_dir, report)
    samples = sorted((run_dir / SAMPLES_DIR).glob("*.parquet"))
    checkpoints = versions_in(run_dir / CHECKPOINTS_DIR)
    weights = {folder.name: versions_in(folder) for folder in role_folders(run_dir / WEIGHTS_DIR)}
    entries = read_ledger(run_dir / LEDGER_DIR, report, note)
    if not entries:
        report(LEDGER_DIR, "has no line")
    rows = None if documents.data is None else documents.data.rows
    outcome = Replay(rows, report, note).run(surviving(entries, report))
    documents.check_there(outcome, report)
    documents.check_settings(outcome, report)
    documents.check_counts(outcome, report)
    settings, summary = documents.settings, documents.summary
    check_metrics(run_dir / METRICS_FILE, run_dir / CHECKPOINTS_DIR, settings, summary, outcome, report)
    check_checkpoints(run_dir / CHECKPOINTS_DIR, checkpoints, outcome, entries, report)
    check_weights(run_dir / WEIGHTS_DIR, weights, settings, outcome, report)
    check_samples(run_dir / SAMPLES_DIR, samples, settings, outcome, report, note)
    return Audit(tuple(findings), outcome, tuple(notes))


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; return the exit code: 0 nothing found, 1 something is wrong, 2 there is no run."""
    parser = argparse.ArgumentParser(prog=f"{program} audit", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run, <fileroot>/<experiment>/<trial>")
    run_dir: Path = parser.parse_args(argv).run.expanduser()
    if not (run_dir / LEDGER_DIR).is_dir():
        return refuse(f"{run_dir} has no folder {LEDGER_DIR!r}: give the folder of a run")
    found = audit(run_dir)
    for line in found.notes:
        print(f"note: {line}")
    for line in found.findings:
        print(line)
    print(_summary(found))
    return EXIT_FOUND if found.findings else 0


def _summary(found: Audit) -> str:
    outcome = found.outcome
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(outcome.dropped.items())) or "none"
    state = "" if outcome.ended else f", {outcome.live} under way"
    lost = f" (rollouts lost between lineages: {outcome.lost})" if outcome.lost else ""
    verdict = f"{len(found.findings)} findings" if found.findings else "nothing found"
    return (
        f"{verdict}: {outcome.lineages} lineages, {outcome.version} steps, {outcome.trained} rollouts trained, "
        f"dropped: {dropped}, abandoned: {outcome.abandoned}{state}{lost}"
    )
