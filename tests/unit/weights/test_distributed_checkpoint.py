"""Tensors saved under one layout are read under any other, each part written by one of the ranks that hold it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from asyncrl.models.ranks import Ranks
from asyncrl.weights.checkpoint_shards import SavePlan, StoredTensors, share_out, write_shard

LIMIT_S = 300.0
WHOLE = {
    "actor.weights.model.embed_tokens.weight": torch.arange(35.0).view(7, 5),
    "actor.exp_avg.model.embed_tokens.weight": torch.arange(35.0).view(7, 5) / 3,
    "actor.weights.model.norm.weight": torch.arange(3.0),  # fewer than ranks
    "critic.weights.head.bias": torch.tensor([0.25], dtype=torch.bfloat16),
    "counts": torch.arange(6, dtype=torch.int32),
    "step": torch.tensor(3),
}
PLACEMENTS: dict[str, list[Placement]] = {
    "actor.weights.model.embed_tokens.weight": [Shard(0), Shard(1)],
    "actor.exp_avg.model.embed_tokens.weight": [Replicate(), Shard(0)],
    "actor.weights.model.norm.weight": [Shard(0), Replicate()],
}


def spread(whole: dict[str, Tensor], mesh_shape: tuple[int, int]) -> dict[str, Tensor]:
    """`whole` as the ranks of such a mesh hold it: some in parts, the rest whole on each."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("data", "tensor"))
    return {
        name: distribute_tensor(tensor, mesh, PLACEMENTS[name]) if name in PLACEMENTS else tensor.clone()
        for name, tensor in whole.items()
    }


def save(state: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    write_shard(folder, SavePlan(state, ranks).parts(), ranks)


def difference(state: dict[str, Tensor]) -> list[str]:
    """The names of which this rank has other values than `WHOLE`."""
    found = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}
    return [name for name, tensor in WHOLE.items() if not torch.equal(found[name], tensor)]


def be_rank(rank: int, folder: Path, mesh_shape: tuple[int, int], task: str, reported: Queue[list[str]]) -> None:
    world = mesh_shape[0] * mesh_shape[1]
    store = dist.FileStore(str(folder.with_suffix(f".{task}")), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    if task == "save":
        save(spread(WHOLE, mesh_shape), folder, Ranks(rank, world))
        reported.put([])
    else:
        state = spread({name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}, mesh_shape)
        StoredTensors(folder).read_into(state)
        reported.put(difference(state))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[[tuple[int, int], str], None]:
    """Saves or loads on the ranks of a mesh."""

    def run(mesh_shape: tuple[int, int], task: str) -> None:
        folder = tmp_path / "checkpoint"
        folder.mkdir(exist_ok=True)
        context = multiprocessing.get_context("fork")  # which has torch loaded already
        reported: Queue[list[str]] = context.Queue()
        ranks = [
            context.Process(target=be_rank, args=(rank, folder, mesh_shape, task, reported))
            for rank in range(mesh_shape[0] * mesh_shape[1])
        ]
        for process in ranks:
            process.start()
        try:
            assert [reported.get(timeout=LIMIT_S) for _ in ranks] == [[]] * len(ranks)
            for process in ranks:
                process.join(LIMIT_S)
                assert process.exitcode == 0
        finally:
            for process in ranks:
                process.kill()

    return run


def test_what_four_ranks_saved_in_parts_is_read_by_one_and_by_another_layout(
    on_ranks: Callable[[tuple[int, int], str], None], tmp_path: Path
) -> None:
    on_ranks((2, 2), "save")
    stored = StoredTensors(tmp_path / "checkpoint")
    assert stored.shapes == {name: tuple(tensor.shape) for name, tensor in WHOLE.items()}
    assert all(torch.equal(stored.read(name), tensor) for name, tensor in WHOLE.items())
    assert all(stored.read(name).dtype == tensor.dtype for name, tensor in WHOLE.items())
    written = [load_file(file) for file in sorted((tmp_path / "checkpoint").glob("*.safetensors"))]
    assert sum(tensor.nbytes for file in written for tensor in file.values()) == sum(t.nbytes for t in WHOLE.values())
    on_ranks((1, 2), "load")


def test_what_one_rank_saved_whole_is_read_in_parts(
    on_ranks: Callable[[tuple[int, int], str], None], tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").mkdir()
    save(dict(WHOLE), tmp_path / "checkpoint", Ranks())
    on_ranks((2, 2), "load")


def test_a_tensor_that_is_not_there_or_of_another_shape_is_named(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, tmp_path, Ranks())
    stored = StoredTensors(tmp_path)
    for name, tensor in (("b", torch.zeros(2)), ("a", torch.zeros(3))):
        with pytest.raises(ValueError, match=rf"'{name}' is"):
            stored.read_into({name: tensor})


def test_each_part_is_written_by_one_holder_and_all_write_about_equally_much() -> None:
    everywhere = {(f"t{index}", (0,)): 10 + index for index in range(8)}
    own: dict[tuple[str, tuple[int, ...]], int] = {("mine", (0, 0)): 40}
    shares = share_out([everywhere | own, everywhere, everywhere])
    assert sorted(part for share in shares for part in share) == sorted([*everywhere, *own])
    assert ("mine", (0, 0)) in shares[0]
    sizes = everywhere | own
    loads = [sum(sizes[part] for part in share) for share in shares]
    assert max(loads) - min(loads) <= 10
