"""Differences to the trainer's log-probabilities that raise an alarm, and those that do not."""

from __future__ import annotations

import logging
import math

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.manager.fleet.fleet_runner import (
    COARSE_TOLERANCE,
    FLOAT32_TOLERANCE,
    QUANTISED_TOLERANCE,
    LogprobCheck,
    WeightsDiffer,
    logprob_check_tolerance,
)


@pytest.mark.parametrize(
    ("trainer", "servers", "setting", "tolerance"),
    [
        ("float32", "float32", None, FLOAT32_TOLERANCE),
        ("bfloat16", "bfloat16", None, COARSE_TOLERANCE),
        ("float32", "bfloat16", None, COARSE_TOLERANCE),
        ("bfloat16", "float32", None, COARSE_TOLERANCE),
        ("bfloat16", "bfloat16", 0.125, 0.125),
        ("float32", "float32", 0.0, 0.0),
    ],
)
def test_the_tolerance_is_as_set_or_follows_the_coarser_type(
    trainer: str, servers: str, setting: float | None, tolerance: float
) -> None:
    config = ExperimentConfig()
    config.model.dtype, config.generation.dtype, config.manager.logprob_check_tolerance = trainer, servers, setting
    assert logprob_check_tolerance(config) == tolerance


def compared(errors: list[list[float]], tolerance: float) -> LogprobCheck:
    """The check of sequences of which a server's log-probabilities have these errors."""
    check = LogprobCheck(tolerance, logging.getLogger("check"))
    check._compare(0, 3, [[(place, -2.0, -2.0 + error) for place, error in enumerate(each)] for each in errors])
    return check


def test_one_token_that_rounding_hits_is_no_alarm_and_a_sequence_that_is_wrong_is_one() -> None:
    rounding = [[0.05, 0.09, 0.62, 0.1], [0.08, -0.1, 0.2]]
    assert compared(rounding, COARSE_TOLERANCE).differences[0] == pytest.approx(0.215)
    with pytest.raises(
        WeightsDiffer, match=r"token 1 of the probe's sequence 1 .*; the difference 0.8 is above .*=0.5"
    ):
        compared([rounding[0], [0.7, -0.9]], COARSE_TOLERANCE)
    with pytest.raises(WeightsDiffer, match="difference nan"):
        compared([rounding[0], [0.1, math.nan]], COARSE_TOLERANCE)


def test_rounding_between_trainer_and_server_is_tolerated_by_type() -> None:
    config = ExperimentConfig()
    config.model.dtype = config.generation.dtype = Dtype.float32
    assert logprob_check_tolerance(config) == FLOAT32_TOLERANCE
    config.model.publish_dtype = Dtype.bfloat16
    assert logprob_check_tolerance(config) == COARSE_TOLERANCE
    config.generation.backend = "sglang"
    assert logprob_check_tolerance(config) == COARSE_TOLERANCE
    config.generation.sglang.args = {"--quantization": "fp8"}
    assert logprob_check_tolerance(config) == QUANTISED_TOLERANCE
