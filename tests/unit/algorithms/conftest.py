"""Random ragged batches in float64, from which the reference versions and the tensor versions both start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asyncrl.algorithms.inputs import PolicyLossInputs

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Ragged:
    """Sequences of different lengths, each with gaps (prompt and environment tokens), packed."""

    num_seqs: int
    seq_ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    logprobs: Array
    prox: Array
    behave: Array
    ref: Array
    advantages: Array
    entropy: Array
    versions: NDArray[np.int64]
    rewards: Array
    groups: NDArray[np.int64]
    episodes: NDArray[np.int64]
    """Of each sequence, whatever its group; and its loss tokens, of each token."""
    episode_tokens: Array
    current_version: int = 7

    def spans(self) -> Iterator[NDArray[np.int64]]:
        """Indices of the loss tokens of each sequence."""
        for s in range(self.num_seqs):
            yield np.flatnonzero((self.seq_ids == s) & self.mask)

    def select(self, sequences: list[int]) -> Ragged:
        """The given sequences, in that order, renumbered."""
        where = [np.flatnonzero(self.seq_ids == s) for s in sequences]
        index = np.concatenate(where)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        per_token = ("mask", "logprobs", "prox", "behave", "ref", "advantages", "entropy", "versions", "episode_tokens")
        fields |= {name: fields[name][index] for name in per_token}
        fields |= {name: fields[name][sequences] for name in ("rewards", "groups", "episodes")}
        fields["seq_ids"] = np.repeat(np.arange(len(sequences)), [len(w) for w in where])
        return Ragged(**fields | {"num_seqs": len(sequences)})

    def inputs(self, dtype: torch.dtype = torch.float64) -> PolicyLossInputs:
        """As a loss takes it; `logprobs_T` is a fresh leaf."""
        return PolicyLossInputs(
            logprobs_T=torch.tensor(self.logprobs, dtype=dtype, requires_grad=True),
            prox_logprobs_T=torch.tensor(self.prox, dtype=dtype),
            behave_logprobs_T=torch.tensor(self.behave, dtype=dtype),
            advantages_T=torch.tensor(self.advantages, dtype=dtype),
            mask_T=torch.tensor(self.mask),
            seq_ids_T=torch.tensor(self.seq_ids),
            num_seqs=self.num_seqs,
            versions_T=torch.tensor(self.versions),
            current_version=self.current_version,
            entropy_T=torch.tensor(self.entropy, dtype=dtype),
            episode_tokens_T=torch.tensor(self.episode_tokens),
        )


def make_ragged(seed: int, num_seqs: int = 6, longest: int = 12, spread: float = 0.4, group_size: int = 2) -> Ragged:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, size=num_seqs)
    total = int(lengths.sum())
    mask = rng.random(total) < 0.7
    logprobs = -rng.exponential(1.0, total) - 0.01
    versions = np.where(mask, rng.integers(0, 8, total), -1)
    seq_ids = np.repeat(np.arange(num_seqs), lengths)
    episodes = np.random.default_rng([seed, 1]).integers(0, max(1, num_seqs // 2), num_seqs)
    return Ragged(
        num_seqs=num_seqs,
        seq_ids=seq_ids,
        mask=mask,
        logprobs=logprobs,
        prox=np.minimum(logprobs + spread * rng.standard_normal(total), -1e-3),
        behave=np.minimum(logprobs + spread * rng.standard_normal(total), -1e-3),
        ref=np.minimum(logprobs + spread * rng.standard_normal(total), -1e-3),
        advantages=np.where(np.arange(total) % 5 == 4, 0.0, rng.standard_normal(total)),
        entropy=rng.exponential(1.0, total),
        versions=versions,
        rewards=rng.standard_normal(num_seqs).round(2),
        groups=rng.permutation(np.arange(num_seqs) // group_size) * 10 + 3,
        episodes=episodes,
        episode_tokens=np.bincount(episodes[seq_ids], mask, num_seqs)[episodes[seq_ids]],
    )


@pytest.fixture(scope="session")
def ragged() -> Callable[..., Ragged]:
    """`ragged(seed, num_seqs=6, longest=12, spread=0.4, group_size=2)`."""
    return make_ragged


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
