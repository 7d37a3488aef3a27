"""A restarted trainer resumes only from a state that covers all that other processes have seen."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.comm import files
from asyncrl.comm.files import FileLock, is_held
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import MEMORY_CHECKPOINT_FILE
from asyncrl.runtime.settings import HostConfig
from asyncrl.runtime.trials import memory_checkpoint as module
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint, cost_message, uses_memory_checkpoint
from tests.refusing_disk import refusing


@pytest.fixture(autouse=True)
def memory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of /dev/shm, so that a line that is changed to see its test fail removes nothing of this host's runs."""
    monkeypatch.setattr(module, "_MEMORY", tmp_path_factory.mktemp("memory"))


@pytest.fixture
def memory_checkpoint(tmp_path: Path) -> Iterator[MemoryCheckpoint]:
    step = MemoryCheckpoint(tmp_path)
    yield step
    step.remove()


def test_one_goes_on_where_the_announced_version_is_kept(memory_checkpoint: MemoryCheckpoint) -> None:
    assert not memory_checkpoint.can_resume(0), "there is no folder"
    memory_checkpoint.begin()
    assert memory_checkpoint.can_resume(0), "of the initial model everything is known"
    assert not memory_checkpoint.can_resume(1)
    (memory_checkpoint.state_root / ".v3.writing").mkdir(parents=True)
    for version in (1, 2):
        (memory_checkpoint.state_root / f"v{version}").mkdir()
    assert memory_checkpoint.version == 2
    assert memory_checkpoint.can_resume(2)
    assert not memory_checkpoint.can_resume(3), "servers have a version that a successor would make anew"


def test_nobody_goes_on_where_something_could_not_be_kept(memory_checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    memory_checkpoint.begin()
    memory_checkpoint.invalidate()
    assert not memory_checkpoint.can_resume(0)
    memory_checkpoint.begin()
    assert memory_checkpoint.can_resume(0)
    mark = (tmp_path / MEMORY_CHECKPOINT_FILE).read_text()
    memory_checkpoint.invalidate()
    (tmp_path / MEMORY_CHECKPOINT_FILE).write_text(mark)
    assert not memory_checkpoint.can_resume(0), "the folder says so too"
    memory_checkpoint.begin()
    memory_checkpoint.remove()
    assert not (tmp_path / MEMORY_CHECKPOINT_FILE).exists()


def test_a_disk_that_is_read_only_for_a_while_does_not_keep_the_mark(
    memory_checkpoint: MemoryCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_BACKOFF", files.Backoff(0.001, 0.001))
    memory_checkpoint.begin()
    with refusing(1, errno.EROFS, tmp_path) as disk:
        memory_checkpoint.invalidate()
    assert disk.refused
    assert not (tmp_path / MEMORY_CHECKPOINT_FILE).exists()
    memory_checkpoint.begin()
    with refusing(1, errno.EROFS, tmp_path) as disk:
        memory_checkpoint.remove()
    assert disk.refused
    assert not memory_checkpoint.can_resume(0), "the mark is left, and no folder"


def test_the_folder_is_of_one_run_and_private(memory_checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    memory_checkpoint.begin()
    assert memory_checkpoint.folder.stat().st_mode & 0o777 == 0o700
    assert MemoryCheckpoint(tmp_path).folder == memory_checkpoint.folder
    assert MemoryCheckpoint(tmp_path / "other").folder != memory_checkpoint.folder


def test_a_folder_whose_launcher_was_killed_is_removed_by_the_next_one(
    memory_checkpoint: MemoryCheckpoint, tmp_path: Path
) -> None:
    """Not that of one that lives, which may have another process id and the same folder in another container."""
    first = MemoryCheckpoint(tmp_path)
    first.begin()
    try:
        memory_checkpoint.begin()
        assert first.folder != memory_checkpoint.folder
        assert first.folder.exists(), "its launcher holds the lock"
        first._release()  # as the kernel does
        memory_checkpoint.begin()
        assert not first.folder.exists()
    finally:
        first.remove()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes process-id namespaces everywhere")
def test_a_launch_in_another_container_removes_nothing_of_one_that_lives(
    memory_checkpoint: MemoryCheckpoint, tmp_path: Path
) -> None:
    memory_checkpoint.begin()
    other = "from pathlib import Path; from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint as M; "
    other += f"there = M(Path({str(tmp_path)!r})); there.begin(); assert there.folder.exists(); there.remove()"
    unshared = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", other]
    if subprocess.run([*unshared[:4], "true"], check=False, capture_output=True).returncode:
        pytest.skip("this container may not make namespaces")
    subprocess.run(unshared, check=True)
    assert memory_checkpoint.folder.exists()


@pytest.mark.parametrize("kind", ["fifo", "zero", "link", "file", "lock", "launch", "folder", "gone"])
def test_what_a_stranger_left_in_shared_memory_is_neither_read_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Everybody may make a folder there with the name of one of this user's."""
    monkeypatch.setattr(module, "_MEMORY", tmp_path)
    planted, elsewhere = tmp_path / f"asyncrl-{os.geteuid()}-000000000000-0000000000000000", tmp_path / "elsewhere"
    orphan = tmp_path / f"asyncrl-{os.geteuid()}-ffffffffffff-ffffffffffffffff"
    orphan.mkdir()
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    if kind == "link":
        planted.symlink_to(elsewhere)
    elif kind == "file":
        planted.touch()
    else:
        planted.mkdir()
        for name in {"fifo": NAMES, "zero": NAMES, "folder": (), "gone": ()}.get(kind, (kind,)):
            os.symlink("/dev/zero", planted / name) if kind == "zero" else os.mkfifo(planted / name)
        if kind not in ("lock", "launch"):
            lstat = Path.lstat
            monkeypatch.setattr(
                Path, "lstat", lambda path: _of_a_stranger(lstat(path), path == planted, kind == "gone")
            )
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, names: sorted(glob(path, names)))
    finder = threading.Thread(target=module._remove_orphans, args=(tmp_path,), daemon=True)
    finder.start()
    finder.join(10.0)
    assert not finder.is_alive()
    assert list(elsewhere.iterdir()) == [elsewhere / "kept"]
    assert not orphan.exists(), "those after it are removed nevertheless"
    assert planted.exists() or kind == "launch", "only what is a folder of this user with a free lock"


NAMES = ("owner", "lock", "launch")


def _of_a_stranger(status: os.stat_result, is_theirs: bool, is_gone: bool) -> os.stat_result:
    if is_theirs and is_gone:
        raise FileNotFoundError
    values = list(status)
    values[4] += is_theirs
    return os.stat_result(values)


def test_who_finds_that_a_launcher_is_gone_does_not_remove_what_the_next_one_made(
    memory_checkpoint: MemoryCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finder takes the lock of a new folder before its launcher does."""
    take, launch = FileLock.take, threading.get_ident()
    found, removed = threading.Event(), threading.Event()

    def slow(lock: FileLock, limit_s: float = 0.0, *, shared: bool = False) -> bool:
        if threading.get_ident() == launch and not removed.is_set():
            found.set()
            assert removed.wait(60.0)
        return take(lock, limit_s, shared=shared)

    def find() -> None:
        assert found.wait(60.0)
        module._remove_orphans(memory_checkpoint.folder.parent)
        removed.set()

    opened = len(os.listdir("/proc/self/fd"))
    finder = threading.Thread(target=find)
    finder.start()
    monkeypatch.setattr(FileLock, "take", slow)
    memory_checkpoint.begin()
    finder.join(60.0)
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == opened + 1
    assert memory_checkpoint.can_resume(0)
    module._remove_orphans(memory_checkpoint.folder.parent)
    assert memory_checkpoint.can_resume(0), "the lock is that of the folder made again"


def test_who_finds_a_folder_leaves_the_one_that_was_made_in_its_place_before_it_had_the_lock(
    memory_checkpoint: MemoryCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, orphan = FileLock.take, memory_checkpoint.folder.parent / f"{module._own_prefix()}orphan"
    orphan.mkdir(0o700)

    def late(lock: FileLock, limit_s: float = 0.0, *, shared: bool = False) -> bool:
        (orphan / "lock").unlink()
        orphan.rmdir()
        orphan.mkdir(0o700)
        return take(lock, limit_s, shared=shared)

    with monkeypatch.context() as patch:
        patch.setattr(FileLock, "take", late)
        module._remove_orphans(orphan.parent)
    assert orphan.exists()
    module._remove_orphans(orphan.parent)
    assert not orphan.exists()


@pytest.fixture
def elsewhere(memory_checkpoint: MemoryCheckpoint, tmp_path: Path) -> Iterator[MemoryCheckpoint]:
    """The last step of a rank on another host; in this test both hosts share one memory."""
    memory_checkpoint.begin()
    there = MemoryCheckpoint(tmp_path, "10.0.0.2")
    there.join()
    yield there
    there.leave()


def test_every_host_of_ranks_has_a_folder_and_all_of_them_the_inboxes(
    elsewhere: MemoryCheckpoint, tmp_path: Path
) -> None:
    other = MemoryCheckpoint(tmp_path, "10.0.0.3")
    assert elsewhere.spread
    assert elsewhere.folder.stat().st_mode & 0o777 == 0o700
    assert other.folder != elsewhere.folder != MemoryCheckpoint(tmp_path).folder
    assert other.inbox(1) == elsewhere.inbox(1)
    assert not elsewhere.inbox(1).is_relative_to(elsewhere.folder), "it outlives this host"
    assert elsewhere.inbox(1).parent.stat().st_mode & 0o777 == 0o700
    alone = MemoryCheckpoint(tmp_path)
    assert alone.inbox(1).parent == alone.folder
    assert not elsewhere.invalid


def test_a_folder_that_is_removed_before_its_lock_is_open_is_made_again(
    memory_checkpoint: MemoryCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_lock, left = module._open_lock, [1]
    monkeypatch.setattr(module, "_open_lock", lambda folder: None if left and left.pop() else open_lock(folder))
    memory_checkpoint.begin()
    assert is_held(memory_checkpoint.folder / "lock")


def test_a_rank_removes_what_dead_launches_left_on_its_host_and_what_it_leaves_itself(
    elsewhere: MemoryCheckpoint, tmp_path: Path
) -> None:
    (tmp_path / "another").mkdir()
    dead, opened = MemoryCheckpoint(tmp_path / "another", "10.0.0.2"), len(os.listdir("/proc/self/fd"))
    dead.join()
    dead._release()  # as the kernel does
    elsewhere.join()
    assert (dead.folder.exists(), elsewhere.folder.exists()) == (False, True)
    elsewhere.leave()
    assert not elsewhere.folder.exists()
    assert len(os.listdir("/proc/self/fd")) == opened - 1


def test_a_rank_does_not_wait_for_ever_for_a_lock_that_another_process_keeps(
    memory_checkpoint: MemoryCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    memory_checkpoint.begin()
    there = MemoryCheckpoint(tmp_path, "10.0.0.2")
    there.folder.mkdir(mode=0o700)
    lock = FileLock(there.folder / "lock")
    assert lock.take()
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"lock was not free for 0\.01 s"):
        there.join()
    assert len(os.listdir("/proc/self/fd")) == opened
    lock.close()


def _no_answer(run_dir: str | Path) -> str:
    raise OSError(errno.EIO, f"{run_dir} does not answer")


def test_a_rank_has_the_folder_of_its_host_only_where_ranks_run_elsewhere(tmp_path: Path) -> None:
    config = ExperimentConfig()
    config.system.host = "10.0.0.2"
    assert not MemoryCheckpoint.of_rank(config, tmp_path).spread
    config.system.hosts = [HostConfig(name="10.0.0.2", runs=["model_worker"])]
    assert MemoryCheckpoint.of_rank(config, tmp_path).folder == MemoryCheckpoint(tmp_path, "10.0.0.2").folder


def test_what_an_earlier_launch_left_on_another_host_is_not_this_ones(
    memory_checkpoint: MemoryCheckpoint, elsewhere: MemoryCheckpoint, tmp_path: Path
) -> None:
    """The launcher cannot remove it from there: it begins anew under another name, and the next removes it."""
    (elsewhere.state_root / "v7").mkdir(parents=True)
    elsewhere.inbox(0).mkdir()
    elsewhere._release()  # its ranks have died
    (tmp_path / "another").mkdir()
    another = MemoryCheckpoint(tmp_path / "another", "10.0.0.2")
    another.join()
    another.leave()
    assert elsewhere.folder.exists(), "its ranks may be restarted"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_launch_of", _no_answer)
        module._remove_orphans(elsewhere.folder.parent)
    assert elsewhere.folder.exists(), "a disk that does not answer says nothing of the launch"
    memory_checkpoint.begin()
    successor = MemoryCheckpoint(tmp_path, "10.0.0.2")
    assert successor.folder != elsewhere.folder
    successor.join()
    try:
        assert not elsewhere.folder.exists()
        assert successor.version is None
        assert not successor.inbox(0).exists()
    finally:
        successor.leave()


def test_something_that_is_missing_on_one_host_is_told_to_all(
    memory_checkpoint: MemoryCheckpoint, elsewhere: MemoryCheckpoint
) -> None:
    elsewhere.invalidate()
    assert memory_checkpoint.invalid
    assert not memory_checkpoint.can_resume(0)


def test_the_end_of_in_memory_checkpoints_is_shown_once_with_its_reason(
    memory_checkpoint: MemoryCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = list[str]()
    monkeypatch.setattr(module, "notice", lambda _, text: shown.append(text))
    memory_checkpoint.begin()
    for reason in ("memory is full", "and on another rank"):
        memory_checkpoint.warn_of_end(reason)
        memory_checkpoint.invalidate()
    assert len(shown) == 1
    assert "in-memory checkpoints are now off: memory is full" in shown[0]


def test_a_run_keeps_its_steps_in_memory_unless_it_only_records_or_that_is_off() -> None:
    config = ExperimentConfig()
    assert uses_memory_checkpoint(config)
    config.samples.only = True
    assert not uses_memory_checkpoint(config)
    config.samples.only = False
    config.samples.replay = "/kept"
    assert uses_memory_checkpoint(config), "its rollouts come from a RolloutWorker, as those of any run"
    config.checkpoint.in_memory = False
    assert not uses_memory_checkpoint(config)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_host_without_shared_memory_keeps_the_step_in_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    if is_closed:
        monkeypatch.setattr(os, "access", lambda *_: False)
    else:
        monkeypatch.setattr(module, "_MEMORY", tmp_path / "missing")
    step = MemoryCheckpoint(tmp_path)
    step.begin()
    assert step.folder.parent == tmp_path
    assert step.can_resume(0)
    step.remove()
    assert not step.folder.exists()


def test_the_price_is_named_with_the_step_of_which_it_is_a_tenth() -> None:
    line = cost_message(18_500_000_000, 25e9)
    assert "18.50 GB are copied beside training in about 0.74 s (25.0 GB/s measured)" in line
    assert "If a step is shorter than 7.4 s" in line
