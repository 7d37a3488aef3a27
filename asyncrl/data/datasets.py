"""Datasets: rows of plain data that depend on nothing but their index, so that any process can compute them.

A trial's data are recorded at its start, and a launch that continues the trial compares them (`DataRecord`): a prompt
id contains a row's number, so if rows are removed, added or moved, the ids of used prompts name other rows, and some
would silently be trained twice and some never.
"""

from __future__ import annotations

import base64
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
from asyncrl.data.settings import is_data_path


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
class Located(Protocol):
    """A dataset whose rows are in files, so that a changed row can be located."""

    def __len__(self) -> int: ...

    def location(self, index: int) -> str:
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
            from asyncrl.data.files import FileDataset

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


class DataRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dataset's number of rows and, for files, the CRC-32 of each row's content (base64 of uint32)."""

    rows: int
    line_sums: str | None = None

    @classmethod
    def of(cls, dataset: Dataset) -> DataRecord:
        """Return the record of `dataset`."""
        if not isinstance(dataset, Located):
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
        if self.line_sums is None or not isinstance(dataset, Located):
            return None if now == self.rows else f"{path!r} has {now} rows; this trial began with {self.rows}"
        before = np.frombuffer(base64.b64decode(self.line_sums), "<u4")
        common = min(now, self.rows)
        differing = np.flatnonzero(before[:common] != dataset.sums()[:common])
        if len(differing):
            row = int(differing[0])
            return (
                f"{dataset.location(row)} is not what it was when this trial began (row {row}; {now} rows "
                f"now, {self.rows} then)"
            )
        if now < self.rows:
            last = dataset.location(now - 1)
            return f"{last} is the last line with a row of training; this trial began with {self.rows - now} more"
        if now > self.rows:
            return f"{dataset.location(common)} is new; this trial began with the {self.rows} rows before it"
        return None
