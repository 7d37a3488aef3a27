"""Optional: which answers of which policy a rollout got, in a run with `policies`.

A sample trains the policy whose client made it (`client.policy(name)`). If an agent gave samples of one policy the
comparison group of another, that policy would be trained on tokens that it never sampled. So a rollout's samples are
checked against the answers of the servers: each generated token of a policy's samples, with its version and
log-probability, was sampled by this policy in this rollout. The ledger has the numbers of tokens, and the audit
compares them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.api import EpisodeError, Sample
from asyncrl.api.generation import Completion
from asyncrl.api.trajectory import GENERATED, policy_of
from asyncrl.comm.names import ACTOR

_VERSION_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""An odd number with well mixed bits: keys of two versions of one token differ."""
_Keys = NDArray[np.uint64]


class PolicyAnswers:
    """Records the answers of one rollout.

    Args:
        trained: names of the policies that are trained beside the run's own; all others are policy servers.
    """

    def __init__(self, trained: Collection[str]) -> None:
        self._trained = trained
        self._keys: dict[str, list[_Keys]] = {"": [], **{name: [] for name in trained}}
        self._met: dict[str, Counter[int]] = {}
        """Tokens of the policy servers' answers, by policy and version."""

    def add(self, policy: str, completions: Iterable[Completion]) -> None:
        """Record answers of `policy`; an empty name means the run's own."""
        if policy not in self._keys:
            versions = self._met.setdefault(policy, Counter())
            versions.update(version for completion in completions for version in completion.versions)
        elif self._trained:
            self._keys[policy] += [_keys(each.token_ids, each.versions, each.logprobs) for each in completions]

    def metrics(self) -> dict[str, float]:
        """Return the number of tokens that each trained policy generated, if there are several, and the versions of the
        policy servers: the oldest, the newest and the mean by tokens.
        """
        found: dict[str, float] = {}
        for policy, versions in self._met.items():
            if tokens := versions.total():
                mean = sum(version * count for version, count in versions.items()) / tokens
                found[f"policy_server/{policy}/version"] = mean
                found[f"policy_server/{policy}/oldest_version"] = float(min(versions))
                found[f"policy_server/{policy}/newest_version"] = float(max(versions))
        if self._trained:
            found |= {f"{GENERATED}{name or ACTOR}": float(sum(map(len, keys))) for name, keys in self._keys.items()}
        return found

    def check(self, samples: Sequence[Sample]) -> None:
        """Check that the generated tokens of each policy's samples are its own.

        Raises:
            EpisodeError: some are not; the message names the policy and the comparison group.
        """
        if not self._trained:
            return
        for policy, generated in self._keys.items():
            own = [sample for sample in samples if policy_of(sample.group, self._trained) == policy]
            if strange := _beyond(_joined(map(_keys_of, own)), _joined(generated)):
                groups = ", ".join(sorted({repr(sample.group) for sample in own}))
                whose = f"policy {policy!r}" if policy else "the run's own policy"
                raise EpisodeError(
                    f"the agent returned samples of {whose} (comparison group {groups}) with {strange} tokens that "
                    "this policy did not generate in the rollout: return the samples of each policy as "
                    "client.policy(name).samples(reward) made them"
                )


def _keys(tokens: ArrayLike, versions: ArrayLike, logprobs: ArrayLike) -> _Keys:
    """Return one number for each token, its version and its log-probability in float32."""
    ids, bits = np.asarray(tokens, np.uint64), np.asarray(logprobs, np.float32).view(np.uint32)
    return (ids << np.uint64(32) | bits) ^ (np.asarray(versions, np.int64).astype(np.uint64) * _VERSION_FACTOR)


def _keys_of(sample: Sample) -> _Keys:
    drawn = sample.loss_mask.astype(bool)
    return _keys(sample.tokens[drawn], sample.versions[drawn], sample.behave_logprobs[drawn])


def _joined(keys: Iterable[_Keys]) -> _Keys:
    return np.concatenate([np.zeros(0, np.uint64), *keys])


def _beyond(given: _Keys, known: _Keys) -> int:
    """Return how many of `given` are not among `known`, each of which counts once."""
    keys, wanted = np.unique(given, return_counts=True)
    of_known, there = np.unique(known, return_counts=True)
    indices = np.searchsorted(of_known, keys)
    found = np.zeros_like(wanted)
    inside = indices < len(of_known)
    same = np.flatnonzero(inside)[of_known[indices[inside]] == keys[inside]]
    found[same] = there[indices[same]]
    return int(np.maximum(wanted - found, 0).sum())
