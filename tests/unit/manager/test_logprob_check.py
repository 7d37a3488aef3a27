"""Differences to the trainer's log-probabilities that raise an alarm, and those that do not."""

from __future__ import annotations

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.inference.settings import GenerationBackend, Quantization
from asyncrl.manager.fleet.logprob_check import (
    COARSE_TOLERANCE,
    FLOAT32_TOLERANCE,
    QUANTISED_TOLERANCE,
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


def test_rounding_between_trainer_and_server_is_tolerated_by_type() -> None:
    config = ExperimentConfig()
    config.model.dtype = config.generation.dtype = Dtype.float32
    assert logprob_check_tolerance(config) == FLOAT32_TOLERANCE
    config.model.publish_dtype = Dtype.bfloat16
    assert logprob_check_tolerance(config) == COARSE_TOLERANCE
    config.generation.quantization = Quantization.int8
    assert logprob_check_tolerance(config) == QUANTISED_TOLERANCE
    config.generation.backend, config.generation.quantization = GenerationBackend.sglang, Quantization.none
    assert logprob_check_tolerance(config) == COARSE_TOLERANCE
    config.generation.sglang.args = {"--quantization": "fp8"}
    assert logprob_check_tolerance(config) == QUANTISED_TOLERANCE
