"""A trajectory that no process of the run can have made by right is refused where it arrives, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.api.trajectory import Sample, SampleColumns, SharedPrompt, Trajectory
from asyncrl.comm.push_pull import InvalidTrajectory
from asyncrl.comm.trajectory_codec import decode_trajectories, encode_trajectories
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.models.model_config import RoutingShape
from asyncrl.trainer.rank.inbox import TrajectoryCheck

VOCABULARY, NEWEST = 17, 3


def check(newest: Callable[[], int] = lambda: NEWEST) -> TrajectoryCheck:
    return TrajectoryCheck(VOCABULARY, newest)


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


@pytest.mark.parametrize("described", [{"vocab_size": VOCABULARY}, {"text_config": {"vocab_size": VOCABULARY}}])
def test_the_vocabulary_is_that_of_the_model_also_where_its_text_part_names_it(
    described: dict[str, Any], config: ExperimentConfig, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "any", **described}))
    config.model.path = str(tmp_path)
    arrivals = TrajectoryCheck.of_model(config, lambda: NEWEST)
    arrivals.check(trajectory())
    with pytest.raises(InvalidTrajectory, match="token 17, the vocabulary has 17"):
        arrivals.check(trajectory(tokens=[17, 2, 0, 16]))


def test_generated_tokens_outside_of_the_allowed_ones_are_refused_by_name() -> None:
    TrajectoryCheck(VOCABULARY, lambda: NEWEST, allowed=(2, 16)).check(trajectory())
    with pytest.raises(InvalidTrajectory, match=r"generated token 16, .*rollout.sampling.allowed_token_ids"):
        TrajectoryCheck(VOCABULARY, lambda: NEWEST, allowed=(0, 2)).check(trajectory())


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


SHAPE = RoutingShape(layers=2, per_token=2, experts=4)


def routed(routing: Any, shared: bool = False) -> Trajectory:
    """A trajectory of which tokens 1 and 3 are generated: tokens 0 to 2 went into the model before."""
    (sample,) = trajectory().samples
    sample = replace(sample, routing=routing)
    if not shared or routing is None:
        return Trajectory("r", "p", 0, (sample,))
    (decoded,) = decode_trajectories(encode_trajectories([Trajectory("r", "p", 0, (sample, sample))]))
    assert isinstance(decoded.samples, SharedPrompt)
    return decoded


def experts(last: int = 255, **changes: int) -> np.ndarray:
    """Expert 1 and 3 for all tokens, `last` at the last one; `changes` by token, at the second layer."""
    made = np.broadcast_to(np.array([1, 3], np.uint8), (4, 2, 2)).copy()
    made[3] = last
    for name, expert in changes.items():
        made[int(name.removeprefix("at")), 1, 0] = expert
    return made


@pytest.mark.parametrize("shared", [False, True])
def test_experts_that_are_told_are_taken(shared: bool) -> None:
    arrivals = TrajectoryCheck(VOCABULARY, lambda: NEWEST, SHAPE)
    arrivals.check(routed(experts(), shared))
    arrivals.check(routed(experts(last=2), shared))
    check().check(routed(experts(), shared))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("routing", "why"),
    [
        (None, "does not tell which experts"),
        (experts(at1=4), "went through expert 4, the model has 4"),
        (experts(at3=7), "went through expert 255, the model has 4"),
        (experts(at2=255), "went through expert 255"),
        (
            np.where(np.arange(4)[:, None, None] >= 2, 255, experts()).astype(np.uint8),
            "experts of [12] tokens that lie",
        ),
        (experts().astype(np.uint16), "the model makes uint8"),
        (experts()[:, :1], r"has a routing of uint8 \(1, 2\), the model makes uint8 \(2, 2\)"),
    ],
)
def test_experts_that_cannot_be_replayed_are_refused_by_name(routing: Any, why: str, shared: bool) -> None:
    with pytest.raises(InvalidTrajectory, match=f"'r' .*{why}"):
        TrajectoryCheck(VOCABULARY, lambda: NEWEST, SHAPE).check(routed(routing, shared))
