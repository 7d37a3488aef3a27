"""Datasets: rows of plain data that depend on nothing but their index, so that any process can compute them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from asyncrl.config.import_paths import load_plugin


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
        path: a file ending in `.jsonl`, or the import path `package.module:Class` of a `Dataset`.
        args: further keyword arguments of the constructor; `split` and `seed` in them win over the two below.
        split: `train` or `held_out`.
        seed: seed of the dataset's own randomness.

    Raises:
        PluginError: `path` names nothing.
        TypeError: the class is no `Dataset`, or refuses its arguments.
    """
    if path.endswith(".jsonl"):
        from asyncrl.datasets.jsonl import JsonlDataset

        return JsonlDataset(**{"path": path, "split": split, "seed": seed, **args})
    dataset = load_plugin(path)(**{"split": split, "seed": seed, **args})
    if not isinstance(dataset, Dataset):
        raise TypeError(f"dataset.path {path!r} made a {type(dataset).__name__}: it needs __len__ and row(index)")
    return dataset
