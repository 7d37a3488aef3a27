"""Samples that a rank keeps of those that it trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.observe.samples import read_samples, sample_files
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.rank.sample_log import SampleLog


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def rollout(order: int, samples: int = 2) -> Trajectory:
    tokens = np.arange(4, dtype=np.int32) + order
    mask = np.array([0, 1, 1, 1], np.uint8)
    versions = np.array([-1, 3, 4, 4], np.int32)
    one = Sample(tokens, mask, -0.5 * mask.astype(np.float32), versions, reward=float(order))
    return Trajectory(f"r{order}", f"e0-{order}", order, [one] * samples)


def batch_of(trajectories: Sequence[Trajectory]) -> StepBatch:
    return build_step_batch(trajectories, [0] * len(trajectories), version=4, num_minibatches=1)


def keep(folder: Path, every: int, writer: str | None = "head-0") -> SampleLog:
    return SampleLog(folder, every, 1 << 30, writer, decode)


def test_log_probabilities_put_off_are_computed_for_what_is_kept_alone_and_stay_put_off(tmp_path: Path) -> None:
    kept, trajectories = keep(tmp_path, every=2), [rollout(order) for order in range(4)]
    batch = batch_of(trajectories)
    asked = []

    def compute(wanted_T: torch.Tensor) -> torch.Tensor:
        asked.append(wanted_T.clone())
        return torch.arange(batch.num_tokens, dtype=torch.float32) * wanted_T

    kept.begin(trajectories, batch)
    batch.defer("prox_logprobs", compute)
    kept.called(("prox_logprobs",), batch)
    assert batch.deferred("prox_logprobs") is compute, "training computes what it would have without"
    assert [wanted.reshape(8, 4).any(1).tolist() for wanted in asked] == [[True, True, False, False] * 2]

    batch["ref_logprobs"] = -torch.ones(batch.num_tokens)
    kept.end(batch)
    kept.close()
    rows = list(read_samples(sample_files(tmp_path)))
    assert [(row["step"], row["order"], row["sample"]) for row in rows] == [(5, 0, 0), (5, 0, 1), (5, 2, 0), (5, 2, 1)]
    assert rows[2]["prox_logprobs"] == [0, 17, 18, 19]
    assert rows[2]["ref_logprobs"] == [-1] * 4
    assert rows[2]["advantages"] is None
    assert rows[2]["staleness"] == 1
    assert rows[2]["text"] == "2 3 4 5"


def test_a_rank_that_does_not_write_takes_part_in_what_is_computed(tmp_path: Path) -> None:
    kept, batch = keep(tmp_path, every=1, writer=None), batch_of([rollout(0)])
    asked = []
    kept.begin([rollout(0)], batch)
    batch.defer("prox_logprobs", lambda wanted_T: asked.append(wanted_T) or torch.zeros(batch.num_tokens))  # type: ignore[func-returns-value]
    kept.called(("prox_logprobs",), batch)
    kept.end(batch)
    kept.close()
    assert len(asked) == 1
    assert sample_files(tmp_path) == []


def test_samples_that_cannot_be_written_are_said_and_the_step_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "samples").write_text("in the way")
    kept, batch = keep(tmp_path / "samples", every=1), batch_of([rollout(0)])
    for _ in range(2):
        kept.begin([rollout(0)], batch)
        kept.end(batch)
    kept.close()
    assert caplog.text.count("could not be kept") == 2
