"""Each host keeps what its ranks hold of the last step: they continue from it with the same losses, or it is lost."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.graph import load_graph
from asyncrl.trainer.messages import SaveCheckpoint
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.rank.training_rank import TrainingRank, build_rank
from asyncrl.weights.checkpoints import MemoryCheckpointLost
from asyncrl.weights.manifest import FileEntry

pytestmark = pytest.mark.slow

Statistics = dict[str, Any]
Step = Callable[[ExperimentConfig, TrainingRank, int], Statistics]
LIMIT_S = 300.0


def on_hosts(world: World, hosts: str) -> World:
    """`world` with its ranks on `hosts`, a letter each."""
    return dataclasses.replace(world, rank_hosts=tuple(hosts))


def build(config: ExperimentConfig, world: World) -> TrainingRank:
    return build_rank(config, load_graph(config), world, torch.device("cpu"))


def keep(rank: TrainingRank, root: Path, version: int, commits: str) -> None:
    """The state of a step, by all ranks; the leaders on the hosts `commits` make it visible there."""
    path, everyone = root / f"v{version}", rank.world.everyone
    rank.save_checkpoint(SaveCheckpoint(str(path), version, {"version": version}, in_memory=True))
    written = everyone.all_gather_bytes(msgspec.json.encode(rank.memory_writer.share(path).result(LIMIT_S)))
    files = [msgspec.json.decode(each, type=dict[str, FileEntry]) for each in written]
    if rank.folders.leads and rank.world.rank_hosts[rank.world.worker] in commits:
        rank.memory_writer.commit(path, {k: v for each in files for k, v in each.items()}, keep=1, protected=())
    everyone.together(lambda: None, "committing")


@pytest.mark.parametrize(
    ("layout", "hosts", "cut_off", "resumes_at"),
    [
        ("d2t2", "aabb", "aabb", 2),
        ("d3", "abc", "a", 1),  # c never made version 2 visible: nobody has seen it
        ("p2", "ab", "", 1),
    ],
)
def test_ranks_continue_from_what_lies_on_their_own_hosts(
    layout: str,
    hosts: str,
    cut_off: str,
    resumes_at: int,
    config: ExperimentConfig,
    on_ranks: Any,
    step: Step,
    tmp_path: Path,
) -> None:
    """The death comes when only the hosts `cut_off` have made version 2 visible. Then b loses its memory."""
    config.trainer.parallel = layout

    def root_of(world: World) -> Path:
        folder = tmp_path / hosts[world.worker] / "state"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def begin(world: World) -> Statistics:
        rank = build(config, on_hosts(world, hosts))
        step(config, rank, 0)
        keep(rank, root_of(world), 1, hosts)
        reported = step(config, rank, 1)
        keep(rank, root_of(world), 2, cut_off)
        return step(config, rank, 2) if resumes_at == 2 else reported

    def resume(world: World) -> tuple[int, Statistics, list[str], str]:
        rank, root = build(config, on_hosts(world, hosts)), root_of(world)
        state = rank.load_memory_checkpoint(root, invalid=False)
        reported = step(config, rank, state["version"])
        world.everyone.together(lambda: None, "reading")
        left = [path.name for path in root.glob("v*")]
        world.everyone.together(lambda: None, "listing")
        if world.worker == hosts.index("b"):
            shutil.rmtree(tmp_path / "b")
        world.everyone.together(lambda: None, "the loss of b's memory")
        with pytest.raises(MemoryCheckpointLost) as error:
            rank.load_memory_checkpoint(root_of(world), invalid=False)
        return state["version"], reported, left, str(error.value)

    expected = on_ranks(config, begin)
    shards = [path for path in (tmp_path / "a" / "state" / "v1").iterdir() if path.suffix == ".safetensors"]
    assert len(shards) == hosts.count("a"), "of its own ranks alone"
    for (version, reported, left, lost), before in zip(on_ranks(config, resume), expected, strict=True):
        assert (version, reported, left) == (resumes_at, before, [f"v{resumes_at}"])
        assert f"version {resumes_at} is not whole any more: all of it on b" in lost


def test_a_host_that_could_not_keep_all_or_a_file_that_is_damaged_loses_the_step(
    config: ExperimentConfig, on_ranks: Any, tmp_path: Path
) -> None:
    config.trainer.parallel = "d2"

    def root_of(world: World) -> Path:
        return tmp_path / "ab"[world.worker] / "state"

    def lost(world: World) -> list[str]:
        rank = build(config, on_hosts(world, "ab"))
        root = root_of(world)
        root.mkdir(parents=True)
        assert rank.load_memory_checkpoint(root, invalid=False) is None
        keep(rank, root, 1, "ab")
        reported = []
        with pytest.raises(MemoryCheckpointLost) as error:
            rank.load_memory_checkpoint(root, invalid=world.worker == 1)
        reported.append(str(error.value))
        assert rank.load_memory_checkpoint(root, invalid=False) == {"version": 1}
        if world.worker == 1:
            with (root / "v1" / "shard-00001-of-00002.safetensors").open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))
        with pytest.raises(MemoryCheckpointLost) as error:
            rank.load_memory_checkpoint(root, invalid=False)
        return [*reported, str(error.value)]

    for reported in on_ranks(config, lost):
        assert "could be kept on b" in reported[0]
        assert "version 1 is not whole any more: shard-00001-of-00002.safetensors on b" in reported[1]
