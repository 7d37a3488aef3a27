"""A sample and a trajectory in which every field says something, to find a way of theirs that loses one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

import numpy as np

from asyncrl.api import Sample, Trajectory
from asyncrl.api.picture import Picture, PlacedPicture

_PIXELS = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)

SAMPLE = Sample(
    tokens=np.array([9, 2, 3, 4], np.int32),
    loss_mask=np.array([0, 0, 1, 1], np.uint8),
    behave_logprobs=np.array([0.0, 0.0, -0.1, -1 / 3], np.float32),
    versions=np.array([-1, -1, 4, 5], np.int32),
    reward=0.1,
    truncated=True,
    episode=2,
    token_rewards=np.array([0.0, 0.0, 0.0, 0.3], np.float32),
    reward_parts={"exact": 1.0},
    metrics={"turns": 2.0},
    routing=np.arange(16, dtype=np.uint8).reshape(4, 2, 2),
    token_columns={"entropy": np.array([0.0, 0.0, 0.5, 0.25], np.float32)},
    pictures=(PlacedPicture(0, 1, Picture.from_array(_PIXELS)),),
    group="judge/one",
    frames=(Picture.from_array(_PIXELS[::-1].copy()),),
)


TRAJECTORY = Trajectory("rollout-1", "prompt-1", 17, (SAMPLE, SAMPLE), {"agent/turns": 2.0})

Record = TypeVar("Record", Sample, Trajectory)


def differences(one: Record, other: Record, *, but: Collection[str] = ()) -> list[str]:
    """The names of the fields that differ, without those that are not meant to travel: `but`.

    The samples of trajectories are compared without `but` too, and named `samples[0].reward`.
    """
    found = []
    for name in (field.name for field in fields(one)):
        mine, yours = getattr(one, name), getattr(other, name)
        if name == "samples":
            for number, pair in enumerate(zip(mine, yours, strict=True)):
                found += [f"samples[{number}].{each}" for each in differences(*pair, but=but)]
        elif name not in but and not _equal(mine, yours):
            found.append(name)
    return found


def fields_without_a_value() -> list[str]:
    """Fields of `SAMPLE` and `TRAJECTORY` that are as they are by default, so that losing them would not show."""
    found = []
    for whole in (SAMPLE, TRAJECTORY):
        for field in fields(whole):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if default is not MISSING and _equal(getattr(whole, field.name), default):
                found.append(field.name)
    return found


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)
