"""Your own columns: numbers of samples and tokens, by name, for graph functions, losses, advantages and filters.

`rollout.columns` declares them once. The name gives the source of the number:

    row/<field>      a number in the dataset's row
    agent/<name>     `Sample.metrics`, set by the agent
    reward/<name>    `Sample.reward_parts`: a named reward, or a number that a reward returned beside its score
    token/<name>     `Sample.token_columns`: one number for each generated token

A group is refused by the RolloutWorker if one of its samples lacks a column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.api.trajectory import Sample, SampleColumns

ROW, AGENT, REWARD, TOKEN = "row", "agent", "reward", "token"
KINDS = (ROW, AGENT, REWARD, TOKEN)


class ColumnError(ValueError):
    """A sample or its row lacks a declared column. The message names the column and the existing ones."""


def check_name(name: str) -> str | None:
    """Return an error message for the declaration `name`; None if it is valid."""
    kind, slash, own = name.partition("/")
    if kind in KINDS and slash and own:
        return None
    return f"{name!r} is not a column; write row/<field>, agent/<name>, reward/<name> or token/<name>"


def with_columns(samples: Sequence[Sample], data: Mapping[str, Any], declared: Sequence[str]) -> list[Sample]:
    """Return the samples, each with the numbers of its row that `declared` names.

    Raises:
        ColumnError: a sample or the row lacks a declared column, or the row's value is not a finite number.
    """
    of_row: dict[str, float] = {}
    for name in declared:
        kind, _, own = name.partition("/")
        if kind == ROW:
            value = data.get(own)
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ColumnError(
                    f"rollout.columns: {name!r} is {value!r:.40} in this row, whose fields are {', '.join(data)}; a "
                    "column is a finite number"
                )
            of_row[name] = float(value)
    found = [replace(sample, metrics={**sample.metrics, **of_row}) if of_row else sample for sample in samples]
    for sample in found:
        for name in declared:
            there = _of(sample, name)
            if name.partition("/")[2] not in there and name not in there:
                listed = ", ".join(there) or "none"
                raise ColumnError(
                    f"rollout.columns, or a teacher's logprobs: a sample of episode {sample.episode} lacks {name!r}; "
                    f"it has {listed}"
                )
    return found


def _of(sample: Sample, name: str) -> Mapping[str, Any]:
    kind = name.partition("/")[0]
    return {TOKEN: sample.token_columns, REWARD: sample.reward_parts}.get(kind, sample.metrics)


def column(samples: SampleColumns, name: str) -> NDArray[Any]:
    """Return the declared column `name`: `[T]` float32 for tokens, else `[S]` float64.

    Raises:
        ColumnError: a sample lacks it, for example one that was kept before the column was declared.
    """
    kind, _, own = name.partition("/")
    by_kind: dict[str, Mapping[str, NDArray[Any]]] = {TOKEN: samples.token_columns, REWARD: samples.reward_parts}
    of_kind = by_kind.get(kind, samples.metrics)
    found: NDArray[Any] | None = of_kind.get(name if kind == ROW else own)
    if found is None or np.isnan(found).any():
        raise ColumnError(f"rollout.columns: {name!r} is missing in a sample that is to be trained")
    return found


def numbers_of(sample: Sample) -> dict[str, float]:
    """Return the sample's own numbers by column name, declared or not."""
    named = {f"{REWARD}/{name}": value for name, value in sample.reward_parts.items()}
    for name, value in sample.metrics.items():
        named[name if name.startswith(f"{ROW}/") else f"{AGENT}/{name}"] = value
    return named
