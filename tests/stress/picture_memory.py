"""Does memory grow with pictures that nobody asks for again? Distinct pictures through a server's cache and engine.

    python tests/stress/picture_memory.py [--pictures 10000]

A tiny Qwen2-VL of random weights answers prompts with a picture of its own each, 32 at a time, through `PictureCache`
and `GenerationEngine`; then the flat engine scores and trains on the newest. What is kept on purpose is limited to 4
MiB here in place of 512 and 256, so that a few hundred pictures fill it. The resident memory is read after every
twentieth of the pictures; the figure is what the last half added, in bytes a picture.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForImageTextToText

from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.embedded.pictures import PictureCache
from asyncrl.inference.engine_io import GenerationInput, SamplingSpec
from asyncrl.models import pictures as pictures_module
from asyncrl.models.pictures import Pictures
from asyncrl.trainer.batches.step_batch import build_step_batch
from asyncrl.trainer.engines.flat import FlatLoader, FlatPolicyEngine
from asyncrl.trainer.parallel.world import RankPosition
from tests.tiny_vlm import make_folder

KEPT_BYTES = 4 << 20
AT_ONCE = 32
TRAINED_EVERY = 20
"""Rounds between two train steps on the pictures at hand."""


def picture(number: int) -> Picture:
    """A picture of 28 x 28 that no other number has."""
    return Picture.from_array(np.random.default_rng(number).integers(0, 256, (28, 28, 3), np.uint8))


def trainer(folder: Path) -> FlatPolicyEngine:
    """The flat engine of a run."""
    config = ExperimentConfig()
    config.model.path, config.generation.context_length = str(folder), 64
    return FlatLoader(config, RankPosition(), torch.device("cpu")).policy(str(folder), Dtype.float32, config.optimizer)


def train(engine: FlatPolicyEngine, ids: tuple[int, ...], shown: list[PlacedPicture]) -> None:
    """Score samples of `shown`, and take a step on them."""
    tokens = np.array([*ids, 20, 21], np.int32)
    mask = np.array([0] * len(ids) + [1, 1], np.uint8)
    trajectories = []
    for number, placed in enumerate(shown):
        sample = Sample(tokens, mask, -mask.astype(np.float32), mask.astype(np.int32) - 1, 0.0, pictures=(placed,))
        trajectories.append(Trajectory(f"r{number}", f"p{number}", number, [sample]))
    batch = build_step_batch(trajectories, [0] * len(shown), version=0, num_minibatches=1)
    engine.logprobs(batch, batch["loss_mask"])
    engine.compute_gradients(
        batch, batch["loss_mask"], range(batch.num_seqs), lambda _, out: (-out.logprobs_N.mean(), {})
    )
    engine.step(1e-4)


def soak(folder: Path, total: int) -> list[tuple[int, int]]:
    """Pictures so far and resident bytes, twenty times."""
    pictures_module.RECENT_BYTES = KEPT_BYTES  # type: ignore[misc]
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    pictures = Pictures.of(model, folder)
    assert pictures is not None
    engine = GenerationEngine(model, model_path=str(folder), max_model_len=64, pictures=pictures)
    learner, cache, process = trainer(folder), PictureCache(KEPT_BYTES), psutil.Process()
    rows = pictures.ids.seen(picture(0)).rows
    ids = (2, *[pictures.ids.token_id] * rows, 3)
    spec, readings = SamplingSpec(max_new_tokens=2, seed=1), []
    for turn, begin in enumerate(range(0, total, AT_ONCE)):
        new = [picture(number) for number in range(begin, begin + AT_ONCE)]
        for each in new:
            cache.add(each)
        placed = [each[0] for each in cache.placed([[PlacedPicture(1, rows, each).ref] for each in new])]
        future = engine.submit(
            Job(tuple(GenerationInput(f"{begin + n}", ids, spec, pictures=(each,)) for n, each in enumerate(placed)))
        )
        while engine.step():
            pass
        assert all(len(output.output_ids) == 2 for output in future.result(timeout=0))
        if turn % TRAINED_EVERY == 0:
            train(learner, ids, placed)
        if (done := begin + AT_ONCE) * 20 // total > begin * 20 // total:
            gc.collect()
            readings.append((done, process.memory_info().rss))
    return readings


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=10_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        cpu, readings = time.process_time(), soak(make_folder("qwen2_vl", Path(scratch) / "model"), options.pictures)
    table = Table("pictures", "resident MiB")
    for done, resident in readings:
        table.add_row(str(done), f"{resident / 2**20:.1f}")
    Console().print(table)
    (half, before), (last, after) = readings[len(readings) // 2], readings[-1]
    per_picture = (after - before) / (last - half)
    print(f"the last {last - half} pictures added {per_picture:.0f} bytes each; {time.process_time() - cpu:.0f} CPU s")


if __name__ == "__main__":
    main()
