"""A trajectory that no process of the run can have made by right is refused where it arrives, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncrl.api.trajectory import Sample, SampleColumns, SharedPrompt, Trajectory
from asyncrl.comm.push_pull import InvalidTrajectory
from asyncrl.trainer.arrivals import ArrivalCheck

VOCABULARY, NEWEST = 17, 3


def check(newest: Callable[[], int] = lambda: NEWEST) -> ArrivalCheck:
    return ArrivalCheck(VOCABULARY, newest)


def trajectory(shared: bool = False, **changes: Any) -> Trajectory:
    fields = {
        "tokens": [16, 2, 0, 16],
        "loss_mask": [0, 1, 0, 1],
        "behave_logprobs": [0.0, -0.5, 0.0, 1e-6],
        "versions": [-1, 0, -1, NEWEST],
    } | changes
    dtypes = {"tokens": np.int32, "loss_mask": np.uint8, "behave_logprobs": np.float32, "versions": np.int32}
    arrays = {name: np.array(fields[name], dtype) for name, dtype in dtypes.items()}
    if not shared:
        return Trajectory("r", "p", 0, (Sample(**arrays, reward=1.0),))
    rest = SampleColumns.join((Sample(**{name: array[1:] for name, array in arrays.items()}, reward=1.0),))
    return Trajectory("r", "p", 0, SharedPrompt(arrays["tokens"][:1], rest))


@pytest.mark.parametrize("shared", [False, True])
def test_what_can_be_trained_is_taken(shared: bool) -> None:
    check().check(trajectory(shared))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tokens": [17, 2, 0, 16]}, "token 17, the vocabulary has 17"),
        ({"tokens": [16, 2, 1 << 30, 16]}, "token 1073741824"),
        ({"versions": [-1, -1, -1, 3]}, "without a version"),
        ({"versions": [-1, 0, -1, 4]}, "version 4, the newest is 3"),
        ({"versions": [-1, 0, 1 << 30, 3]}, "version 1073741824, the newest is 3"),
        ({"behave_logprobs": [0.0, 0.5, 0.0, 0.0]}, "log-probability 0.5"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(changes: dict[str, Any], why: str, shared: bool) -> None:
    with pytest.raises(InvalidTrajectory, match=f"'r' holds .*{why}"):
        check().check(trajectory(shared, **changes))


def test_the_newest_version_is_looked_up_only_for_what_is_newer_than_known() -> None:
    announced, asked = [1], []

    def newest() -> int:
        asked.append(announced[-1])
        return announced[-1]

    arrivals = check(newest)
    old = trajectory(versions=[-1, 0, -1, 1])
    for _ in range(3):
        arrivals.check(old)
    assert asked == [1]
    with pytest.raises(InvalidTrajectory):
        arrivals.check(trajectory())
    announced.append(3)
    arrivals.check(trajectory())
    arrivals.check(old)
    assert asked == [1, 1, 3]
