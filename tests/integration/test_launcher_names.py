"""A launch finds nothing in name resolution of what an earlier launch of the same trial left there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.comm import names
from asyncrl.comm.name_files import FileResolver
from asyncrl.comm.name_resolve import NameResolveUnavailable
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import run_dir_of
from asyncrl.observe.display import make_display
from asyncrl.runtime.launcher import Launcher
from asyncrl.runtime.trials.claim import TrialError, open_resolver

VERSION = names.PublishedVersion(7, "/weights/v7")


def config_of(tmp_path: Path, trial: str = "trial0") -> ExperimentConfig:
    return ExperimentConfig(fileroot=str(tmp_path / "root"), trial_name=trial)


def prepare(config: ExperimentConfig) -> None:
    """As a launch does, which then breaks off."""
    launcher = Launcher(config, make_display("none", "", 1, 1))
    launcher.prepare()
    launcher.release()


@pytest.fixture(params=["trial_folder", "shared_folder", pytest.param("etcd3", marks=pytest.mark.etcd)])
def configs(request: pytest.FixtureRequest, tmp_path: Path) -> list[ExperimentConfig]:
    """Two trials with one name resolution."""
    made = [config_of(tmp_path, trial) for trial in ("trial0", "trial1")]
    for config in made:
        if request.param == "shared_folder":
            config.system.name_resolve_root = str(tmp_path / "shared")
        elif request.param == "etcd3":
            config.system.name_resolve = "etcd3"
            config.system.name_resolve_root = request.getfixturevalue("etcd_address")
    return made


def test_announcements_of_an_earlier_launch_are_gone_and_those_of_other_trials_stay(
    configs: list[ExperimentConfig],
) -> None:
    for config in configs:
        prepare(config)
        with open_resolver(config, run_dir_of(config)) as resolver:
            resolver.add(names.model_version_key("actor"), VERSION.encode())
            resolver.add(names.MANAGER_KEY, "http://gone")
            resolver.add(names.status_key("master_worker", 0), names.WorkerStatus("failed", 1).encode())
    mine, others = configs
    prepare(mine)
    with open_resolver(mine, run_dir_of(mine)) as resolver:
        assert list(resolver.get_subtree()) == [names.LAUNCH_KEY]
    with open_resolver(others, run_dir_of(others)) as resolver:
        assert names.PublishedVersion.decode(resolver.get(names.model_version_key("actor"))) == VERSION


def test_what_fails_once_as_where_a_machine_stands_still_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, answered = FileResolver._read_subtree, iter([False])

    def away_at_first(*args: Any) -> dict[str, str]:
        if not next(answered, True):
            raise NameResolveUnavailable("no answer")
        return read(*args)

    monkeypatch.setattr(FileResolver, "_read_subtree", away_at_first)
    prepare(config_of(tmp_path))
    assert next(answered, True)


@pytest.mark.etcd
def test_name_resolution_that_cannot_be_reached_ends_the_launch_with_its_setting(tmp_path: Path) -> None:
    pytest.importorskip("asyncrl.hosts.etcd", reason="the extra 'etcd' is not installed")
    config = config_of(tmp_path)
    config.system.name_resolve, config.system.name_resolve_root = "etcd3", "127.0.0.1:1"
    config.system.name_resolve_timeout_s = 1.0
    with pytest.raises(TrialError, match=r"system\.name_resolve='etcd3'.*127\.0\.0\.1:1"):
        prepare(config)
