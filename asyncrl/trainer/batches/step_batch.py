"""One train step's samples on one rank, as packed tensors, with the columns that the step's calls add.

Samples lie end to end in canonical order (by rollout, then by sample within it). Keys before the first call:

    tokens            [T] int64
    loss_mask         [T] bool      tokens that the policy sampled (and, with `min_version`, that are not too old)
    behave_logprobs   [T] float32   under the distribution sampled from; 0 where not generated
    versions          [T] int64     policy version that produced the token; -1 where not generated
    rewards           [S] float64
    token_rewards     [T] float32   rewards of turns, each at the turn's last generated token; they add to `rewards`
    truncated         [S] bool
    lengths           [S] int64     tokens of each sample
    rollouts          [S] int64     position of the sample's rollout in this rank's batch
    group_ids         [S] int64     comparison group of the sample: one for each rollout, or for each name in it
    episodes          [S] int64     which of its comparison group's episodes the sample counts as (`compared_episodes`);
                                    an episode may have several
    episode_ids       [S] int64     episode of the sample: one for each `Sample.episode` of each rollout
    minibatches       [S, E] int64  the optimizer step that the sample belongs to, in each of E passes over the batch

Where the engine's choices of experts are replayed, `StepBatch.routing` has them too.

A call adds keys with `batch[key] = tensor`. `defer` adds a key whose tensor is computed when it is first read. Proximal
log-probabilities are deferred: the first minibatch gets them for free, and samples without a signal need none.

Scores ahead of the step
------------------------
Frozen models may score a rollout while it waits for its step. The scores are kept and sent with it in token columns
(`ahead/<key>`); a score of a whole sample is stored at each of its generated tokens. If nothing was scored ahead, or a
number is not finite, there is no column, and the step computes the missing scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algorithms.arithmetic import segment_sum
from asyncrl.api.columns import TOKEN, column
from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.api.trajectory import SampleColumns, SharedPrompt, Trajectory, compared_episodes, join_routing, unrecorded
from asyncrl.master.graph import BATCH_KEYS
from asyncrl.models.model_config import UNRECORDED
from asyncrl.trainer.batches.micro_batch_layout import Prefixes, PrefixOrder, picture_symbols, symbols

_Scalar = TypeVar("_Scalar", bound=np.generic)

Compute = Callable[[Tensor], Tensor]
"""Computes a deferred [T] column at the tokens of a bool mask [T], 0 elsewhere."""


class StepBatch:
    """The batch of one rank. Build it with `build_step_batch`.

    Attributes:
        version: policy version at the step's start; the step makes version + 1.
        num_seqs: S, the samples of this rank.
        device: the device that holds the columns.
        rollout_ids: this rank's rollouts in canonical order, one for each group.
        num_minibatches: optimizer steps of the whole train step, of all passes; every rank takes part in each.
        metrics: numbers by name of each rollout.
        own: names of the user's columns: float32 [T] if they are per token, else float64 [S].
        group_names: name of each comparison group, by its id (`Sample.group`); "" if it has no name.
        routing: [T, layers, per_token] int16, the experts that each token went through as it was generated
            (`UNRECORDED` if that was not reported); None if any sample does not report them.
        pictures: [S], each sample's pictures with their positions in it; empty if no sample has any. Equal pictures are
            one `Picture` object.
        ahead: by the key that a call writes, scores of generated tokens [T] from frozen models before the step; NaN
            marks a token without one.
    """

    def __init__(
        self,
        columns: dict[str, Tensor],
        *,
        version: int,
        num_minibatches: int,
        rollout_ids: Sequence[str],
        own: Sequence[str] = (),
        metrics: Sequence[dict[str, float]] = (),
        group_names: Sequence[str] = (),
        routing: Tensor | None = None,
        pictures: Sequence[tuple[PlacedPicture, ...]] = (),
    ) -> None:
        self.version = version
        self.routing, self.pictures = routing, pictures
        self.num_minibatches = num_minibatches
        self.rollout_ids, self.own = tuple(rollout_ids), tuple(own)
        self.metrics = tuple(metrics)
        self.group_names = tuple(group_names)
        self.ahead: Mapping[str, Tensor] = {}
        self._columns: dict[str, Tensor | Compute] = dict(columns)
        self.num_seqs, self.device = len(columns["lengths"]), columns["lengths"].device

    @cached_property
    def lengths_S(self) -> NDArray[np.int64]:
        """Length of each sample, in host memory."""
        lengths: NDArray[np.int64] = self["lengths"].cpu().numpy()
        return lengths

    @cached_property
    def starts_S(self) -> NDArray[np.int64]:
        """First position in T of each sample, in host memory."""
        starts: NDArray[np.int64] = np.cumsum(self.lengths_S) - self.lengths_S
        return starts

    @cached_property
    def seq_ids_T(self) -> Tensor:
        """Sample of each token (int64), on the device."""
        lengths = self["lengths"]
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)

    @cached_property
    def minibatches(self) -> list[list[int]]:
        """The samples of each minibatch on this rank."""
        minibatches = self["minibatches"].cpu().numpy()
        return [np.flatnonzero((minibatches == n).any(-1)).tolist() for n in range(self.num_minibatches)]

    @property
    def num_tokens(self) -> int:
        """T, the tokens of this rank."""
        return len(self.seq_ids_T)

    @cached_property
    def prefixes(self) -> Prefixes:
        """Find the prefixes that the samples share; computed once for all calls of the step.

        Two tokens are shared only if they are equal and, where expert choices are recorded, went through the same
        experts. So the shared computation equals the computation of each sample alone.
        """
        routing = None if self.routing is None else self.routing.cpu().numpy()
        tokens: NDArray[np.integer] = self["tokens"].cpu().numpy()
        if self.pictures:
            tokens = picture_symbols(tokens, self.starts_S, self.pictures)
        order = PrefixOrder.of(symbols(tokens, routing), self.starts_S, self.lengths_S)
        return Prefixes(order, self["rollouts"].cpu().numpy())

    def __contains__(self, key: str) -> bool:
        return key in self._columns

    def __getitem__(self, key: str) -> Tensor:
        """Return the tensor under `key`; a deferred one is computed at all generated tokens and kept.

        Raises:
            KeyError: no such key; the message lists the existing keys.
        """
        column = self._column(key)
        if not isinstance(column, Tensor):
            column = self._columns[key] = column(self["loss_mask"])
        return column

    def __setitem__(self, key: str, tensor: Tensor) -> None:
        """Add what a call computed.

        Raises:
            ValueError: the key came with the trajectories, or the tensor's first size is neither T nor S.
        """
        if key in BATCH_KEYS:
            raise ValueError(f"{key!r} came with the trajectories and cannot be replaced; write under another name")
        if tensor.shape[:1] not in ((self.num_tokens,), (self.num_seqs,)):
            raise ValueError(
                f"{key!r} has shape {tuple(tensor.shape)}; its first size must be the {self.num_tokens} tokens or the "
                f"{self.num_seqs} samples of the batch"
            )
        self._columns[key] = tensor

    def episode_tokens(self, wanted_T: Tensor) -> Tensor:
        """Return the number of tokens of `wanted_T` (bool) in each token's episode, in all of its samples; fp64 [T]."""
        episodes_T = self["episode_ids"][self.seq_ids_T]
        return segment_sum(wanted_T.double(), episodes_T, self.num_seqs)[episodes_T]

    def own_by_token(self, targets_N: Tensor) -> dict[str, Tensor]:
        """Return the user's columns at the tokens `targets_N`, float32 [N] each; a sample's value is repeated for its
        tokens.
        """
        seq_ids_N = self.seq_ids_T[targets_N]
        return {name: self[name][targets_N if name.startswith(f"{TOKEN}/") else seq_ids_N].float() for name in self.own}

    def defer(self, key: str, compute: Compute) -> None:
        """Add a column that is computed when it is first read."""
        self._columns[key] = compute

    def deferred(self, key: str) -> Compute | None:
        """Return the function that computes column `key` if it is still deferred; None if its tensor exists."""
        column = self._column(key)
        return None if isinstance(column, Tensor) else column

    def _column(self, key: str) -> Tensor | Compute:
        try:
            return self._columns[key]
        except KeyError:
            known = ", ".join(sorted(self._columns))
            raise KeyError(f"the batch has no {key!r}; it has {known}: add the key to the call's reads") from None


def build_step_batch(
    trajectories: Sequence[Trajectory],
    minibatches: Sequence[int] | Sequence[Sequence[int]],
    *,
    version: int,
    num_minibatches: int,
    min_version: int = 0,
    device: torch.device | None = None,
    own: Sequence[str] = (),
) -> StepBatch:
    """Build the batch of `trajectories`, in canonical order.

    Args:
        minibatches: minibatch of each trajectory, or its minibatch in each pass.
        own: the user's columns, which every sample has (`asyncrl.api.columns`).
        min_version: generated tokens older than this lose their place in `loss_mask` (`on_stale: mask`).

    Raises:
        ValueError: a trajectory has no samples, a sample's first token is marked as generated, or a sample lacks a
            column.
    """
    groups: list[SampleColumns] = []
    for trajectory in trajectories:
        if not trajectory.samples or (group := trajectory.columns).loss_mask[group.starts].any():
            raise ValueError(
                f"rollout {trajectory.rollout_id!r} has no samples, or one without a prompt token; "
                "an agent's samples begin with their prompt"
            )
        groups.append(group)
    sizes = np.array([len(group) for group in groups], dtype=np.int64)
    versions: NDArray[np.int64] = _join([group.versions for group in groups], np.int64)
    mask: NDArray[np.bool_] = _join([group.loss_mask for group in groups], np.bool_) & (versions >= min_version)
    routing = _routing(groups)
    group_ids, group_names = _comparison_groups(groups)
    by_pass = np.array(minibatches, dtype=np.int64)
    columns = {
        "tokens": _join([group.tokens for group in groups], np.int64),
        "loss_mask": mask,
        "behave_logprobs": _join([group.behave_logprobs for group in groups], np.float32),
        "versions": versions,
        "rewards": _join([group.rewards for group in groups], np.float64),
        "token_rewards": _join(
            [np.zeros(len(group.tokens)) if group.token_rewards is None else group.token_rewards for group in groups],
            np.float32,
        ),
        "truncated": _join([group.truncated for group in groups], np.bool_),
        "lengths": _join([group.lengths for group in groups], np.int64),
        "rollouts": np.repeat(np.arange(len(sizes)), sizes),
        "group_ids": group_ids,
        "episode_ids": _episode_ids(groups),
        "episodes": _join([compared_episodes(group.episodes.tolist(), group.groups) for group in groups], np.int64),
        "minibatches": np.repeat(by_pass if by_pass.ndim == 2 else by_pass[:, None], sizes, axis=0),
        **{
            name: _join(
                [column(group, name) for group in groups], np.float32 if name.startswith(f"{TOKEN}/") else np.float64
            )
            for name in own
        },
    }
    return StepBatch(
        {key: torch.from_numpy(values).to(device or torch.device("cpu")) for key, values in columns.items()},
        version=version,
        num_minibatches=num_minibatches,
        rollout_ids=[trajectory.rollout_id for trajectory in trajectories],
        own=own,
        metrics=[trajectory.metrics for trajectory in trajectories],
        group_names=group_names,
        routing=None if routing is None else routing.to(device or torch.device("cpu")),
        pictures=_pictures(groups),
    )


def _comparison_groups(groups: Sequence[SampleColumns]) -> tuple[NDArray[np.int64], list[str]]:
    """Return number [S] of each sample's comparison group, in order of first appearance, and the name of each group."""
    numbers: dict[tuple[int, str], int] = {}
    ids = [
        numbers.setdefault((rollout, name), len(numbers))
        for rollout, group in enumerate(groups)
        for name in group.groups or ("",) * len(group)
    ]
    return np.array(ids, np.int64), [name for _, name in numbers]


def _episode_ids(groups: Sequence[SampleColumns]) -> NDArray[np.int64]:
    """Return number [S] of each sample's episode, in order of first appearance."""
    numbers: dict[tuple[int, int], int] = {}
    return np.array(
        [
            numbers.setdefault((rollout, episode), len(numbers))
            for rollout, group in enumerate(groups)
            for episode in group.episodes.tolist()
        ],
        np.int64,
    )


def _routing(groups: Sequence[SampleColumns]) -> Tensor | None:
    """Return the routing of all groups' tokens, `StepBatch.routing`."""
    recorded = join_routing([group.routing for group in groups]) if groups else None
    if recorded is None:
        return None
    routing = recorded.astype(np.int16)
    routing[recorded == unrecorded(recorded.dtype)] = UNRECORDED
    return torch.from_numpy(routing)


def _pictures(groups: Sequence[SampleColumns]) -> list[tuple[PlacedPicture, ...]]:
    """Return the pictures of all groups' samples, `StepBatch.pictures`."""
    if not any(group.pictures for group in groups):
        return []
    table: dict[str, Picture] = {}  # rollouts of different messages may show the same picture
    return [
        tuple(replace(placed, picture=table.setdefault(placed.picture.sha256, placed.picture)) for placed in own)
        for group in groups
        for own in group.pictures or [()] * len(group)
    ]


def _join(parts: Sequence[NDArray[Any] | Sequence[int]], dtype: type[_Scalar]) -> NDArray[_Scalar]:
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype=dtype)


AHEAD = "ahead/"

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
    samples, named = trajectory.samples, {f"{AHEAD}{key}": column for key, column in scores.items()}
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
    keys: set[str] = set()
    for trajectory in trajectories:
        samples = trajectory.samples
        columns = samples.rest if isinstance(samples, SharedPrompt) else samples
        if isinstance(columns, SampleColumns):  # else the samples of an agent here, which has no scores
            keys |= {name for name in columns.token_columns if name.startswith(AHEAD)}
    if not keys:
        return list(trajectories), {}
    whole = [trajectory.columns for trajectory in trajectories]
    scores = {
        name.removeprefix(AHEAD): np.concatenate(
            [columns.token_columns.get(name, np.full(len(columns.tokens), np.nan, np.float32)) for columns in whole]
        )
        for name in sorted(keys)
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
