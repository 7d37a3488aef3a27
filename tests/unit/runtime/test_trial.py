"""Names of a trial when its whole run begins again."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from asyncrl.comm import names
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime.trials.claim import TrialError, open_resolver
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.runtime.trials.trial import Trial


def test_who_joined_is_given_up_when_the_whole_run_begins_again(tmp_path: Path) -> None:
    """It is no child of the launcher, and what it has in hand is of a policy that there is not any more."""
    config = ExperimentConfig()
    config.fileroot, config.rollout.workers, config.checkpoint.in_memory = str(tmp_path), 2, False
    trial = Trial(config, print)
    trial.prepare()
    own, joined = (names.incarnation_key(names.ROLLOUT_WORKER, index) for index in (1, 2))
    with open_resolver(config, trial.run_dir) as resolver:
        resolver.add(own, "4")
        resolver.add(joined, "7")
        resolver.add(names.MANAGER_KEY, "http://of-the-run-before")
        trial.begin_again()
        assert (resolver.get(own), resolver.get(joined)) == ("4", "8")
        assert names.MANAGER_KEY not in resolver.get_subtree("")
    trial.release()


def test_a_start_without_room_in_memory_says_what_to_free_and_which_setting_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MemoryCheckpoint, "_make", full)
    config = ExperimentConfig(fileroot=str(tmp_path))
    with pytest.raises(TrialError, match=r"No space left on device; free .+ \(df -h .+\), or set checkpoint.in_"):
        Trial(config, print).prepare()
    config.checkpoint.in_memory = False
    trial = Trial(config, print)
    trial.prepare()
    trial.release()


def test_what_killed_ranks_left_of_their_meeting_is_removed_with_the_trial(tmp_path: Path) -> None:
    config = ExperimentConfig(fileroot=str(tmp_path))
    trial = Trial(config, print)
    trial.prepare()
    for which in (trial.forget_brain, trial.release):
        meeting = trial.run_dir / "training_world-4711-1"
        meeting.touch()
        which()
        assert not meeting.exists()
