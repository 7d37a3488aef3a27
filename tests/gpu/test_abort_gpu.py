"""NCCL's collectives are aborted by another thread than the one that began them."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from asyncrl.trainer.parallel.process_groups import Collectives

LIMIT_S = 120.0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def be_rank(worker: int, meeting: Path, over: Event) -> None:
    """Rank 0 waits for rank 1 in an all-reduce to which that does not come, and is got out of it."""
    torch.cuda.set_device(worker)
    collectives, device = Collectives(), torch.device("cuda", worker)
    with collectives.making(device):
        store = dist.FileStore(str(meeting), 2)  # type: ignore[attr-defined]  # public, but missing in the stubs
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=worker, world_size=2)
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    if worker:
        over.wait(LIMIT_S)
        collectives.abort()
    else:
        dist.all_reduce(torch.ones(1, device=device))
        aborting = threading.Thread(target=collectives.abort)
        aborting.start()
        torch.cuda.synchronize()
        aborting.join()
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_reduce(torch.ones(1, device=device))
    collectives.leave()
    over.set()


def test_a_rank_that_waits_for_a_peer_on_the_gpu_is_got_out_of_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    ranks = [context.Process(target=be_rank, args=(worker, tmp_path / "meeting", over)) for worker in range(2)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(LIMIT_S)
        assert [rank.exitcode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
