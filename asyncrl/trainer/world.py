"""Joining the `torch.distributed` world of the training ranks.

The ranks find each other through name resolution and meet in a file of the run's folder, so no port is opened for it.
Gloo carries what is on the CPU (small collectives, trajectories), NCCL what is on GPUs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from asyncrl.comm.name_resolve import NameResolver
from asyncrl.runtime.hardware import interface_of
from asyncrl.trainer.parallel import Ranks

WORLD_KEY = "training_world"
"""Name under which rank 0 tells the others where to meet."""


@contextmanager
def training_world(
    *,
    rank: int,
    world: int,
    device: torch.device,
    host: str,
    run_dir: Path,
    resolver: NameResolver,
    join_timeout_s: float,
    collective_timeout_s: float,
    lease_s: float,
) -> Iterator[Ranks]:
    """Join as `rank` of `world`, leave at the end. One rank needs no world.

    Args:
        host: this machine's address among the ranks; gloo uses the interface that has it.
        lease_s: lease of rank 0's entry, so that a later run of the same trial does not meet in an old file.

    Raises:
        NameResolveTimeout: rank 0 did not come within `join_timeout_s`.
    """
    if world == 1:
        yield Ranks()
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(host))
    if rank == 0:
        meeting = run_dir / f"training_world-{os.getpid()}-{time.time_ns()}"
        resolver.add(WORLD_KEY, str(meeting), lease_s=lease_s, replace=True)
    else:
        meeting = Path(resolver.wait(WORLD_KEY, join_timeout_s))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(str(meeting), world),  # type: ignore[attr-defined]  # public, but missing in the stubs
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=collective_timeout_s),
    )
    try:
        yield Ranks(rank, world)
    finally:
        dist.destroy_process_group()
