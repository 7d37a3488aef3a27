"""A checkpoint continues a run bitwise, and whatever breaks off a write leaves the previous one loadable."""

from __future__ import annotations

import json
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
from asyncrl.config.run_dir import versions_in
from asyncrl.config.setting import ChoiceConfig
from asyncrl.master.run_state import which_to_keep
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.functions.model_functions import StatValues
from asyncrl.trainer.messages import SaveCheckpoint
from asyncrl.trainer.rank.training_rank import TrainingRank
from asyncrl.weights import atomic_dir, checkpoint_shards, checkpoints
from asyncrl.weights.checkpoints import latest, prune
from asyncrl.weights.manifest import (
    MANIFEST_FILE,
    Manifest,
    ManifestError,
    file_entry,
    read_manifest,
    verify,
    write_manifest,
)

from ...late_stream import LateStream

MakeBatch = Callable[..., StepBatch]
MakeRank = Callable[[ExperimentConfig], TrainingRank]
RunStep = Callable[..., dict[str, StatValues]]
LIMIT_S = 300.0
PIECE = 4096
"""Bytes; the model's tensors have more and fewer."""


def save(rank: TrainingRank, root: Path, version: int, keep: int = 2) -> Path:
    path = root / f"v{version}"
    rank.save_checkpoint(SaveCheckpoint(str(path), version, {"version": version}))
    files = rank.disk_writer.share(path).result(LIMIT_S)
    rank.disk_writer.commit(path, files, keep=keep, protected=())
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


def test_every_file_of_a_checkpoint_is_in_its_manifest(
    everything: ExperimentConfig, make_rank: MakeRank, tmp_path: Path
) -> None:
    path = save(make_rank(everything), tmp_path, 1)
    found = {str(file.relative_to(path)) for file in path.rglob("*")}
    assert found == {MANIFEST_FILE, *read_manifest(path).files}


def test_no_checkpoint_restores_nothing(config: ExperimentConfig, make_rank: MakeRank, tmp_path: Path) -> None:
    assert make_rank(config).load_checkpoint(tmp_path / "none") is None


@pytest.mark.parametrize("stage", ["begin", "sync", "write_file", "commit"])
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
    file = next(newest.glob("shard-*"))
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
    with pytest.raises(ManifestError, match=r"v2.* not a manifest of format 2 .* set resume=restart to start over"):
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


def test_a_folder_that_a_person_renamed_stays_and_ends_no_run(tmp_path: Path) -> None:
    renamed = write_checkpoint(tmp_path, 10).rename(tmp_path / "v10.mine.damaged")
    write_checkpoint(tmp_path, 20)
    assert prune(tmp_path, 1) == []
    assert renamed.is_dir()


@pytest.mark.parametrize(
    ("every", "scores", "undecided", "kept"),
    [
        (0, {}, (), {50, 60}),
        (20, {}, (), {20, 40, 50, 60}),
        (0, {10: 0.3, 30: 0.5, 40: 0.4, 70: 0.9}, (), {30, 50, 60}),  # 70 has no checkpoint
        (0, {10: 0.5, 30: 0.5}, (), {30, 50, 60}),
        (0, {10: -1.0}, (20, 80), {10, 20, 50, 60}),
    ],
)
def test_the_newest_the_nth_and_the_best_are_kept(
    every: int, scores: dict[int, float], undecided: tuple[int, ...], kept: set[int]
) -> None:
    assert which_to_keep([10, 20, 30, 40, 50, 60], 2, every, scores, undecided) == kept


def test_a_protected_checkpoint_stays(config: ExperimentConfig, make_rank: MakeRank, tmp_path: Path) -> None:
    rank = make_rank(config)
    for version in (1, 2, 3, 4):
        path = tmp_path / f"v{version}"
        rank.save_checkpoint(SaveCheckpoint(str(path), version, {}))
        rank.disk_writer.commit(path, rank.disk_writer.share(path).result(LIMIT_S), keep=1, protected=(2,))
    assert versions_in(tmp_path) == [2, 4]


def test_a_checkpoint_of_another_graph_is_refused(
    config: ExperimentConfig, everything: ExperimentConfig, make_rank: MakeRank, tmp_path: Path
) -> None:
    rank = make_rank(everything)
    everything.algorithm.graph, everything.algorithm.advantage = "grpo", ChoiceConfig("grpo")
    save(make_rank(everything), tmp_path, 1)
    with pytest.raises(ValueError, match="no state of role 'critic'"):
        rank.load_checkpoint(tmp_path)


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_changed(
    config: ExperimentConfig, make_rank: MakeRank, llama_dir: Path, tmp_path: Path
) -> None:
    save(make_rank(config), tmp_path, 1)
    config.model.path = str(llama_dir)
    rank = make_rank(config)
    before = {name: tensor.clone() for name, tensor in rank.policy("actor").state()[0].items()}
    with pytest.raises(ValueError, match=r"v1 is of a model with other parameters \(\d+ differ"):
        rank.load_checkpoint(tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in rank.policy("actor").state()[0].items())


def test_a_model_that_lacks_what_is_stored_is_refused(
    everything: ExperimentConfig, make_rank: MakeRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(everything)
    save(rank, tmp_path, 1)
    critic = rank.engines["critic"]
    tensors, meta = critic.state()
    without_head = {name: tensor for name, tensor in tensors.items() if "head" not in name}
    monkeypatch.setattr(critic, "state", lambda: (without_head, meta))
    with pytest.raises(ValueError, match=r"other parameters \(3 differ, for example 'critic.exp_avg.head.weight'"):
        rank.load_checkpoint(tmp_path)


def test_a_checkpoint_of_an_older_format_is_refused_by_name(
    config: ExperimentConfig, make_rank: MakeRank, tmp_path: Path
) -> None:
    rank = make_rank(config)
    path = save(rank, tmp_path, 1)
    document = json.loads((path / "state.json").read_bytes())
    del document["format"]
    (path / "state.json").write_text(json.dumps(document))
    files = {file.name: file_entry(file) for file in path.iterdir() if file.name != MANIFEST_FILE}
    write_manifest(path, Manifest("checkpoint", 1, files))
    with pytest.raises(ValueError, match=r"v1 was written by another version .* \(format 2, this one reads 3\)"):
        rank.load_checkpoint(tmp_path)


@pytest.mark.parametrize(("in_memory", "offload"), [(False, False), (True, False), (True, True)])
def test_what_is_trained_while_a_checkpoint_is_written_is_not_in_it(
    in_memory: bool,
    offload: bool,
    config: ExperimentConfig,
    make_rank: MakeRank,
    make_batch: MakeBatch,
    run_step: RunStep,
    tmp_path: Path,
) -> None:
    """The copies are made late: once the next step is about to change what they copy, or the role leaves its device."""
    config.trainer.offload = offload
    rank, restored, stream = make_rank(config), make_rank(config), LateStream()
    expected = values(rank)
    writer = checkpoints.CheckpointWriter(
        rank._changing(), rank.changing, rank.world.everyone, in_memory=in_memory, copies=stream.copies(PIECE)
    )
    root = tmp_path / "state"
    path = root / "v1"
    stream.release.clear()
    rank.__dict__["memory_writer" if in_memory else "disk_writer"] = writer
    rank.save_checkpoint(SaveCheckpoint(str(path), 1, {}, in_memory=in_memory))
    run_step(config, rank, make_batch())
    stream.release.set()
    files = writer.share(path).result(LIMIT_S)
    assert latest(root) is None, "written, but not committed"
    writer.commit(path, files, keep=1, protected=())
    restored.load_checkpoint(root)
    found = values(restored)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def values(rank: TrainingRank) -> dict[str, torch.Tensor]:
    """The actor's tensors as they are now."""
    actor = rank.policy("actor")
    with actor.on_device():
        return {name: tensor.clone() for name, tensor in actor.state()[0].items()}


def test_checkpoints_in_memory_take_turns_in_two_files_and_each_is_whole(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep, tmp_path: Path
) -> None:
    rank, root = make_rank(config), tmp_path / "state"
    for version in range(1, 5):
        run_step(config, rank, make_batch(seed=version, version=version - 1))
        path = root / f"v{version}"
        rank.save_checkpoint(SaveCheckpoint(str(path), version, {"version": version}, in_memory=True))
        rank.memory_writer.commit(path, rank.memory_writer.share(path).result(LIMIT_S), keep=1, protected=())
        restored = make_rank(config)
        assert restored.load_checkpoint(root) == {"version": version}
        for name, tensor in rank.policy("actor").state()[0].items():
            assert torch.equal(tensor, restored.policy("actor").state()[0][name])
        assert len(list((root / "files").iterdir())) == min(version, 2)
    rank.memory_writer.close()
    assert list((root / "files").iterdir()) == []
    assert verify(root / "v4")


def test_an_error_in_the_writer_is_told_to_who_asks_and_the_next_checkpoint_is_written(
    config: ExperimentConfig, make_rank: MakeRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(config)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_shards, "write_shard", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        rank.save_checkpoint(SaveCheckpoint(str(tmp_path / "v1"), 1, {}))
        with pytest.raises(OSError, match="disk full"):
            rank.disk_writer.share(tmp_path / "v1").result(LIMIT_S)
    save(rank, tmp_path, 2)
    assert versions_in(tmp_path) == [2]
    with pytest.raises(RuntimeError, match=r"v1 is not under way here; the last one begun: .*v2"):
        rank.disk_writer.share(tmp_path / "v1")


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
    writer.wait(LIMIT_S)
    writer.stdout.close()
    newest = int(rest[-1]) if rest else announced[-1]
    found = latest(tmp_path)
    assert found is not None
    assert int(found.name[1:]) in (newest, newest + 1)  # one more may have been renamed but not announced
    assert verify(found).role == "checkpoint"
    prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == [found.name]
