"""A checkpoint continues a run bitwise, and whatever breaks off a write leaves the previous one loadable."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ChoiceConfig
from asyncrl.runtime.run_dir import versions_in
from asyncrl.trainer.calls import StatValues
from asyncrl.trainer.messages import SaveCheckpoint
from asyncrl.trainer.parallel import Ranks
from asyncrl.trainer.roles import TrainingRank
from asyncrl.trainer.step_batch import StepBatch
from asyncrl.weights import atomic_dir
from asyncrl.weights import checkpoints as checkpoint
from asyncrl.weights.checkpoint_dir import latest, prune
from asyncrl.weights.manifest import MANIFEST_FILE, Manifest, ManifestError, file_entry, verify, write_manifest

MakeBatch = Callable[..., StepBatch]
MakeRank = Callable[[ExperimentConfig], TrainingRank]
RunStep = Callable[..., dict[str, StatValues]]


def save(rank: TrainingRank, root: Path, version: int, keep: int = 2) -> Path:
    path = root / f"v{version}"
    rank.save_checkpoint(SaveCheckpoint(str(path), version, keep, {"version": version}))
    return path


@pytest.fixture
def everything(config: ExperimentConfig) -> ExperimentConfig:
    """A run in which every kind of state changes: critic, value normalisation, KL coefficient, averaged reference."""
    algorithm = config.algorithm
    algorithm.graph, algorithm.advantage = "ppo", ChoiceConfig("gae")
    algorithm.critic.value_norm = "ema"
    algorithm.kl_coef, algorithm.kl_target = 0.1, 0.01
    algorithm.reference.mode = "ema"
    config.optimizer.schedule, config.optimizer.warmup_steps = "cosine", 3
    return config


def test_a_resumed_run_is_bitwise_the_run_that_was_not_stopped(
    everything: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep, tmp_path: Path
) -> None:
    config = everything
    straight, stopped, resumed = make_rank(config), make_rank(config), make_rank(config)
    expected = [run_step(config, straight, make_batch(seed=step, version=step)) for step in range(4)]
    for step in range(2):
        run_step(config, stopped, make_batch(seed=step, version=step))
    save(stopped, tmp_path, 2)
    drawn = torch.rand(3)
    assert resumed.load_checkpoint(tmp_path) == {"version": 2}
    assert torch.equal(torch.rand(3), drawn)
    continued = [run_step(config, resumed, make_batch(seed=step, version=step)) for step in range(2, 4)]
    assert continued == expected[2:]
    for role, engine in straight.engines.items():
        theirs = resumed.engines[role].state()[0]
        assert all(torch.equal(value, theirs[name]) for name, value in engine.state()[0].items())


def test_no_checkpoint_restores_nothing(config: ExperimentConfig, make_rank: MakeRank, tmp_path: Path) -> None:
    assert make_rank(config).load_checkpoint(tmp_path / "none") is None


@pytest.mark.parametrize("stage", ["begin", "sync_file", "write_file", "commit"])
def test_a_write_that_breaks_off_leaves_the_previous_checkpoint(
    stage: str, config: ExperimentConfig, make_rank: MakeRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(config)
    first = save(rank, tmp_path, 1)

    def break_off(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_dir, stage, break_off)
        with pytest.raises(OSError, match="disk full"):
            save(rank, tmp_path, 2)
    assert latest(tmp_path) == first
    assert rank.load_checkpoint(tmp_path) == {"version": 1}
    assert latest(tmp_path) == first
    save(rank, tmp_path, 2)
    assert latest(tmp_path) == tmp_path / "v2"


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    config: ExperimentConfig, make_rank: MakeRank, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = make_rank(config)
    save(rank, tmp_path, 1)
    newest = save(rank, tmp_path, 2)
    file = next(newest.glob("actor.optimizer*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert rank.load_checkpoint(tmp_path) == {"version": 1}
    assert "looking for an older one" in caplog.text


def test_where_no_checkpoint_can_be_used_nobody_begins_anew_over_them(
    config: ExperimentConfig, make_rank: MakeRank, tmp_path: Path
) -> None:
    rank = make_rank(config)
    for version in (1, 2):
        manifest = save(rank, tmp_path, version) / MANIFEST_FILE
        manifest.write_bytes(manifest.read_bytes().replace(b'"format":2', b'"format":1'))
    with pytest.raises(ManifestError, match=r"v2.* no manifest of format 2 .* set resume=restart to begin anew"):
        rank.load_checkpoint(tmp_path)
    assert versions_in(tmp_path) == [1, 2]


def test_only_the_newest_are_kept(config: ExperimentConfig, make_rank: MakeRank, tmp_path: Path) -> None:
    rank = make_rank(config)
    for version in (9, 10, 11):
        save(rank, tmp_path, version)
    assert versions_in(tmp_path) == [10, 11]
    with pytest.raises(ValueError, match=r"checkpoint\.keep"):
        prune(tmp_path, 0)


def write_checkpoint(root: Path, version: int) -> Path:
    """One without tensors."""
    directory = atomic_dir.begin(root / f"v{version}")
    atomic_dir.write_file(directory / "state.json", b'{"version": %d}' % version)
    write_manifest(directory, Manifest("checkpoint", version, {"state.json": file_entry(directory / "state.json")}))
    atomic_dir.commit(root / f"v{version}")
    return root / f"v{version}"


@pytest.mark.parametrize("damage", [b"", b"\0" * len('{"version": 20}')], ids=["torn", "lost blocks"])
@pytest.mark.parametrize(("keep", "damaged"), [(1, [20]), (2, [20]), (2, [20, 30])])
def test_damaged_ones_do_not_count_among_those_that_are_kept(
    keep: int, damaged: list[int], damage: bytes, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, 10)
    for version in damaged:
        (write_checkpoint(tmp_path, version) / "state.json").write_bytes(damage)
    resumed = latest(tmp_path)
    assert resumed is not None
    assert resumed.name == "v10"
    for version in (12, 25, 40)[: keep + 1]:  # before, between and beyond the numbers of what is damaged
        written = write_checkpoint(tmp_path, version)
        prune(tmp_path, keep)
        assert latest(tmp_path) == written
        assert len(versions_in(tmp_path)) == keep
    assert verify(tmp_path / f"v{versions_in(tmp_path)[0]}")


def test_what_was_torn_since_it_was_written_does_not_push_out_a_whole_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    (write_checkpoint(tmp_path, 20) / "state.json").unlink()
    write_checkpoint(tmp_path, 30)
    assert prune(tmp_path, 2) == []
    write_checkpoint(tmp_path, 40)
    assert prune(tmp_path, 2) == [10, 20]


def test_slices_of_several_ranks_are_read_by_one(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep, tmp_path: Path
) -> None:
    rank = make_rank(config)
    run_step(config, rank, make_batch())
    path = atomic_dir.begin(tmp_path / "v1")
    for index in range(3):
        checkpoint.write_share(rank.engines, path, Ranks(index, 3))
    tensors = checkpoint.read_slices(path, "actor.optimizer", 3)
    expected, _ = rank.policy("actor").state()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)


def test_a_checkpoint_of_another_graph_is_refused(
    config: ExperimentConfig, everything: ExperimentConfig, make_rank: MakeRank, tmp_path: Path
) -> None:
    rank = make_rank(everything)
    everything.algorithm.graph, everything.algorithm.advantage = "grpo", ChoiceConfig("grpo")
    save(make_rank(everything), tmp_path, 1)
    with pytest.raises(ValueError, match="no state of role 'critic'"):
        rank.load_checkpoint(tmp_path)


WRITER = """
import sys
from pathlib import Path
from asyncrl.weights import atomic_dir
from asyncrl.weights.manifest import Manifest, file_entry, write_manifest

root = Path(sys.argv[1])
for version in range(1, 10**6):
    final = root / f"v{version}"
    directory = atomic_dir.begin(final)
    for name in ("a.safetensors", "b.safetensors", "state.json"):
        atomic_dir.write_file(directory / name, bytes([version % 251]) * 20_000)
    files = {file.name: file_entry(file) for file in directory.iterdir()}
    write_manifest(directory, Manifest("checkpoint", version, files))
    atomic_dir.commit(final)
    if version > 2:
        atomic_dir.remove(root / f"v{version - 2}")
    print(version, flush=True)
"""


@pytest.mark.parametrize("delay", range(5))
def test_sigkill_at_any_moment_leaves_the_last_announced_checkpoint(delay: int, tmp_path: Path) -> None:
    """The writer is killed a few bytes of output after its third checkpoint, each time a little later in its loop."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    announced = [int(writer.stdout.readline()) for _ in range(3 + 7 * delay)]
    os.kill(writer.pid, signal.SIGKILL)
    rest = writer.stdout.read().split()
    writer.wait(30)
    writer.stdout.close()
    newest = int(rest[-1]) if rest else announced[-1]
    found = latest(tmp_path)
    assert found is not None
    assert int(found.name[1:]) in (newest, newest + 1)  # one more may have been renamed but not announced
    assert verify(found).role == "checkpoint"
    prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == [found.name]
