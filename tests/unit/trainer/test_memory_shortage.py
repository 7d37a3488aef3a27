"""A training rank that runs out of memory says where, in what, and what to lower."""

from __future__ import annotations

import pytest
import torch

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.models.ranks import PeerFailed
from asyncrl.runtime.process.worker import OutOfMemory
from asyncrl.trainer.rank.measures import MemoryShortage

TORCHS = "CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 79.10 GiB"


@pytest.fixture
def memory() -> MemoryShortage:
    return MemoryShortage(ExperimentConfig(), "model_worker/3", torch.device("cpu"), 1)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError(TORCHS), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")],
)
def test_torchs_error_becomes_one_message(memory: MemoryShortage, error: Exception) -> None:
    with (
        pytest.raises(OutOfMemory) as caught,
        memory.explained("call 'actor_train' (role 'actor') of step 3", forward=True, backward=True),
    ):
        raise error
    what, settings = str(caught.value).splitlines()
    assert what.startswith("out of memory: model_worker/3 on the CPU in call 'actor_train' (role 'actor') of step 3: ")
    assert ("1.16 GiB" in what) == isinstance(error, torch.OutOfMemoryError)
    assert "GiB are free, and this process has " in what
    assert settings.startswith("to need less memory, in this order: trainer.gradient_checkpointing=true; trainer.")


def test_another_ranks_error_is_named_with_that_rank(memory: MemoryShortage) -> None:
    reported = f"loading failed on another rank, 1 of 2: OutOfMemoryError('{TORCHS}')"
    with pytest.raises(OutOfMemory, match="memory: loading failed on another rank, 1 of 2"), memory.explained("a load"):
        raise PeerFailed(reported)


def test_other_errors_pass(memory: MemoryShortage) -> None:
    with pytest.raises(ValueError, match="a shape"), memory.explained("a call"):
        raise ValueError("a shape is wrong")
