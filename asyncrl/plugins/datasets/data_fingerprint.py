"""Record of a trial's training data when it began, so that a launch that continues it notices other data.

A prompt id names a row by its number. If rows go, come or change places, the ids of used prompts name others: some rows
would be trained twice and some never, without a word. So the first launch writes down how many rows there are, and of a
file a checksum of each row, which tells the line that is not what it was.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from asyncrl.plugins.datasets import Dataset, Placed
from asyncrl.plugins.datasets.templates.parts import PictureSource

_SAMPLED_ROWS = 256
"""Rows of a set that are compared: making the rows of a class may take time."""


def content_sum(dataset: Dataset, folder: Path) -> str:
    """XXH3 of the number of rows, of rows spread evenly over the set, and, of files, of every row's checksum.

    `folder` is where this host has the data and the code: rows that name it are the same as those that name another's.
    """
    names = sorted({json.dumps(str(path))[1:-1] for path in (folder, folder.resolve())}, key=len, reverse=True)
    rows = np.unique(np.linspace(0, len(dataset) - 1, _SAMPLED_ROWS).astype(int)).tolist()
    digest = xxhash.xxh3_64(str(len(dataset)).encode())
    for row in rows:
        text = json.dumps(dataset.row(row), skipkeys=True, default=_kind)
        for name in names:
            text = text.replace(name, "")
        digest.update(text.encode())
    if isinstance(dataset, Placed):
        digest.update(dataset.sums().tobytes())
    return digest.hexdigest()


def _kind(value: object) -> str:
    """Return a stable name for a value of a user's class, whose text may contain its address."""
    return str(value) if isinstance(value, PictureSource) else type(value).__qualname__


class DataRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows of a dataset: their number, and CRC-32 of each one's content where it has a file (base64 of uint32)."""

    rows: int
    line_sums: str | None = None

    @classmethod
    def of(cls, dataset: Dataset) -> DataRecord:
        """The record of `dataset`."""
        if not isinstance(dataset, Placed):
            return cls(len(dataset))
        return cls(len(dataset), base64.b64encode(dataset.sums().astype("<u4").tobytes()).decode())

    @classmethod
    def read(cls, file: Path) -> DataRecord:
        """The record that `write` left in `file`."""
        return msgspec.json.decode(file.read_bytes(), type=cls)

    def write(self, file: Path) -> None:
        """Write it to `file`, at once or not at all."""
        aside = file.with_suffix(".tmp")
        aside.write_bytes(msgspec.json.encode(self))
        aside.replace(file)

    def difference(self, dataset: Dataset, path: str) -> str | None:
        """Describe how `dataset`, from the setting `dataset.path`, differs from the record; None if it does not."""
        now = len(dataset)
        if self.line_sums is None or not isinstance(dataset, Placed):
            return None if now == self.rows else f"{path!r} has {now} rows; this trial began with {self.rows}"
        before = np.frombuffer(base64.b64decode(self.line_sums), "<u4")
        common = min(now, self.rows)
        differing = np.flatnonzero(before[:common] != dataset.sums()[:common])
        if len(differing):
            row = int(differing[0])
            return (
                f"{dataset.place(row)} is not what it was when this trial began (row {row}; {now} rows "
                f"now, {self.rows} then)"
            )
        if now < self.rows:
            last = dataset.place(now - 1)
            return f"{last} is the last line with a row of training; this trial began with {self.rows - now} more"
        if now > self.rows:
            return f"{dataset.place(common)} is new; this trial began with the {self.rows} rows before it"
        return None
