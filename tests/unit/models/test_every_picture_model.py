"""Every family of vision-language models, with tiny random weights: is it trained and served right, or refused?

The table in `docs/models.md` is made of what this file finds, and each test holds its row against it. The suite tries
`SAMPLE`, which has one of each kind; `ASYNCRL_EVERY_CASE=1 pytest tests/unit/models` tries all of them.

    python tests/unit/models/test_every_picture_model.py        writes the table anew

A column is a check in `CHECKS`: what it returns is the cell. All are compared with transformers' own forward of each
sample alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from asyncrl.comm.name_resolve import make_resolver
from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.models.parity import UnsupportedModelError
from asyncrl.models.picture_rules import PictureModelError
from asyncrl.models.pictures import Pictures
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import PolicyEngine, PolicyOutputs
from asyncrl.trainer.engines.flat import FlatLoader
from asyncrl.trainer.engines.sharded.build import whole
from asyncrl.trainer.engines.sharded.loader import ShardedLoader
from asyncrl.trainer.engines.sharded.tensor_parallel import LayoutError
from asyncrl.trainer.parallel.checks import (
    PIPELINE_PARALLEL_WITH_PICTURES,
    TENSOR_PARALLEL_WITH_PICTURES,
)
from asyncrl.trainer.parallel.placement import Layout, Placement, WorkerGrid
from asyncrl.trainer.parallel.process_groups import training_world
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.settings import OptimizerConfig
from asyncrl.weights.folder_tensors import FolderFormatError
from tests.tiny_vlm import make_folder
from tests.unit.models.test_every_architecture import PAGE, WAIT_S, Found, TwoRanks, sampled
from tests.vlm_batches import vlm_batch, vlm_expected, vlm_trajectories

FAMILIES = {
    "Qwen2-VL": "qwen2_vl",
    "Qwen2.5-VL": "qwen2_5_vl",
    "Qwen3-VL": "qwen3_vl",
    "GLM-4V": "glm4v",
    "SmolVLM": "smolvlm",
    "Idefics3": "idefics3",
    "LLaVA": "llava",
    "LLaVA-OneVision": "llava_onevision",
    "InternVL": "internvl",
    "Gemma 3": "gemma3",
    "Mistral 3": "mistral3",
    "Qwen3-VL-MoE": "qwen3_vl_moe",
    "LFM2-VL": "lfm2_vl",
}
SAMPLE = {
    "Qwen3-VL": "positions in three dimensions, features of the tower added to layers of the text model; no slices",
    "SmolVLM": "pictures in tiles, their pixels folded into channels",
    "LLaVA-OneVision": "a grid of tiles with ends of rows",
    "Gemma 3": "tokens of a picture see each other, so on padded rows; neither slices nor stages",
    "Mistral 3": "patches merged, pictures of any size",
}
"""The families that the suite tries, and what each has that those before it lack."""
LOGPROBS, GRADIENTS = 2e-4, 3e-4
"""Most that log-probabilities (nats) and gradients of the batch below differ, in fp32."""
REFUSALS = (UnsupportedModelError, PictureModelError, FolderFormatError)
"""Each names the model and the reason, before anything is trained or served."""
Gradients = dict[str, Tensor]


@dataclass
class Family:
    """A model with random weights, what transformers makes of the batch, and the ranks that train it."""

    folder: Path
    ranks: TwoRanks

    @cached_property
    def expected(self) -> tuple[Tensor, Gradients]:
        """Log-probabilities [T] and gradients of the whole batch."""
        return vlm_expected(self.folder, vlm_batch(vlm_trajectories(self.folder)))


def configured(folder: str, parallel: str = "d1") -> ExperimentConfig:
    config = ExperimentConfig()
    config.model.path, config.trainer.parallel, config.generation.context_length = folder, parallel, 256
    config.trainer.collective_timeout_s = WAIT_S / 2
    return config


def found_by(engine: PolicyEngine, batch: StepBatch) -> Tensor:
    """Log-probabilities [T] of `batch`; its gradients are accumulated."""

    def share(micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, Any]]:
        return outputs.logprobs_N.sin().sum() / 8, {}

    logprobs_T = engine.logprobs(batch, batch["loss_mask"])
    engine.compute_gradients(batch, batch["loss_mask"], range(batch.num_seqs), share)
    return logprobs_T


def assert_same(gradients: dict[str, Any], expected: Gradients) -> None:
    for name, gradient in gradients.items():
        other = expected[name].numpy() if name in expected else 0.0 * gradient
        np.testing.assert_allclose(gradient, other, rtol=0, atol=GRADIENTS, err_msg=name)


def trains(family: Family) -> str:
    """The flat engine under the default settings: log-probabilities and gradients, vision tower included."""
    config, device = configured(str(family.folder)), torch.device("cpu")
    try:
        engine = FlatLoader(config, RankPosition(), device).policy(str(family.folder), Dtype.float32, OptimizerConfig())
    except REFUSALS:
        return "refused"
    logprobs_T, expected = family.expected
    assert torch.allclose(found_by(engine, vlm_batch(vlm_trajectories(family.folder))), logprobs_T, atol=LOGPROBS)
    made = {name: each.numpy() for name, each in engine.optimizer._views(engine.optimizer.grad).items()}
    assert expected.keys() <= made.keys()
    assert_same(made, expected)
    return {AttentionKind.tree: "yes", AttentionKind.padded: "on padded rows"}[engine.attention]


def spread(folder: str, parallel: str, rank: int, scratch: Path) -> Found:
    """Findings of a rank; of two data-parallel ones the second has text alone."""
    config = configured(folder, parallel)
    placed = Placement({ACTOR: WorkerGrid.of(Layout.parse(parallel))})
    names = make_resolver("file", str(scratch / "names"))
    with training_world(config, rank, placed, torch.device("cpu"), scratch, names) as world:
        place = world.position(ACTOR)
        try:
            engine = ShardedLoader(config, place, torch.device("cpu")).policy(folder, Dtype.float32, OptimizerConfig())
        except REFUSALS as error:
            raise LayoutError(str(error)) from error
        everything = vlm_trajectories(Path(folder))
        mine = everything if place.data.world == 1 else everything[3:] if place.data.rank else everything[:3]
        logprobs_T = found_by(engine, vlm_batch(mine))
        gradients = {
            name: whole(cast(Tensor, each.grad)).numpy()
            for name, each in engine.parameters().items()
            if each.grad is not None
        }
        return logprobs_T.numpy(), gradients


def trains_as(parallel: str) -> Callable[[Family], str]:
    """Two ranks in the layout `parallel`."""

    def check(family: Family) -> str:
        try:
            found = family.ranks.train(family.folder, parallel)
        except LayoutError:
            return "refused"
        expected_T, expected = family.expected
        assert expected.keys() <= set().union(*(gradients for _, gradients in found))
        both = [logprobs_T for logprobs_T, _ in found]
        for logprobs_T in [np.concatenate(both)] if parallel == "d2" else both:
            np.testing.assert_allclose(logprobs_T, expected_T, rtol=0, atol=LOGPROBS)
        for _, gradients in found:
            assert_same(gradients, expected)
        return "yes"

    return check


def served(family: Family) -> str:
    """The embedded engine's own parity check, by steps of decoding from shared slots and by scored prompts."""
    model = AutoModelForImageTextToText.from_pretrained(family.folder)
    try:
        pictures = Pictures.of(model, family.folder)
        GenerationEngine(model, model_path=str(family.folder), max_model_len=128, pictures=pictures)
    except REFUSALS:
        return "refused"
    return "yes"


CHECKS: dict[str, Callable[[Family], str]] = {
    "trained, flat engine": trains,
    "d2": trains_as("d2"),
    "t2": trains_as("t2"),
    "p2": trains_as("p2"),
    "served by the embedded engine": served,
}
"""By column. A new one is one more entry."""

BEGIN, END = f"<!-- pictures: made by {Path(__file__).relative_to(PAGE.parents[1])} -->", "<!-- end of pictures -->"
HEADER = [f"| family | {' | '.join(CHECKS)} |", f"|---|{'---|' * len(CHECKS)}"]


def table(page: str) -> list[str]:
    assert BEGIN in page, f"{PAGE} has lost the mark {BEGIN!r}"
    return page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()


def row(name: str, folder: Path, ranks: TwoRanks) -> str:
    """Run every check on a family."""
    torch.set_num_threads(1)
    family = Family(make_folder(FAMILIES[name], folder), ranks)
    return f"| {name} | {' | '.join(check(family) for check in CHECKS.values())} |"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    with closing(TwoRanks(tmp_path_factory.mktemp("ranks"), spread)) as two:
        yield two


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(FAMILIES, SAMPLE))
def test_it_is_trained_and_served_right_or_refused_as_the_page_says(name: str, tmp_path: Path, ranks: TwoRanks) -> None:
    found = row(name, tmp_path / "model", ranks)
    fix = f"write it anew: python {Path(__file__).relative_to(PAGE.parents[1])}"
    assert found in table(PAGE.read_text(encoding="utf-8")), f"{PAGE.name} is out of date; {fix}"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("qwen3_vl_moe", r"Qwen3VLMoe.*experts.down_proj' of its folder is a parameter transposed"),
        ("lfm2_vl", "holds no image processor that works without torchvision"),
    ],
)
def test_a_refusal_names_its_reason(kind: str, reason: str, tmp_path: Path) -> None:
    folder = make_folder(kind, tmp_path)
    loader = FlatLoader(configured(str(folder)), RankPosition(), torch.device("cpu"))
    with pytest.raises(REFUSALS, match=reason):
        loader.policy(str(folder), Dtype.float32, OptimizerConfig())
    model = AutoModelForImageTextToText.from_pretrained(folder)
    with pytest.raises(REFUSALS, match=reason):
        GenerationEngine(model, model_path=str(folder), max_model_len=128, pictures=Pictures.of(model, folder))


def test_the_page_has_these_families_and_no_others() -> None:
    found = table(PAGE.read_text(encoding="utf-8"))
    assert found[:2] == HEADER
    assert [line.split("|")[1].strip() for line in found[2:]] == list(FAMILIES)


@pytest.mark.parametrize(
    ("column", "allowed"), [("t2", TENSOR_PARALLEL_WITH_PICTURES), ("p2", PIPELINE_PARALLEL_WITH_PICTURES)]
)
def test_what_is_cut_is_what_the_page_shows_to_be_right(column: str, allowed: frozenset[str]) -> None:
    place = [*CHECKS].index(column) + 2
    cells = [[cell.strip() for cell in line.split("|")] for line in table(PAGE.read_text(encoding="utf-8"))[2:]]
    assert {FAMILIES[each[1]] for each in cells if each[place] == "yes"} == allowed


def main() -> None:
    """Write the table anew."""
    with tempfile.TemporaryDirectory() as scratch, closing(TwoRanks(Path(scratch) / "ranks", spread)) as ranks:
        lines = [*HEADER]
        for name in FAMILIES:
            lines.append(row(name, Path(scratch) / FAMILIES[name], ranks))
            print(lines[-1], flush=True)
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text("\n".join([before + BEGIN, "", *lines, "", END + rest.partition(END)[2]]), encoding="utf-8")


if __name__ == "__main__":
    main()
