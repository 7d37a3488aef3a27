"""Record of a trial's training data at its start. A launch that continues the trial uses the record to detect changed
data.

A prompt id contains a row's number. If rows are removed, added or moved, the ids of used prompts name other rows: some
would silently be trained twice and some never. So the first launch records the number of rows and, for files, a
checksum of each row, which locates the line that has changed.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from asyncrl.comm.typed import decode_json
from asyncrl.plugins.datasets import Dataset, Placed
from asyncrl.plugins.datasets.templates.picture_parts import PictureSource

_SAMPLED_ROWS = 256
"""Number of rows that are compared, because computing the rows of a dataset class may take time."""


def content_sum(dataset: Dataset, folder: Path) -> str:
    """Return the XXH3 of the number of rows, of rows spread evenly over the set and, for files, of every row's
    checksum.

    Rows may contain `folder`, the place of data and code on this host; it is left out of the checksum, because other
    hosts have another folder.
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
    """A dataset's number of rows and, for files, the CRC-32 of each row's content (base64 of uint32)."""

    rows: int
    line_sums: str | None = None

    @classmethod
    def of(cls, dataset: Dataset) -> DataRecord:
        """Return the record of `dataset`."""
        if not isinstance(dataset, Placed):
            return cls(len(dataset))
        return cls(len(dataset), base64.b64encode(dataset.sums().astype("<u4").tobytes()).decode())

    @classmethod
    def read(cls, file: Path) -> DataRecord:
        """Return the record that `write` left in `file`."""
        return decode_json(file.read_bytes(), cls)

    @property
    def checksum(self) -> str:
        """XXH3 of the record, which checkpoints have, so that a record that is gone or replaced is noticed."""
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(self))

    def write(self, file: Path) -> None:
        """Write the record to `file` atomically."""
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
