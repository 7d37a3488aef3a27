"""Finished rows, kept in a file, and the tables that are made of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from simulator.scenarios import Cell
from simulator.setup import Outcome, Setup

COLUMNS = (
    "| run | trained tokens/s | speed-up | step | generation idle | training idle | age, mean (max) | "
    "prefilled again | in vain | answer | long |"
)
RULE = "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"


class Kept:
    """Outcomes by setup, in a JSON file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rows: dict[str, dict[str, object]] = json.loads(file.read_text()) if file.exists() else {}

    def has(self, setup: Setup) -> bool:
        """True if the cell is finished."""
        return _key(setup) in self._rows

    def add(self, setup: Setup, outcome: Outcome) -> None:
        """It is finished."""
        row = asdict(outcome) | {"staleness": {str(age): count for age, count in outcome.staleness.items()}}
        self._rows = json.loads(self._file.read_text()) if self._file.exists() else {}  # of others that run beside
        self._rows[_key(setup)] = row | {"name": setup.name}
        self._file.write_text(json.dumps(self._rows, indent=1) + "\n")

    def get(self, setup: Setup) -> Outcome:
        """Its outcome."""
        row = dict(self._rows[_key(setup)])
        row["staleness"] = Counter({int(age): count for age, count in dict(row["staleness"]).items()})  # type: ignore[call-overload]
        return Outcome(**{field.name: row[field.name] for field in fields(Outcome)})  # type: ignore[arg-type]

    def line(self, setup: Setup) -> str:
        """In short."""
        found = self.get(setup)
        return (
            f"{found.trained_per_s:.0f} tokens/s, step {found.step_s:.1f} s, waits {found.wait_s:.1f} s, "
            f"generation idle {found.generation_idle:.0%}, "
            f"training idle {found.training_idle:.0%}, age {found.staleness_mean:.2f} ({found.staleness_max}), "
            f"{found.running:.0f} running, CPU {found.real_s:.0f} s {found.faults or ''}"
        )


def _key(setup: Setup) -> str:
    return hashlib.sha256(repr(_non_defaults(setup)).encode()).hexdigest()[:16]


def _non_defaults(value: Any) -> Any:
    """Return the values of a setup that differ from their defaults, so that finished rows survive added settings."""
    if not is_dataclass(value):
        return value
    own = {field.name: getattr(value, field.name) for field in fields(value) if field.name != "name"}
    defaults = {field.name: field.default for field in fields(value)}
    return [
        type(value).__name__,
        *((name, _non_defaults(each)) for name, each in own.items() if each != defaults[name]),
    ]


def tables(cells: Sequence[Cell], kept: Kept) -> str:
    """All tables as Markdown."""
    lines: list[str] = []
    for table in dict.fromkeys(cell.table for cell in cells):
        rows = [(cell, kept.get(cell.setup)) for cell in cells if cell.table == table]
        baseline = max((found.trained_per_s for cell, found in rows if cell.baseline), default=None)
        if baseline is None:  # against the table's first row
            baseline = rows[0][1].trained_per_s
        lines += [f"### {table}", "", COLUMNS, RULE, *(_row(cell, found, baseline) for cell, found in rows), ""]
        faults = [f"- {cell.label}: {fault}" for cell, found in rows for fault in found.faults]
        lines += [*faults, ""] if faults else []
    return "\n".join(lines)


def _row(cell: Cell, found: Outcome, baseline: float) -> str:
    vain = max(0.0, 1 - found.trained_per_s / found.tokens_per_s)
    answer = found.trained_per_s * found.step_s / (cell.setup.batch * cell.setup.group)
    return (
        f"| {cell.label} | {found.trained_per_s / 1e3:.0f} k | {found.trained_per_s / baseline:.2f} | "
        f"{found.step_s:.0f} s | {found.generation_idle:.0%} | "
        f"{found.training_idle:.0%} | {found.staleness_mean:.2f} ({found.staleness_max}) | {found.interrupted:.2f} | "
        f"{vain:.0%} | {answer:,.0f} | {found.long_share:.1%} |"
    )
