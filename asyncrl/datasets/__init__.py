"""Datasets: rows of plain data that depend on nothing but their index, so that any process can compute them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from asyncrl.config.import_paths import PluginError, load_plugin
from asyncrl.datasets.jsonl import JSONL, JsonlDataset


@runtime_checkable
class Dataset(Protocol):
    """What `dataset.path` names: a class whose constructor takes `split`, `seed` and `dataset.args`."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def row(self, index: int) -> Mapping[str, Any]:
        """Row `index`: `prompt` (text) and whatever the reward needs. The same on every call and in every process."""
        ...


class DemonstrationDataset(Dataset, Protocol):
    """A dataset for supervised training."""

    def demonstration(self, row: Mapping[str, Any]) -> str:
        """The answer to `row` that the model is to imitate."""
        ...


def load_dataset(path: str, args: Mapping[str, Any], split: str, seed: int) -> Dataset:
    """The dataset that a `dataset.path` setting names, one split of it.

    Args:
        path: a file ending in `.jsonl`, or the import path `package.module:Class` or `file.py:Class` of a `Dataset`.
        args: further keyword arguments of the constructor; `split` and `seed` in them win over the two below.
        split: `train` or `held_out`.
        seed: seed of the dataset's own randomness.

    Raises:
        PluginError: `path` names nothing, the class is no `Dataset` or refuses its arguments, a file cannot be read, or
            the first row has no prompt. The message begins with `path`.
    """
    arguments = {"split": split, "seed": seed, **args}
    given = f"{path!r} with args {dict(args)}" if args else repr(path)
    try:
        if path.endswith(JSONL):
            return JsonlDataset(**{"path": path, **arguments})
        dataset = load_plugin(path)(**arguments)
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
    if not isinstance(first.get("prompt"), str):
        raise PluginError(f"{given}: row 0 has no text under 'prompt'; give each row one, its keys are {list(first)}")
    return dataset
