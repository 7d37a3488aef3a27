"""What is written after a train step: versions, the in-memory checkpoint, checkpoints; and reading them again."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from safetensors.torch import load_file, save_file
from tiny_models import train_step

from asyncrl.models.ranks import Ranks
from asyncrl.trainer.batches.step_batch import build_step_batch
from asyncrl.trainer.messages import SaveCheckpoint
from asyncrl.trainer.rank.training_rank import TrainingRank
from asyncrl.weights.atomic_dir import sync
from asyncrl.weights.manifest import verify
from asyncrl.weights.publishing import SharedFiles, publish, tokenizer_assets
from gpu_rows.bench import Bench, Figure, grouped, tried
from gpu_rows.generation import load_engine
from gpu_rows.training import VARIANTS, Variant, rank_of

ROUNDS = 3
"""The first two write into fresh memory and files."""
DISK_ROUNDS = 2
"""Checkpoints on the disk, each of 12 bytes a parameter."""
MASTER_BYTES = 12
"""Bytes of a parameter in a checkpoint: fp32 weights and two moments. A published one has 2 or 4."""


def weights(bench: Bench) -> Iterator[Figure]:
    """Seconds by phase, of the last round."""
    with rank_of(bench, VARIANTS[0], bench.folder) as rank:
        specs = rank.policy("actor").published_specs()
        bytes_ = sum(spec.nbytes for spec in specs)
        yield Figure("version", "size", bytes_ / 1e9, "GB")
        for name, root in (("written and synced", bench.folder), ("written to /dev/shm, no disk", bench.memory)):
            yield from tried(bench, "version", partial(_version, bench, rank, name, root, bytes_))
        step = step_of(bench, rank, VARIANTS[0])
        alone = bench.seconds(step, ROUNDS)
        yield Figure("step alone", "seconds", alone, "s")
        kept = MASTER_BYTES * sum(math.prod(spec.shape) for spec in specs)
        for name, root in (("in-memory checkpoint", bench.memory), ("checkpoint", bench.folder)):
            yield from tried(bench, name, partial(_checkpoint, bench, rank, name, root, step, alone, kept))


def step_of(bench: Bench, rank: TrainingRank, variant: Variant) -> Callable[[], None]:
    """Return the train step of `variant`, of samples that share nothing."""
    engine = rank.policy("actor")
    trajectories = grouped(variant.lengths(bench.tiny), 0, 1, bench.config.vocab_size)
    minibatches = [0] * len(trajectories)

    def step() -> None:
        batch = build_step_batch(trajectories, minibatches, version=0, num_minibatches=1, device=bench.device)
        train_step(engine, batch)

    return step


def _version(bench: Bench, rank: TrainingRank, name: str, root: Path, bytes_: int) -> Iterator[Figure]:
    """A version in a folder of `root`, and what readers do with it: check it, and load it into their models."""
    bench.need_space(root, (ROUNDS + 2) * bytes_)
    policy = rank.policy("actor")
    shared = SharedFiles(policy.model_config, tokenizer_assets(Path(bench.model)))
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-benchmark-", dir=root))
    try:
        for version in range(1, ROUNDS + 1):
            bench.synchronise()
            begun = time.perf_counter()
            last = publish(policy, folder, role="actor", version=version, ranks=Ranks(), shared=shared)
            written = time.perf_counter()
        yield Figure("version", name, written - begun, "s")
        if root == bench.memory:
            return
        begun = time.perf_counter()
        verify(last)
        yield Figure("version", "checked", time.perf_counter() - begun, "s")
        yield from _plain(last, folder / "plain.safetensors")
        begun = time.perf_counter()
        engine = load_engine(bench, bench.dtype, rows=1, length=64, folder=str(last))
        bench.synchronise()
        yield Figure("version", "loaded by a new engine", time.perf_counter() - begun, "s")
        begun = time.perf_counter()
        updated = engine.update_weights(str(last), "1")
        engine.step()
        updated.result(timeout=0)
        bench.synchronise()
        yield Figure("version", "loaded by a running embedded engine", time.perf_counter() - begun, "s")
        engine.close()
    finally:
        shutil.rmtree(folder)


def _plain(version: Path, file: Path) -> Iterator[Figure]:
    """The yardstick: the same tensors in one file, as durable as the version, and read again from the page cache."""
    tensors = {name: each for shard in version.glob("*.safetensors") for name, each in load_file(shard).items()}
    begun = time.perf_counter()
    save_file(tensors, file)
    sync(file)
    sync(file.parent)
    written = time.perf_counter()
    for tensor in load_file(file).values():  # which only maps it
        tensor.clone()
    yield Figure("version", "plainly written and synced", written - begun, "s")
    yield Figure("version", "plainly read", time.perf_counter() - written, "s")


def _checkpoint(
    bench: Bench, rank: TrainingRank, name: str, root: Path, step: Callable[[], None], alone: float, bytes_: int
) -> Iterator[Figure]:
    """A checkpoint that is written beside a train step, which takes `alone` seconds without it."""
    in_memory = root == bench.memory
    bench.need_space(root, 2.05 * bytes_)  # the one before it is removed after it
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-benchmark-", dir=root))
    try:
        with closing(rank.writer(in_memory)) as writer:
            for version in range(1, (ROUNDS if in_memory else DISK_ROUNDS) + 1):
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
