"""One launch at a time has a trial, wherever its names lie; and its folder is its user's alone."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from asyncrl.comm import names
from asyncrl.comm.files import FileLock
from asyncrl.comm.name_resolve import NameResolver
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import LOCK_FILE, NAMES_DIR, SECRET_FILE, run_dir_of
from asyncrl.observe.display import make_display
from asyncrl.runtime.launcher import Launcher
from asyncrl.runtime.settings import Resume
from asyncrl.runtime.trials.claim import TrialClaim, TrialError, TrialHeld, open_resolver, read_holder
from asyncrl.runtime.trials.trial import Trial

KEY = names.model_version_key("actor")
CHANGES: dict[str, Callable[[Trial], None]] = {
    "fence": lambda trial: trial.fence({("model_worker", 0): 1}, [("model_worker", 0)]),
    "forget_brain": Trial.forget_brain,
    "begin_again": Trial.begin_again,
}
"""What a launcher changes in the names of its trial after a death."""


@pytest.fixture(params=["shared_folder", pytest.param("etcd3", marks=pytest.mark.etcd)])
def configs(request: pytest.FixtureRequest, tmp_path: Path) -> list[ExperimentConfig]:
    """One trial name under three `fileroot`s, which share names."""
    made = [ExperimentConfig(fileroot=str(tmp_path / root)) for root in ("one", "two", "three")]
    for config in made:
        config.experiment_name = tmp_path.name  # etcd lives longer than a test
        config.system.name_resolve_root = str(tmp_path / "shared")
        if request.param == "etcd3":
            config.system.name_resolve = "etcd3"
            config.system.name_resolve_root = request.getfixturevalue("etcd_address")
    return made


@pytest.fixture
def _any_umask() -> Iterator[None]:
    previous = os.umask(0)
    yield
    os.umask(previous)


def launcher_of(config: ExperimentConfig) -> Launcher:
    return Launcher(config, make_display("none", "", 1, 1))


def forget(resolver: NameResolver) -> None:
    """As another launch does with the names of an earlier one."""
    for key in resolver.get_subtree():
        resolver.delete(key)


def dead_holder(config: ExperimentConfig) -> names.TrialHolder:
    """Return the holder that a launcher, ended by now, wrote of itself. This process has its id, and means nothing."""
    claim = TrialClaim.take(config)
    claim.release()
    return claim.holder


def test_a_second_run_of_the_name_is_refused_by_name_before_anything_is_deleted(
    configs: list[ExperimentConfig],
) -> None:
    first, second, _ = (launcher_of(config) for config in configs)
    configs[1].resume = Resume.restart
    first.prepare()
    kept = second.run_dir / "metrics.jsonl"
    kept.parent.mkdir(parents=True, mode=0o700)
    kept.write_text("{}\n")
    kept.chmod(0o600)
    with open_resolver(configs[0], first.run_dir) as resolver:
        resolver.add(KEY, "v7")
        with pytest.raises(TrialError, match=f"another run of .*: pid {os.getpid()} on .*since 20.*{first.run_dir}"):
            second.prepare()
        assert resolver.get(KEY) == "v7"
        assert kept.read_text() == "{}\n"
        first.release()
        second.prepare()
        assert list(resolver.get_subtree()) == [names.LAUNCH_KEY, names.TRIAL_KEY]
    second.release()


def test_what_a_dead_launch_left_is_taken_over_at_once(configs: list[ExperimentConfig]) -> None:
    dead = dead_holder(configs[0])
    with open_resolver(configs[0], run_dir_of(configs[0])) as resolver:
        resolver.add(names.TRIAL_KEY, dead.encode())
        resolver.add(KEY, "v7")
        second = launcher_of(configs[1])
        second.prepare()
        assert names.TrialHolder.decode(resolver.get(names.TRIAL_KEY)).launch != dead.launch
        assert KEY not in resolver.get_subtree()
        second.release()


@pytest.mark.parametrize("change", [{"machine": "another"}, {"launch": "of another container"}])
def test_a_holder_whose_lock_is_not_seen_here_may_live(configs: list[ExperimentConfig], change: dict[str, str]) -> None:
    """It is on another machine, or the folder with the same path here is another."""
    dead = structs.replace(dead_holder(configs[0]), **change)
    with open_resolver(configs[0], run_dir_of(configs[0])) as resolver:
        resolver.add(names.TRIAL_KEY, dead.encode())
        second = launcher_of(configs[1])
        with pytest.raises(TrialError, match="free within 60 s"):
            second.prepare()
        forget(resolver)


def test_a_holder_lives_while_its_lock_is_held_whatever_its_process_id(configs: list[ExperimentConfig]) -> None:
    """The ids of another container's processes mean nothing here, or other processes."""
    first = TrialClaim.take(configs[0])
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    written = structs.replace(first.holder, pid=ended.pid, started=1)
    os.ftruncate(first.lock.descriptor, 0)
    os.pwrite(first.lock.descriptor, written.encode().encode(), 0)
    with open_resolver(configs[0], run_dir_of(configs[0])) as resolver:
        resolver.add(names.TRIAL_KEY, written.encode(), replace=True)
        for config in configs:
            with pytest.raises(TrialError, match="another run "):
                TrialClaim.take(config)
        first.release()
        TrialClaim.take(configs[1]).release()
        forget(resolver)


def test_the_next_launch_waits_for_the_leading_process_of_a_killed_one_in_any_container(tmp_path: Path) -> None:
    config = ExperimentConfig(fileroot=str(tmp_path))
    first = TrialClaim.take(config)
    first._own.close()  # as the kernel does if the launcher is killed; the leading process keeps the other
    noted: list[str] = []

    def note(text: str) -> None:
        noted.append(text)
        first.lock.close()

    TrialClaim.take(config, note).release()
    assert "was killed, and is saving; waiting" in noted[0]


def test_a_launch_that_waited_for_a_folder_that_was_removed_takes_that_which_is_there_now(tmp_path: Path) -> None:
    """As where `clean --all` has the lock, and is told to remove the folder."""
    config = ExperimentConfig(fileroot=str(tmp_path))
    TrialClaim.take(config).release()
    cleaning = FileLock(run_dir_of(config) / LOCK_FILE)
    assert cleaning.take()

    def remove(_: str) -> None:
        shutil.rmtree(run_dir_of(config))
        cleaning.close()

    first = TrialClaim.take(config, remove)
    assert first.lock.is_current()
    with pytest.raises(TrialHeld):
        TrialClaim.take(config)
    first.release()


def test_a_launch_that_cannot_write_who_it_is_leaves_the_trial_as_it_was(
    configs: list[ExperimentConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, run_dir = dead_holder(configs[0]), run_dir_of(configs[0])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(TrialError, match=r"lock.*No space left on device"):
            TrialClaim.take(configs[0])
    assert read_holder(run_dir) == dead
    with open_resolver(configs[0], run_dir) as resolver:
        assert names.TRIAL_KEY not in resolver.get_subtree()
    TrialClaim.take(configs[0]).release()


def test_a_file_system_without_locks_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", without)
    with pytest.raises(TrialError, match=rf"file system of {tmp_path}.* has no locks .*mount it with `flock`"):
        TrialClaim.take(ExperimentConfig(fileroot=str(tmp_path)))
    held = [file.path for file in psutil.Process().open_files() if Path(file.path).is_relative_to(tmp_path)]
    assert held == []


def test_of_two_that_find_the_same_dead_claim_one_wins(
    configs: list[ExperimentConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other comes between the look at the dead claim and its removal."""
    dead = dead_holder(configs[0])
    other: list[TrialClaim] = []
    is_dead = TrialClaim._is_dead

    def overtaken(claim: TrialClaim, holder: names.TrialHolder) -> bool:
        if not other:
            other.append(None)  # type: ignore[arg-type]  # not again within the call below
            other[0] = TrialClaim.take(configs[1])
        return is_dead(claim, holder)

    with open_resolver(configs[0], run_dir_of(configs[0])) as resolver:
        resolver.add(names.TRIAL_KEY, dead.encode())
        monkeypatch.setattr(TrialClaim, "_is_dead", overtaken)
        with pytest.raises(TrialError, match="another run of"):
            TrialClaim.take(configs[2])
        assert names.TrialHolder.decode(resolver.get(names.TRIAL_KEY)) == other[0].holder
        assert not other[0].is_lost()
        resolver.add(names.TRIAL_KEY, dead.encode(), replace=True)
        assert other[0].is_lost()
        other[0].release()
        forget(resolver)


def test_a_launch_that_stood_still_while_another_came_and_went_has_lost_its_names(
    configs: list[ExperimentConfig],
) -> None:
    first, second, _ = (Trial(config, print) for config in configs)
    first.prepare()
    with open_resolver(configs[0], first.run_dir) as resolver:
        resolver.delete(names.TRIAL_KEY)  # its lease has run out
        second.prepare()
        second.release()
        assert first.claim.is_lost()
        first.release()
        forget(resolver)


@pytest.mark.parametrize(
    ("change", "moment"),
    [
        *itertools.product(CHANGES, ["before", "left"]),
        *itertools.product(["forget_brain", "begin_again"], ["meanwhile"]),
    ],
)
def test_a_launch_that_does_not_know_that_its_names_are_anothers_changes_nothing_of_them(
    configs: list[ExperimentConfig], monkeypatch: pytest.MonkeyPatch, change: str, moment: str
) -> None:
    """It was cut off, and comes back as it handles a death; or it stands still while it looks what there is."""
    first, second, _ = (Trial(config, print) for config in configs)
    first.prepare()
    get_subtree, found = NameResolver.get_subtree, dict[str, str]()

    def take_over() -> None:
        monkeypatch.setattr(NameResolver, "get_subtree", get_subtree)
        resolver.delete(names.TRIAL_KEY)  # its lease has run out
        second.prepare()
        resolver.add(names.TRAINER_TURN_KEY, "same")
        resolver.add(names.incarnation_key("rollout_worker", 100), "7")
        if moment == "left":
            second.release()
        found.update(resolver.get_subtree())

    def overtaken(resolver: NameResolver, root: str = "") -> dict[str, str]:
        before = get_subtree(resolver, root)
        take_over()
        return before

    with open_resolver(configs[0], first.run_dir) as resolver:
        resolver.add(names.TRAINER_TURN_KEY, "same")
        if moment == "meanwhile":
            monkeypatch.setattr(NameResolver, "get_subtree", overtaken)
        else:
            take_over()
        with pytest.raises(TrialHeld, match="silent for 60 s, and another took the trial over"):
            CHANGES[change](first)
        assert resolver.get_subtree() == found
        first.release()
        if moment != "left":
            second.release()
        forget(resolver)


def test_a_launch_whose_names_are_taken_while_it_prepares_is_refused(
    configs: list[ExperimentConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = (Trial(config, print) for config in configs)
    with open_resolver(configs[0], first.run_dir) as resolver:
        forget_processes = Trial._forget_processes

        def taken(trial: Trial) -> None:
            monkeypatch.undo()
            resolver.delete(names.TRIAL_KEY)
            second.prepare()
            forget_processes(trial)

        monkeypatch.setattr(Trial, "_forget_processes", taken)
        with pytest.raises(TrialHeld, match="another took the trial over"):
            first.prepare()
        assert not second.claim.is_lost()
        second.release()
        forget(resolver)


def test_a_second_run_in_the_folder_is_told_who_has_it(tmp_path: Path) -> None:
    config = ExperimentConfig(fileroot=str(tmp_path))
    first = launcher_of(config)
    first.prepare()
    with pytest.raises(TrialError, match=f"another run is using .*: pid {os.getpid()} on .*, since 20"):
        launcher_of(config).prepare()
    assert read_holder(first.run_dir) is not None
    first.release()


@pytest.mark.usefixtures("_any_umask")
@pytest.mark.parametrize("shared", [False, True])
def test_locks_and_folders_are_their_owners_alone_whatever_the_umask(tmp_path: Path, shared: bool) -> None:
    config = ExperimentConfig(fileroot=str(tmp_path / "root"))
    if shared:
        config.system.name_resolve_root = str(tmp_path / "shared")
    launcher = launcher_of(config)
    launcher.prepare()
    folder = tmp_path / "shared" / config.experiment_name / config.trial_name
    folder = folder if shared else launcher.run_dir / NAMES_DIR
    for private in (launcher.run_dir, launcher.run_dir.parent, folder, folder.parent):
        assert stat.S_IMODE(private.stat().st_mode) == 0o700, private
    for file in (launcher.run_dir / LOCK_FILE, launcher.run_dir / SECRET_FILE, folder / ".lock"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    launcher.release()


def test_a_folder_that_others_can_only_read_is_closed(tmp_path: Path) -> None:
    config = ExperimentConfig(fileroot=str(tmp_path))
    run_dir = run_dir_of(config)
    run_dir.mkdir(parents=True)
    run_dir.chmod(0o755)
    (run_dir / LOCK_FILE).touch(0o644)
    launcher = launcher_of(config)
    launcher.prepare()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((run_dir / LOCK_FILE).stat().st_mode) == 0o600
    launcher.release()


@pytest.mark.parametrize("where", [".", "weights", "weights/config.json"])
@pytest.mark.parametrize("fault", ["writable", "foreign"])
def test_a_folder_that_others_may_have_written_to_is_refused(tmp_path: Path, where: str, fault: str) -> None:
    if fault == "foreign" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    config = ExperimentConfig(fileroot=str(tmp_path))
    run_dir = run_dir_of(config)
    (run_dir / "weights").mkdir(parents=True)
    (run_dir / "weights" / "config.json").write_text("{}")
    (run_dir / where).chmod(0o777) if fault == "writable" else os.chown(run_dir / where, 12345, -1)
    expected = "mode 0777" if fault == "writable" else "belongs to user 12345"
    with pytest.raises(TrialError, match=f"{run_dir / where} .*{expected}"):
        launcher_of(config).prepare()
