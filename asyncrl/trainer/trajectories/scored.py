"""Scores of frozen models for a rollout before its step. They are sent with the rollout in token columns
(`ahead/<key>`).

A score of a whole sample is stored at each of its generated tokens. If nothing was scored ahead, or a number is not
finite, there is no column, and the step computes the missing scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.api.trajectory import SampleColumns, SharedPrompt, Trajectory
from asyncrl.trainer.batches.step_batch import StepBatch

PREFIX = "ahead/"

Scores = Mapping[str, NDArray[np.float32]]
"""By key that a call writes: a number for each token [T] of a rollout's samples; 0 at tokens not generated."""


def scores_of(batch: StepBatch, keys: Sequence[str]) -> dict[str, Scores]:
    """Return the columns `keys` of `batch`, by rollout id."""
    mask_T = batch["loss_mask"]
    columns: dict[str, NDArray[np.float32]] = {}
    for key in keys:
        column = batch[key]
        column_T = column if len(column) == batch.num_tokens else column[batch.seq_ids_T]
        columns[key] = torch.where(mask_T, column_T.float(), 0.0).cpu().numpy()
    rollouts_T = batch["rollouts"][batch.seq_ids_T].cpu().numpy()
    bounds = np.searchsorted(rollouts_T, np.arange(1, len(batch.rollout_ids)))
    parts = {key: np.split(column, bounds) for key, column in columns.items()}
    return {
        rollout_id: {key: of_all[index] for key, of_all in parts.items() if np.isfinite(of_all[index]).all()}
        for index, rollout_id in enumerate(batch.rollout_ids)
    }


def attach(trajectory: Trajectory, scores: Scores) -> Trajectory:
    """Return `trajectory` with `scores` in its token columns."""
    samples, named = trajectory.samples, {f"{PREFIX}{key}": column for key, column in scores.items()}
    if not isinstance(samples, SharedPrompt):
        columns = SampleColumns.join(samples)
        return replace(trajectory, samples=replace(columns, token_columns={**columns.token_columns, **named}))
    lengths, prompt = samples.rest.lengths, len(samples.prompt)
    starts = np.cumsum(lengths + prompt) - lengths
    after_prompt = np.concatenate([np.arange(start, start + size) for start, size in zip(starts, lengths, strict=True)])
    own = {name: column[after_prompt] for name, column in named.items()}
    rest = replace(samples.rest, token_columns={**samples.rest.token_columns, **own})
    return replace(trajectory, samples=replace(samples, rest=rest))


def detach(trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], dict[str, NDArray[np.float32]]]:
    """Return `trajectories` without their scores, and the scores end to end; NaN marks a token without one."""
    keys = {name: None for trajectory in trajectories for name in _columns_of(trajectory) if name.startswith(PREFIX)}
    if not keys:
        return list(trajectories), {}
    whole = [trajectory.columns for trajectory in trajectories]
    scores = {
        name.removeprefix(PREFIX): np.concatenate(
            [columns.token_columns.get(name, np.full(len(columns.tokens), np.nan, np.float32)) for columns in whole]
        )
        for name in keys
    }
    left = [
        replace(
            trajectory,
            samples=replace(
                columns,
                token_columns={name: own for name, own in columns.token_columns.items() if name not in keys},
            ),
        )
        for trajectory, columns in zip(trajectories, whole, strict=True)
    ]
    return left, scores


def _columns_of(trajectory: Trajectory) -> Mapping[str, NDArray[np.float32]]:
    """Return the token columns; only those that an agent gave if the samples are not in columns."""
    samples = trajectory.samples
    columns = samples.rest if isinstance(samples, SharedPrompt) else samples
    return columns.token_columns if isinstance(columns, SampleColumns) else {}
