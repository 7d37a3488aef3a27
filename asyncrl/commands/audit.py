"""`python -m asyncrl.launch audit RUN`: check a run from its files alone; one line for everything that is wrong."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.observability.audit import others
from asyncrl.observability.audit.history import read_ledger, surviving
from asyncrl.observability.audit.outcome import Outcome
from asyncrl.observability.audit.rules import Replay
from asyncrl.runtime.run_dir import (
    CHECKPOINTS_DIR,
    CONFIG_FILE,
    DATA_RECORD_FILE,
    LEDGER_DIR,
    METRICS_FILE,
    SUMMARY_FILE,
    WEIGHTS_DIR,
)

EXIT_FOUND = 1
EXIT_USAGE = 2


@dataclass(frozen=True)
class Audit:
    """What an audit found, each as `where: what`, and what the run came to."""

    findings: tuple[str, ...]
    outcome: Outcome


def audit(run_dir: Path) -> Audit:
    """Check the run in `run_dir`; writes nothing."""
    findings: list[str] = []

    def report(place: str, what: str) -> None:
        findings.append(f"{place}: {what}")

    record = run_dir / DATA_RECORD_FILE
    rows = json.loads(record.read_bytes())["rows"] if record.is_file() else None
    entries = read_ledger(run_dir / LEDGER_DIR, report)
    if not entries:
        report(LEDGER_DIR, "has no line")
    outcome = Replay(rows, report).run(surviving(entries, report))
    others.check_settings(run_dir / CONFIG_FILE, outcome, report)
    held = others.held_rows(run_dir / SUMMARY_FILE, run_dir / CHECKPOINTS_DIR, outcome)
    others.check_metrics(run_dir / METRICS_FILE, held, outcome, report)
    others.check_summary(run_dir / SUMMARY_FILE, outcome, report)
    others.check_checkpoints(run_dir / CHECKPOINTS_DIR, outcome, report)
    others.check_weights(run_dir / WEIGHTS_DIR, outcome, report)
    return Audit(tuple(findings), outcome)


def main(argv: Sequence[str], program: str) -> int:
    """The command line; returns the exit code: 0 nothing found, 1 something is wrong, 2 there is no run."""
    parser = argparse.ArgumentParser(prog=f"{program} audit", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run, <fileroot>/<experiment>/<trial>")
    run_dir: Path = parser.parse_args(argv).run.expanduser()
    if not (run_dir / LEDGER_DIR).is_dir():
        print(f"error: {run_dir} has no folder {LEDGER_DIR!r}: give the folder of a run", file=sys.stderr)
        return EXIT_USAGE
    found = audit(run_dir)
    for line in found.findings:
        print(line)
    print(_summary(found))
    return EXIT_FOUND if found.findings else 0


def _summary(found: Audit) -> str:
    outcome = found.outcome
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(outcome.dropped.items())) or "none"
    state = "" if outcome.ended else f", {outcome.live} under way"
    lost = f" (rollouts lost with launches that did not end by themselves: {outcome.lost})" if outcome.lost else ""
    verdict = f"{len(found.findings)} findings" if found.findings else "nothing found"
    return (
        f"{verdict}: {outcome.lineages} launches, {outcome.version} steps, {outcome.trained} rollouts trained, "
        f"dropped: {dropped}, abandoned: {outcome.abandoned}{state}{lost}"
    )
