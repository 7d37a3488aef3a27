"""The cases of `tests/device` on a GPU: train steps and embedded engines have the CPU's numbers, up to rounding.

On a CPU the first case of each kind runs, which keeps the test itself alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from asyncrl.inference.embedded.prefix_cache import common_length
from asyncrl.inference.engine_io import GenerationOutput
from asyncrl.master.graph import load_graph
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.rank.training_rank import build_rank
from tests.device_cases import (
    ENGINE_CASES,
    TRAIN_CASES,
    EngineCase,
    Folders,
    configured,
    data_of,
    engine_of,
    jobs_of,
    step,
)
from tests.engine_steps import drain

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROUNDING, ROUNDING_16_BITS = 1e-3, 0.1
"""Relative, or absolute below 1: sums have another order on a GPU, and AdamW's first step amplifies it."""


def on_each(cases: Mapping[str, Any]) -> pytest.MarkDecorator:
    first = pytest.param("cpu", next(iter(cases)))
    return pytest.mark.parametrize(
        ("device", "name"), [first, *(pytest.param("cuda", name, marks=ON_GPU) for name in cases)]
    )


@on_each(TRAIN_CASES)
def test_a_train_step_has_the_cpus_numbers(device: str, name: str, folders: Folders) -> None:
    case = TRAIN_CASES[name]
    config, data = configured(case, folders, micro_batch=200), data_of(case, folders)
    expected, found = (
        step(config, build_rank(config, load_graph(config), World(), where), 0, where, data)
        for where in (torch.device("cpu"), torch.device(device))
    )
    rounding = ROUNDING_16_BITS if name == "bf16" else ROUNDING
    for figure in ("ppo/loss_per_minibatch", "grad_norm", "entropy", "optimizer/steps"):
        assert found[figure] == pytest.approx(expected[figure], rel=rounding, abs=rounding), figure


@on_each(ENGINE_CASES)
def test_the_embedded_engine_writes_the_cpus_tokens(device: str, name: str, folders: Folders) -> None:
    """A sample may go another way where its random number is within a rounding of the border between two tokens."""
    case = ENGINE_CASES[name]
    expected, found = (outputs(case, torch.device(where), folders) for where in ("cpu", device))
    rounding = ROUNDING if case.dtype == torch.float32 else ROUNDING_16_BITS
    for ours, theirs in zip(found, expected, strict=True):
        alike = common_length(tuple(ours.output_ids), tuple(theirs.output_ids))
        assert ours.logprobs[:alike] == pytest.approx(theirs.logprobs[:alike], abs=rounding)
    same = sum(ours.output_ids == theirs.output_ids for ours, theirs in zip(found, expected, strict=True))
    assert same >= 9 or case.dtype != torch.float32, f"{same} of 12 samples are the CPU's"


def outputs(case: EngineCase, device: torch.device, folders: Folders) -> list[GenerationOutput]:
    """What an engine on `device` answers, in the order of the requests."""
    engine, jobs = engine_of(case, device, folders), jobs_of(case, folders)
    for job in jobs:
        engine.submit(job)
    drain(engine)
    return [output for job in jobs for output in job.future.result(timeout=0)]
