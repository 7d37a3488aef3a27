"""What is written after a train step: versions, the in-memory checkpoint, checkpoints; and reading them again."""

from __future__ import annotations

import mmap
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Thread

import torch

from asyncrl.models.host_copies import HostCopies, host_like, pin, unpin
from asyncrl.models.weights.versions.manifest import verify
from asyncrl.models.weights.versions.publishing import publish, tokenizer_assets
from asyncrl.models.weights.versions.shared_files import SharedFiles
from asyncrl.runtime.ranks import Ranks
from asyncrl.trainer.batches.step_batch import build_step_batch
from asyncrl.trainer.messages import SaveCheckpoint
from asyncrl.trainer.rank.training_rank import TrainingRank
from gpu_rows.bench import Bench, Figure, LeftOut, grouped, tried
from gpu_rows.training import VARIANTS, rank_of, train_step

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
            for name, registered, in_pieces in (
                ("copies into torch's pinned memory", False, False),
                ("copies into a pinned file", True, False),
                ("copies in pieces into a pinned file", True, True),
            ):
                part = partial(_queued, bench, name, registered=registered, in_pieces=in_pieces)
                yield from tried(bench, name, part)
        step = _step_of(bench, rank)
        alone = bench.seconds(step, ROUNDS)
        yield Figure("step alone", "seconds", alone, "s")
        for name, root in (("in-memory checkpoint", SHARED_MEMORY), ("checkpoint", bench.folder)):
            yield from tried(bench, name, partial(_checkpoint, bench, rank, name, root, step, alone))


def _step_of(bench: Bench, rank: TrainingRank) -> Callable[[], None]:
    """Return the train step that the row `training` begins with."""
    engine = rank.policy("actor")
    trajectories = grouped(VARIANTS[0].lengths(bench.tiny), 0, 1, bench.config.vocab_size)
    minibatches = [0] * len(trajectories)

    def step() -> None:
        train_step(
            engine, build_step_batch(trajectories, minibatches, version=0, num_minibatches=1, device=bench.device)
        )

    return step


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


def _queued(bench: Bench, part: str, *, registered: bool, in_pieces: bool) -> Iterator[Figure]:
    """For how long a thread that begins copies is held: by queueing them, by another thread that waits for their end,
    and by reading one number after the other until they have ended.
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
        begin = copies.begin_in_pieces if in_pieces else copies.begin
        copies.begin([(target, source)]).wait()
        bench.synchronise()
        begun = time.perf_counter()
        copy = begin(zip(target, source, strict=True))
        queued = time.perf_counter()
        waiting = Thread(target=copy.wait)
        waiting.start()
        beside = last = time.perf_counter()
        reads: list[float] = []
        while waiting.is_alive() or not reads:
            number.item()
            reads.append(time.perf_counter() - last)
            last += reads[-1]
        waiting.join()
        ended = time.perf_counter()
        yield Figure(part, f"{COPIES} copies are queued", queued - begun, "s")
        yield Figure(part, "a thread that waits for them is begun", beside - queued, "s")
        yield Figure(part, "the slowest number is read", max(reads), "s")
        yield Figure(part, "the copies end", ended - begun, "s")
        if registered:
            unpin(target)


def _checkpoint(
    bench: Bench, rank: TrainingRank, name: str, root: Path, step: Callable[[], None], alone: float
) -> Iterator[Figure]:
    """A checkpoint that is written beside a train step, which takes `alone` seconds without it."""
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
                step()
                bench.synchronise()
                stepped = time.perf_counter()
                files = writer.share(path).result()
                writer.commit(path, files, keep=1, protected=())
                ended = time.perf_counter()
        yield Figure(name, "begun", begins - begun, "s")
        yield Figure(name, "training waits", max(0.0, stepped - begun - alone), "s")
        yield Figure(name, "written", ended - begun, "s")
        begun = time.perf_counter()
        rank.load_checkpoint(folder)
        bench.synchronise()
        yield Figure(name, "read", time.perf_counter() - begun, "s")
    finally:
        shutil.rmtree(folder)
