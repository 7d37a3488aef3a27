"""What is written after a train step: versions, the in-memory checkpoint, checkpoints; and reading them again."""

from __future__ import annotations

import mmap
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Thread

import torch

from asyncrl.models.host_copies import HostCopies, host_like, pin, unpin
from asyncrl.runtime.ranks import Ranks
from asyncrl.trainer.messages import SaveCheckpoint
from asyncrl.trainer.rank.roles import TrainingRank
from asyncrl.weights.versions.manifest import verify
from asyncrl.weights.versions.publishing import publish, tokenizer_assets
from asyncrl.weights.versions.shared_files import SharedFiles
from gpu_rows.bench import Bench, Figure, LeftOut, tried
from gpu_rows.training import VARIANTS, rank_of

SHARED_MEMORY = Path("/dev/shm")
COPIES = 1000
"""About as many as a checkpoint of 28 layers has tensors."""
ROUNDS = 3
"""The first two write into fresh memory and files."""


def weights(bench: Bench) -> Iterator[Figure]:
    """Seconds by phase, of the last round."""
    with rank_of(bench, VARIANTS[0], bench.folder) as rank:
        policy = rank.policy("actor")
        bytes_ = sum(spec.nbytes for spec in policy.published_specs())
        yield Figure("version", "size", bytes_ / 1e9, "GB")
        yield from tried(bench, "version", partial(_version, bench, rank))
        if bench.cuda:
            for name, registered in (("copies into torch's pinned memory", False), ("copies into a pinned file", True)):
                yield from tried(bench, name, partial(_queued, bench, name, registered=registered))
        for name, root in (("in-memory checkpoint", SHARED_MEMORY), ("checkpoint", bench.folder)):
            yield from tried(bench, name, partial(_checkpoint, bench, rank, name, root))


def _version(bench: Bench, rank: TrainingRank) -> Iterator[Figure]:
    """A version on the disk, and what a reader does with it first."""
    policy = rank.policy("actor")
    shared = SharedFiles(policy.model_config, tokenizer_assets(Path(bench.model)))
    for version in range(1, ROUNDS + 1):
        bench.synchronise()
        begun = time.perf_counter()
        folder = publish(policy, bench.folder / "versions", role="actor", version=version, ranks=Ranks(), shared=shared)
        written = time.perf_counter()
        verify(folder)
        checked = time.perf_counter()
    yield Figure("version", "written and synced", written - begun, "s")
    yield Figure("version", "checked", checked - written, "s")


def _queued(bench: Bench, part: str, *, registered: bool) -> Iterator[Figure]:
    """For how long a thread that begins copies is held: by queueing them, by one number read behind them, and by
    another thread that waits for their end.
    """
    source = torch.ones(COPIES, bench.size(4 << 20, 1 << 10), dtype=torch.float32, device=bench.device)
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY) as file:
        file.truncate(source.nbytes)
        memory = mmap.mmap(file.fileno(), source.nbytes)
        target = torch.frombuffer(memory, dtype=torch.float32) if registered else host_like(source).view(-1)
        target = target.view(source.shape).zero_()
        if registered and not pin(target):
            raise LeftOut("CUDA does not pin a mapped file here")
        copies, number = HostCopies(), torch.ones((), device=bench.device)
        copies.begin([(target, source)]).wait()
        bench.synchronise()
        begun = time.perf_counter()
        copy = copies.begin(zip(target, source, strict=True))
        queued = time.perf_counter()
        waiting = Thread(target=copy.wait)
        waiting.start()
        beside = time.perf_counter()
        number.item()
        read = time.perf_counter()
        waiting.join()
        ended = time.perf_counter()
        yield Figure(part, f"{COPIES} copies are queued", queued - begun, "s")
        yield Figure(part, "a thread that waits for them is begun", beside - queued, "s")
        yield Figure(part, "a number is read", read - beside, "s")
        yield Figure(part, "the copies end", ended - begun, "s")
        if registered:
            unpin(target)


def _checkpoint(bench: Bench, rank: TrainingRank, name: str, root: Path) -> Iterator[Figure]:
    in_memory = root == SHARED_MEMORY
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-benchmark-", dir=root))
    try:
        with closing(rank.writer(in_memory)) as writer:
            for version in range(1, ROUNDS + 1):
                path = folder / f"v{version}"
                bench.synchronise()
                begun = time.perf_counter()
                rank.save_checkpoint(SaveCheckpoint(str(path), version, {}, in_memory=in_memory))
                begins = time.perf_counter()
                bench.synchronise()
                copied = time.perf_counter()
                files = writer.share(path).result()
                writer.commit(path, files, keep=1, protected=())
                ended = time.perf_counter()
        yield Figure(name, "training waits", begins - begun, "s")
        yield Figure(name, "copied beside training", copied - begun, "s")
        yield Figure(name, "written after that", ended - copied, "s")
        begun = time.perf_counter()
        rank.load_checkpoint(folder)
        bench.synchronise()
        yield Figure(name, "read", time.perf_counter() - begun, "s")
    finally:
        shutil.rmtree(folder)
