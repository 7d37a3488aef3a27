"""Datasets: rows of plain data that depend on nothing but their index, so that any process can compute them.

Several are mixed by weight (`Mixture`). A trial's data are recorded at its start, and a launch that continues the trial
compares them (`DataRecord`): a prompt id contains a row's number, so if rows are removed, added or moved, the ids of
used prompts name other rows, and some would silently be trained twice and some never.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncrl.api.chat import Message
from asyncrl.comm.typed import decode_json
from asyncrl.config.plugin_code.catalog import check_arguments
from asyncrl.config.plugin_code.import_paths import PluginError, load_plugin
from asyncrl.config.plugin_code.interfaces import parameters
from asyncrl.data.files import FileDataset, is_data_path
from asyncrl.data.picture_parts import PictureSource


@runtime_checkable
class Dataset(Protocol):
    """Interface of classes that `dataset.path` names; the constructor takes `split`, `seed` and `dataset.args`."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def row(self, index: int) -> Mapping[str, Any]:
        """Return row `index`: `prompt` (text, or messages) and any fields that the reward needs. The result is the same
        on every call and in every process.
        """
        ...


@runtime_checkable
class DemonstrationDataset(Dataset, Protocol):
    """A dataset for supervised training."""

    def demonstration(self, row: Mapping[str, Any]) -> str | Sequence[Message]:
        """Return the answer to `row` that the model imitates: text, or messages that end with it.

        Not called if the row's prompt is messages that already end with an answer.
        """
        ...


@runtime_checkable
class Placed(Protocol):
    """A dataset whose rows are in files, so that a changed row can be located."""

    def __len__(self) -> int: ...

    def place(self, index: int) -> str:
        """Return file and line of row `index`."""
        ...

    def sums(self) -> NDArray[np.uint32]:
        """`[N]`: a checksum of each row's content."""
        ...


class TorchStyle:
    """A map-style dataset as torch has them (`__len__`, `__getitem__`), whose items are rows.

    Raises:
        TypeError: it has no length.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._length = dataset, len(dataset)

    def __len__(self) -> int:
        return self._length

    def row(self, index: int) -> Mapping[str, Any]:
        """Return row `index`.

        Raises:
            TypeError: the item is not a mapping.
        """
        item = self._dataset[index]
        if not isinstance(item, Mapping):
            raise TypeError(f"item {index} is a {type(item).__name__}; a row is a mapping with a `prompt`")
        return item


def load_dataset(path: str, args: Mapping[str, Any], split: str, seed: int) -> Dataset:
    """Return one split of the dataset that a `dataset.path` setting names.

    Args:
        path: a file ending in `.jsonl` or `.parquet`, a folder, or the import path `package.module:Class` or
            `file.py:Class` of a `Dataset` or of torch's map-style datasets.
        args: further keyword arguments of the constructor; `split` and `seed` in them take precedence over the two
            below.
        split: `train` or `held_out`.
        seed: seed of the dataset's own randomness.

    Raises:
        PluginError: `path` names nothing, the class is not a `Dataset` or rejects its arguments, a file cannot be read,
            or the first row has no prompt. The message begins with `path`.
    """
    arguments = {"split": split, "seed": seed, **args}
    given = f"{path!r} with args {dict(args)}" if args else repr(path)
    try:
        if is_data_path(path):
            supplied = ("path", "split", "seed", "fields")
            check_arguments(repr(path), parameters(FileDataset) or {}, args, "args", supplied)
            return FileDataset(**{"path": path, **arguments})
        made = load_plugin(path)
        if callable(made) and (taken := parameters(made)) is not None:
            check_arguments(repr(path), taken, args, "args", supplied=("split", "seed"))
        dataset = made(**arguments)
        if not isinstance(dataset, Dataset | Mapping) and hasattr(dataset, "__getitem__"):
            dataset = TorchStyle(dataset)
        if not isinstance(dataset, Dataset):
            raise TypeError(f"it made a {type(dataset).__name__}, which has not both of __len__ and row(index)")
        first = dataset.row(0) if len(dataset) else None
    except PluginError:
        raise
    except Exception as error:  # a user's class may raise anything
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise PluginError(f"{given}: {reason}") from error
    if first is None:
        raise PluginError(f"{given}: split {split!r} has no rows")
    if not isinstance(first.get("prompt"), str | list | tuple):
        raise PluginError(f"{given}: row 0 has no text under 'prompt'; give each row one, its keys are {list(first)}")
    return dataset


MAX_ROWS = 1 << 27
"""Most rows of a mixture: the data order holds a permutation of them, 1 GB for this number."""


class Mixture:
    """The rows of `sources`, in proportion to `weights`. A row's field `source` is the name of its source, in
    place of such a column.

    Deterministic: a row number always means the same row. Source i has n_i of the mixture's N rows, in proportion to
    its weight. N is the smallest number for which every row of every source occurs at least once. So the source that is
    largest relative to its weight determines N, and the others repeat from their first row until their share is full.
    The k-th row of a source is at (k + 1/2) / n_i of the way. So every stretch of the mixture has the same proportions
    as the whole, also the beginning that an evaluation may take. The run's data order (`DataOrder`) permutes these rows
    like those of any dataset, so each epoch has the exact shares.

    Example: sources of 4 and 1 rows, each of weight 1: N = 8, and the second source's row occurs 4 times.

    Raises:
        ValueError: a weight is not above 0, or the weights would repeat a source so often that `MAX_ROWS` is exceeded.
    """

    def __init__(self, sources: Sequence[Dataset], weights: Sequence[float], names: Sequence[str]) -> None:
        for name, weight in zip(names, weights, strict=True):
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"the weight of {name!r} is {weight}: give a number above 0")
        self._sources, self._names = list(sources), list(names)
        scale = max(len(source) / weight for source, weight in zip(sources, weights, strict=True))
        counts = [max(len(source), round(scale * weight)) for source, weight in zip(sources, weights, strict=True)]
        if sum(counts) > MAX_ROWS:
            raise ValueError(
                f"the weights {list(weights)} of sources of {list(map(len, sources))} rows make an epoch of "
                f"{sum(counts)} rows, more than {MAX_ROWS}: give small sources less weight, or large ones more"
            )
        positions = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        source_of = np.repeat(np.arange(len(counts)), counts)
        row_of = np.concatenate([np.arange(count) % len(source) for count, source in zip(counts, sources, strict=True)])
        order = np.argsort(positions, kind="stable")
        self._source_of, self._row_of = source_of[order], row_of[order]
        self.counts = dict(zip(names, counts, strict=True))
        """By source, its rows in an epoch."""

    def __len__(self) -> int:
        return len(self._source_of)

    def row(self, index: int) -> Mapping[str, Any]:
        """Return row `index` of the mixture, with the name of its source under `source`."""
        source, row = self._at(index)
        return {**self._sources[source].row(row), "source": self._names[source]}

    def place(self, index: int) -> str:
        """Return the place of row `index` in its source."""
        source, row = self._at(index)
        of = self._sources[source]
        return of.place(row) if isinstance(of, Placed) else f"{self._names[source]}: row {row}"

    def sums(self) -> NDArray[np.uint32]:
        """`[N]`: CRC-32 of each row's content; of a source that is a class, its number of rows."""
        columns = [
            of.sums() if isinstance(of, Placed) else np.full(len(of), len(of), np.uint32) for of in self._sources
        ]
        found = np.empty(len(self), np.uint32)
        for number, column in enumerate(columns):
            chosen = self._source_of == number
            found[chosen] = column[self._row_of[chosen]]
        return found

    def _at(self, index: int) -> tuple[int, int]:
        return int(self._source_of[index]), int(self._row_of[index])


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
