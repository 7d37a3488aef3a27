"""The settings that are advised after a lack of memory, and how a lack of memory is told by text."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory import is_out_of_memory, server_settings, trainer_settings
from asyncrl.config.setting import Dtype
from asyncrl.trainer.settings import KeptOn


def config() -> ExperimentConfig:
    config = ExperimentConfig()
    config.dataset.max_prompt_tokens = 1000
    config.rollout.sampling.max_new_tokens = 3000
    config.train_batch_size, config.group_size, config.trainer.ppo_minibatches = 64, 8, 4
    config.generation.sglang.args = {"mem-fraction-static": 0.3}
    config.generation.backend = "sglang"
    return config


def names(config: ExperimentConfig, **about: Any) -> list[str]:
    given = {"backward": True, "forward": True, "on_gpu": True, "roles": 2, "shared": True} | about
    return [line.partition(" ")[0].partition("=")[0] for line in trainer_settings(config, **given)]


FIRST = ["trainer.gradient_checkpointing", "trainer.tokens_per_micro_batch"]
THEN = ["optimizer.moments_on", "trainer.offload"]
BESIDE = ["generation.sglang.args.mem_fraction_static", "generation.colocated"]


@pytest.mark.parametrize(
    ("about", "advised"),
    [
        ({}, [*FIRST, *THEN, *BESIDE, "trainer.parallel"]),
        ({"backward": False}, ["trainer.tokens_per_micro_batch", *THEN, *BESIDE, "trainer.parallel"]),
        ({"backward": False, "forward": False}, [*THEN, *BESIDE, "trainer.parallel"]),
        ({"roles": 1, "shared": False}, [*FIRST, "optimizer.moments_on", "trainer.parallel"]),
        ({"on_gpu": False, "shared": False}, FIRST),
    ],
)
def test_the_settings_that_help_come_in_the_order_in_which_to_try_them(about: Any, advised: list[str]) -> None:
    assert names(config(), **about) == advised


def test_what_is_set_already_is_left_out() -> None:
    tuned = config()
    tuned.trainer.gradient_checkpointing = tuned.trainer.offload = True
    tuned.trainer.activations_on = tuned.optimizer.moments_on = KeptOn.host
    tuned.generation.colocated = "all"
    tuned.trainer.tokens_per_micro_batch = 4000
    assert names(tuned) == [
        "rollout.sampling.max_new_tokens",
        "generation.sglang.args.mem_fraction_static",
        "trainer.parallel",
    ]


@pytest.mark.parametrize(("now", "advised"), [(100_000, 50_000), (6000, 4000), (1_000_000, 256_000)])
def test_the_advised_micro_batch_holds_a_sequence_and_is_smaller_than_the_one_that_failed(
    now: int, advised: int
) -> None:
    tuned = config()  # a sequence has up to 4000 tokens, a minibatch up to 512,000
    tuned.trainer.tokens_per_micro_batch = now
    lines = trainer_settings(tuned, backward=False, forward=True, on_gpu=False, roles=1, shared=False)
    assert [*lines] == [f"trainer.tokens_per_micro_batch={advised} (now {now})"]


def test_a_servers_type_is_advised_only_where_it_is_the_wide_one() -> None:
    given = ExperimentConfig()
    assert "generation.dtype=bfloat16" in [*server_settings(given, on_gpu=False)]
    assert "generation.dtype=bfloat16" not in [*server_settings(given, on_gpu=True)]
    given.generation.dtype = Dtype.float32
    assert "generation.dtype=bfloat16" in [*server_settings(given, on_gpu=True)]


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.", True),
        ("AcceleratorError: CUDA error: out of memory", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you", True),
        ("ValueError: the list is out of range", False),
        ("OSError: [Errno 28] No space left on device", False),
    ],
)
def test_a_lack_of_memory_is_told_by_its_text(text: str, is_one: bool) -> None:
    assert is_out_of_memory(text) == is_one
