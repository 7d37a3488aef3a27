"""Datasets: rows of plain data that depend on nothing but their index, so that any process can compute them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.plugin_code.import_paths import PluginError, load_plugin
from asyncrl.config.plugin_code.interfaces import parameters
from asyncrl.config.plugin_code.signatures import check_arguments
from asyncrl.plugins.datasets.rows.files import FileDataset
from asyncrl.plugins.datasets.rows.readers import is_data_path
from asyncrl.plugins.datasets.templates.chat_template import Message


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
