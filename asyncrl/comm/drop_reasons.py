"""Why a rollout leaves the count without being trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum, auto


class DropReason(StrEnum):
    """The system's own reasons; a filter that rejects a group adds its own (`FilterDecision.reason`)."""

    stale = auto()
    """Its oldest token is older than η allows; the prompt is tried again."""
    duplicate_prompt = auto()
    """Another rollout of the same prompt came first."""
    failed = auto()
    """The agent, the environment, the dataset or a server raised; see `failed_in`."""
    invalid_prompt = auto()
    """The row makes no prompt: it is empty, or the chat template refuses it."""
    overlong_prompt = auto()
    """It is longer than `dataset.max_prompt_tokens`: left out as the settings say, and counted at the start."""
    timeout = auto()
    """It took longer than `rollout.rollout_timeout_s`."""
    agent_rejected = auto()
    """The agent returned no samples."""
    curriculum = auto()
    """It rests in this epoch, as it was too easy or too hard; see `dataset.curriculum`."""
    worker_died = auto()
    """Its RolloutWorker is gone."""
    lost_with_manager = auto()
    """It ended after the GserverManager's last report to the MasterWorker, and the manager died; its prompt is tried
    again.
    """
    crashed_worker = auto()
    """Its RolloutWorker died with it in hand, more than once; the prompt is not tried again."""


FAILURES: dict[str, str] = {
    DropReason.invalid_prompt: "as their rows make no prompt",
    DropReason.failed: "in the agent, the environment, the dataset or a server",
    DropReason.timeout: "beyond rollout.rollout_timeout_s",
    DropReason.crashed_worker: "as their prompts end the RolloutWorker that plays them",
}
"""Reasons that somebody has to look into, and how a person is told of them: so many rollouts failed ..."""


def failure(reason: str) -> str | None:
    """Return the message about rollouts dropped for `reason`; None if nobody has to look into them."""
    own, _, label = reason.partition(": ")
    return f"in {label}" if label and own == DropReason.failed else FAILURES.get(own)


def exhausted(reason: str) -> str:
    """The reason of a group that a filter rejected for `reason`, whose prompt it would return once too often."""
    return f"{reason}_exhausted"


_OWN = frozenset(DropReason)


def failed_in(label: str | None) -> str:
    """The reason of a rollout that failed, in users' code where that is known: `failed: reward my.py:score`."""
    return DropReason.failed if label is None else f"{DropReason.failed}: {label}"


def is_filter_reason(reason: str) -> bool:
    """True if `reason` comes from a filter."""
    return reason.partition(":")[0] not in _OWN


LOST_EPISODES = "rollout/lost_episodes: "
"""Begins the metrics that count episodes which were given up while the rest of their groups went on; the name of what
failed, and how, follows: `rollout/lost_episodes: env my.py:Game.step raised ValueError`."""


def lost_episodes(metrics: Mapping[str, float]) -> Counter[str]:
    """By what failed, the episodes that `metrics` count as lost."""
    begins = LOST_EPISODES
    lost = {name.removeprefix(begins): int(value) for name, value in metrics.items() if name.startswith(begins)}
    return Counter(lost)
