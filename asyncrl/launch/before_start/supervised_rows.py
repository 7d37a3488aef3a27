"""Check of the rows that supervised training reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.config.plugin_code.import_paths import PluginError
from asyncrl.plugins.datasets import Placed
from asyncrl.plugins.datasets.rows.files import FileDataset
from asyncrl.plugins.datasets.supervised.demonstration_rows import load_demonstrations
from asyncrl.plugins.datasets.supervised.demonstrations import conversation_of, wrong_conversation
from asyncrl.plugins.datasets.supervised.preferences import judged_answers
from asyncrl.trainer.supervised.losses import LABEL_LOSS, loss_kind
from asyncrl.trainer.supervised.settings import SFTConfig


def wrong_rows(config: SFTConfig) -> Iterator[str]:
    """Yield an error message for each data set with a row that cannot be loaded or has nothing to train on."""
    data = config.dataset
    for phase in config.phases:
        try:
            _check_rows(config, data.path, {**data.args, **phase.args}, data.fields, "train")
        except ValueError as error:
            yield f"dataset.path={error}"
    held_out = config.eval
    if held_out.interval and held_out.path is not None:
        fields = data.fields if held_out.fields is None else held_out.fields
        try:
            _check_rows(config, held_out.path, held_out.args, fields, "held_out")
        except ValueError as error:
            yield f"eval.path={error}"


def _check_rows(config: SFTConfig, path: str, args: Mapping[str, Any], fields: Mapping[str, str], split: str) -> None:
    """Load the rows of supervised training: all rows of a file, one row of a class.

    Raises:
        ValueError: they cannot be loaded, or have nothing to train on; the message names file and line.
    """
    try:
        kind = loss_kind(config.loss)
    except PluginError:  # reported by the check of settings
        return
    dataset = load_demonstrations(path, args, fields, split, config.seed, judged=kind is not None)
    for index in range(len(dataset) if isinstance(dataset, FileDataset) else 1):
        place, row = dataset.place(index) if isinstance(dataset, Placed) else f"{path}, row {index}", dataset.row(index)
        wrong = None
        try:
            if kind is None:
                wrong = wrong_conversation(conversation_of(dataset, row))
            else:
                judged_answers(row, labelled=kind == LABEL_LOSS)
        except ValueError as error:
            wrong = str(error)
        if wrong is not None:
            raise ValueError(f"{place}: {wrong}")
