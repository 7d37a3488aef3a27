"""Ranks on several hosts go on from the last step after one of the hosts has lost all it had, with the same losses."""

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
import torch.distributed as dist

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.graph.builtin import load_graph
from asyncrl.runtime.ranks import Ranks
from asyncrl.trainer.host_copies import CopyInterrupted
from asyncrl.trainer.kept_copies import KeptStepLost
from asyncrl.trainer.messages import SaveCheckpoint
from asyncrl.trainer.parallel.place import RankHosts, World
from asyncrl.trainer.roles import TrainingRank, build_rank
from asyncrl.weights.distributed_checkpoint import shard_name
from asyncrl.weights.manifest import FileEntry

pytestmark = pytest.mark.slow

Statistics = dict[str, Any]
Step = Callable[[ExperimentConfig, TrainingRank, int], Statistics]
LIMIT_S = 60.0


def on_hosts(world: World, hosts: str) -> World:
    """`world` with its ranks on `hosts`, a letter each."""
    between = Ranks(world.worker, len(hosts), dist.new_group(backend="gloo"))
    return dataclasses.replace(world, rank_hosts=RankHosts(tuple(hosts), between))


def build(config: ExperimentConfig, world: World) -> TrainingRank:
    return build_rank(config, load_graph(config), world, torch.device("cpu"))


def keep(rank: TrainingRank, root: Path, version: int, commits: str) -> None:
    """The state of a step, by all ranks; the leaders on the hosts `commits` make it visible there."""
    path, everyone = root / f"v{version}", rank.world.everyone
    rank.save_checkpoint(SaveCheckpoint(str(path), version, {"version": version}, of_last_step=True))
    written = everyone.all_gather_bytes(msgspec.json.encode(rank.last_step.share(path).result(LIMIT_S)))
    files = [msgspec.json.decode(each, type=dict[str, FileEntry]) for each in written]
    if rank.copies.leads and rank.world.rank_hosts.addresses[rank.world.worker] in commits:
        rank.last_step.commit(path, {k: v for each in files for k, v in each.items()}, keep=1, protected=())
    everyone.together(lambda: None, "committing")


@pytest.mark.parametrize(
    ("layout", "hosts", "cut_off", "goes_on_at"),
    [
        ("d2t2", "aabb", "a", 2),  # the host that is left has a copy of everything
        ("d3", "abc", "a", 1),  # not here, but then c never made version 2 visible: nobody has heard of it
        ("p2", "ab", "", 1),
    ],
)
def test_after_the_loss_of_a_host_the_ranks_go_on_from_a_step_that_is_whole(
    layout: str,
    hosts: str,
    cut_off: str,
    goes_on_at: int,
    config: ExperimentConfig,
    on_ranks: Any,
    step: Step,
    tmp_path: Path,
) -> None:
    """The death comes when only the hosts `cut_off` have made version 2 visible; b loses its memory."""
    config.trainer.parallel = layout

    def root_of(world: World) -> Path:
        folder = tmp_path / hosts[world.worker] / "state"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def begin(world: World) -> Statistics:
        rank = build(config, on_hosts(world, hosts))
        step(config, rank, 0)
        keep(rank, root_of(world), 1, hosts)
        told = step(config, rank, 1)
        keep(rank, root_of(world), 2, cut_off)
        return step(config, rank, 2) if goes_on_at == 2 else told

    def go_on(world: World) -> tuple[int, Statistics]:
        rank = build(config, on_hosts(world, hosts))
        state = rank.load_last_step(root_of(world), torn=False)
        return state["version"], step(config, rank, state["version"])

    expected = [(goes_on_at, told) for told in on_ranks(config, begin)]
    shards = [path for path in (tmp_path / "a" / "state" / "v1").iterdir() if path.suffix == ".safetensors"]
    assert len(shards) == (4 if hosts == "aabb" else 2), "its own, and those of another host"
    shutil.rmtree(tmp_path / "b")
    assert on_ranks(config, go_on) == expected
    for host in set(hosts):
        assert [path.name for path in (tmp_path / host / "state").iterdir()] == [f"v{goes_on_at}"]
    shutil.rmtree(tmp_path / "a")  # b has copies again
    assert on_ranks(config, go_on) == expected


def test_a_host_that_could_not_keep_all_or_a_file_that_is_torn_on_both_hosts_loses_the_step(
    config: ExperimentConfig, on_ranks: Any, tmp_path: Path
) -> None:
    config.trainer.parallel = "d2"

    def root_of(world: World) -> Path:
        return tmp_path / "ab"[world.worker] / "state"

    def lost(world: World) -> list[str]:
        rank = build(config, on_hosts(world, "ab"))
        root = root_of(world)
        root.mkdir(parents=True)
        assert rank.load_last_step(root, torn=False) is None
        keep(rank, root, 1, "ab")
        told = []
        with pytest.raises(KeptStepLost) as error:
            rank.load_last_step(root, torn=world.worker == 1)
        told.append(str(error.value))
        shard = root / "v1" / "shard-00001-of-00002.safetensors"
        if world.worker == 0:
            os.truncate(shard, shard.stat().st_size - 1)
        assert rank.load_last_step(root, torn=False) == {"version": 1}, "the other is whole, and was brought here"
        with shard.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
        with pytest.raises(KeptStepLost) as error:
            rank.load_last_step(root, torn=False)
        return [*told, str(error.value)]

    for told in on_ranks(config, lost):
        assert "could be kept on b" in told[0]
        assert "shard-00001-of-00002.safetensors of version 1 is whole on none of a, b" in told[1]


def test_without_room_for_a_copy_the_others_get_theirs_and_a_death_is_told_apart(
    config: ExperimentConfig, on_ranks: Any, tmp_path: Path
) -> None:
    config.trainer.parallel = "d3"
    content = os.urandom(3 << 20)

    def exchange(world: World) -> str:
        copies = build(config, on_hosts(world, "abc")).copies
        folder = tmp_path / "abc"[world.worker]
        folder.mkdir()
        own, other = (folder / shard_name(rank, 3) for rank in (world.worker, (world.worker - 1) % 3))
        own.write_bytes(content[world.worker :])
        if world.worker == 1:
            other.symlink_to("/dev/full")
        try:
            copies.exchange(folder, own)
            told = "kept"
            assert other.read_bytes() == content[(world.worker - 1) % 3 :]
        except OSError as error:
            told = os.strerror(error.errno or 0)
        world.everyone.together(lambda: None, "copying")
        other.unlink()
        copies.exchange(folder, None if world.worker == 0 else own)
        assert (other.stat().st_size == 0) == (world.worker == 1), "0 could not write its own"
        world.everyone.together(lambda: None, "copying")
        if world.worker != 2:  # which ends
            with pytest.raises(CopyInterrupted):
                copies.exchange(folder, own)
        return told

    assert on_ranks(config, exchange) == ["kept", "No space left on device", "kept"]
