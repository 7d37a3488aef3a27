"""Tables of a few kept samples of each step, for the sinks that show them (`samples.tables`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from asyncrl.observe.samples import read_samples, sample_files, step_of

_log = logging.getLogger(__name__)
_MARKS = frozenset("&<>\\|`*_[]#")
COLUMNS = ("prompt", "sample", "reward", "staleness", "text")
Table = Sequence[Sequence[str]]
"""Rows of cells, in the order of `COLUMNS`."""


class SampleTables:
    """Finds the steps whose samples are new.

    Args:
        folder: folder of the samples.
        size: limit on the samples of a step.
        after: steps up to this one already have their table.
    """

    def __init__(self, folder: Path, size: int, after: int) -> None:
        self._folder, self._size, self._after = folder, size, after
        self._unread: set[int] = set()

    def new(self, before: int) -> list[tuple[int, Table]]:
        """Return new tables of steps below `before`, in order; later steps may still be being written.

        A step with a file that cannot be read is logged, and tried once more by the next call.
        """
        steps: dict[int, list[Path]] = {}
        for file in sample_files(self._folder):
            if (step := step_of(file)) in self._unread or self._after < step < before:
                steps.setdefault(step, []).append(file)
        self._after = max(self._after, before - 1)
        tables: list[tuple[int, Table]] = []
        unread: set[int] = set()
        for step, files in steps.items():
            try:
                tables.append((step, self._table(files)))
            except (OSError, ValueError) as error:
                _log.warning("kept samples of step %d could not be shown: %s", step, error)
                unread.add(step)
        self._unread = unread - self._unread
        return tables

    def _table(self, files: Sequence[Path]) -> Table:
        columns = ["prompt", "sample", "total_reward", "staleness", "text"]
        rows = islice(read_samples(files, columns), self._size)
        return [[_shown(row[name]) for name in columns] for row in rows]


def as_markdown(table: Table) -> str:
    """Return the table as TensorBoard shows it: Markdown, in which a sample's text stays text."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in table]
    return "\n".join(lines)


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)


def _cell(text: str) -> str:
    return "".join(f"&#{ord(char)};" if char in _MARKS else char for char in text).replace("\n", "<br>")
