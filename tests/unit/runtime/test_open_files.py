"""The open files that a run needs are checked before it starts."""

from __future__ import annotations

import resource

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.runtime.checks import check_files, needs
from asyncrl.runtime.process.hardware import allow_connections


def config_of(workers: int) -> ExperimentConfig:
    config = ExperimentConfig(group_size=4, train_batch_size=64, max_head_offpolicyness=1)
    config.rollout.workers, config.rollout.max_concurrent = workers, 100
    return config


@pytest.fixture
def hard(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    limits = [4096, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[1], limits[0]))
    return limits


def test_needs_follow_from_the_size_of_the_run() -> None:
    files = {need.process: need.files for need in needs(config_of(1000))}
    assert files["master_worker"] == 1000 + 1 + 128
    assert files["gserver_manager"] == 1000 + 1 + 128
    assert files["rollout_worker"] == 3 * 100 * 4 + 128
    assert files["generation_server"] == 2 * 64 * 4 + 128, "no more rollouts run than are admitted"


def test_a_limit_that_is_high_enough_is_not_mentioned(hard: list[int]) -> None:
    hard[0] = 1 << 20
    assert check_files(config_of(1000)) == []
    hard[0] = resource.RLIM_INFINITY
    assert check_files(config_of(1000)) == []


def test_a_need_that_depends_on_the_load_is_warned_of(hard: list[int]) -> None:
    hard[0] = 1300
    (warning,) = check_files(config_of(2))
    assert "rollout_worker needs up to 1328 open files (3 for each of rollout.max_concurrent=100" in warning
    assert "ulimit -Hn 1328" in warning


def test_a_need_that_is_certain_is_refused_before_anything_starts(hard: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"master_worker needs up to 5129 open files .1 training ranks, 5000 Rollout"):
        check_files(config_of(5000))


def test_without_a_limit_any_number_of_connections_is_allowed(hard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    hard[0] = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    allow_connections(100_000, "others")
    assert check_files(config_of(5000)) == []
