"""The ranks of supervised training: the first one starts the others, and all join as in RL training."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from asyncrl.comm.files import make_private_folder
from asyncrl.comm.name_resolve import NameBackend, make_resolver
from asyncrl.comm.names import ACTOR
from asyncrl.config.run_dir import LOCK_FILE, NAMES_DIR
from asyncrl.config.setting import Device
from asyncrl.runtime.process.hardware import visible_gpus
from asyncrl.trainer.parallel.placement import worker_grid
from asyncrl.trainer.parallel.rank_position import World
from asyncrl.trainer.parallel.worker_grid import Placement
from asyncrl.trainer.parallel.world import training_world
from asyncrl.trainer.supervised.engine_objective import engine_settings
from asyncrl.trainer.supervised.settings import SFTConfig

END_S = 10.0
"""Time limit in seconds for the other ranks to end after the first one is done."""


@contextmanager
def joined(config: SFTConfig, run_dir: Path, rank: int, total: int, device: torch.device) -> Iterator[World]:
    """Join the world of all ranks of `trainer.parallel`, with this process as `rank`, which computes on `device`."""
    settings = engine_settings(config, run_dir, total)
    placement = Placement({ACTOR: worker_grid(settings)})
    with ExitStack() as stack:
        resolver = make_resolver(NameBackend.file, str(run_dir / NAMES_DIR))
        stack.callback(resolver.close)
        yield stack.enter_context(training_world(settings, rank, placement, device, run_dir, resolver))


@contextmanager
def other_ranks(config: SFTConfig, arguments: Sequence[str], run_dir: Path) -> Iterator[None]:
    """Start the other ranks as processes with these `arguments` and their rank; end them with this process.

    On GPUs each rank sees one: this process the first, as torch chooses by itself, and each other rank the next.

    Within this block no other process trains in `run_dir`. An earlier process whose launcher was killed ends at its
    next step, because its progress has no reader; this function waits for that.
    """
    make_private_folder(run_dir)
    count = worker_grid(engine_settings(config, run_dir, 1)).workers
    command = [sys.executable, "-m", "asyncrl.trainer.supervised", *arguments]
    gpus = () if config.device == Device.cpu else visible_gpus()
    seen = [{"CUDA_VISIBLE_DEVICES": gpus[rank]} if gpus else {} for rank in range(count)]
    with (run_dir / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(run_dir / NAMES_DIR, ignore_errors=True)  # else a rank may use the meeting file of an earlier run
        others = [subprocess.Popen([*command, str(rank)], env=os.environ | seen[rank]) for rank in range(1, count)]
        try:
            yield
            with suppress(subprocess.TimeoutExpired):  # the model is complete, even if a rank does not end
                for other in others:
                    other.wait(END_S)
        finally:
            for other in others:
                other.kill()
                other.wait()
