"""Checks of rollouts with several policies: opponents' versions existed, each sample trains its own policy.

Three counts of a trained policy's tokens must agree. Kept samples have their policy in the name of their file.

- Generated: tokens from its servers for a rollout, which the RolloutWorker counts as answers arrive.
- Sampled: tokens of the rollout's samples that belong to it by their comparison groups.
- Trained: tokens that the ranks trained it on, in the row of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from asyncrl.comm.ended_rollouts import Trained
from asyncrl.verify.audit.outcome import StepTotals

OWN = "actor"
"""Name of the run's own policy."""


def wrong_opponents(line: Trained) -> Iterator[str]:
    """Yield a message for each opponent of a version that did not exist."""
    for policy, (oldest, newest) in line.opponents.items():
        if not 0 <= oldest <= newest < line.step:
            yield (
                f"rollout {line.rollout}, trained at step {line.step}, met versions {oldest} to {newest} of policy "
                f"{policy!r}: these versions did not exist then"
            )


def wrong_policies(line: Trained) -> Iterator[str]:
    """Yield a message for each policy that was trained on tokens that it did not generate."""
    if not line.policies:
        return
    for policy, share in line.policies.items():
        if share.trained > share.generated:
            yield (
                f"rollout {line.rollout} trains policy {policy!r} on {share.trained} tokens, and it generated "
                f"{share.generated} in it: samples of another policy"
            )
    trained, tokens = sum(share.trained for share in line.policies.values()), sum(line.versions.values())
    samples = sum(share.samples for share in line.policies.values())
    if (trained, samples) != (tokens, line.samples):
        yield (
            f"rollout {line.rollout} has {tokens} tokens in {line.samples} samples, and its policies {trained} in "
            f"{samples}"
        )


def wrong_row(row: Mapping[str, Any], totals: StepTotals) -> Iterator[str]:
    """Yield a message for each policy whose number of trained tokens differs from that of the step's rollouts.

    A policy that the step does not train (`train_every`) has no count in the row. Tokens that are too old count only in
    the ledger (`on_stale=mask`).
    """
    for policy, tokens in totals.policy_tokens.items():
        if policy == OWN or (told := row.get(f"policy/{policy}/tokens/trained")) is None:
            continue
        masked = totals.tokens - totals.young_tokens
        if not tokens - masked <= told <= tokens:
            yield f"step {row['step']} trained policy {policy!r} on {told:g} tokens, the ledger has {tokens}"


def head_and_policy(file: str) -> tuple[str, str]:
    """Return the writer and the policy of a file of kept samples: of `step-00000001.head-0-judge.parquet`, `head-0` and
    `judge`.
    """
    kind, _, rest = file.split(".")[1].partition("-")
    number, _, policy = rest.partition("-")
    return f"{kind}-{number}", policy or OWN


def strangers(groups: Collection[str], policy: str, policies: Collection[str]) -> list[str]:
    """Return the comparison groups of `groups` whose samples belong to another one of `policies`."""
    roles = {group: group.partition("/")[0] for group in groups}
    return sorted(group for group, role in roles.items() if (role if role in policies else OWN) != policy)
