"""Reasons for which rollouts are dropped, that is, leave the count without being trained. Also the reason of an
evaluation that has no result although nothing failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum, auto


class DropReason(StrEnum):
    """The system's own reasons; those of filters (`FilterDecision.reason`) have a name space of theirs (`filtered`)."""

    stale = auto()
    """Its oldest token is older than η allows; the prompt is tried again."""
    failed = auto()
    """The agent, the environment, the dataset or a server raised; see `failed_in`."""
    invalid_prompt = auto()
    """The row gives no prompt: it is empty, or the chat template refuses it."""
    overlong_prompt = auto()
    """The prompt is longer than `dataset.max_prompt_tokens`. It is left out according to the settings, and counted at
    the start.
    """
    timeout = auto()
    """It took longer than `rollout.rollout_timeout_s`."""
    agent_rejected = auto()
    """The agent returned no samples."""
    curriculum = auto()
    """The prompt was too easy or too hard and is left out of this epoch; see `dataset.curriculum`."""
    worker_died = auto()
    """Its RolloutWorker is gone."""
    crashed_worker = auto()
    """Its RolloutWorker died more than once while it ran the prompt. The prompt is not tried again."""


CUT_SHORT = "cut short by the end of the run"
"""The reason of an evaluation that had not ended when the run was stopped."""
FAILURES: dict[str, str] = {
    DropReason.invalid_prompt: "as their rows make no prompt",
    DropReason.failed: "in the agent, the environment, the dataset or a server",
    DropReason.timeout: "beyond rollout.rollout_timeout_s",
    DropReason.crashed_worker: "as their prompts end the RolloutWorker that plays them",
}
"""Reasons that someone has to look into. Each text continues the sentence "12 rollouts failed ..."."""


def failure(reason: str) -> str | None:
    """Return the message about rollouts dropped for `reason`; None if nobody has to look into the reason."""
    own, _, label = reason.partition(": ")
    return f"in {label}" if label and own == DropReason.failed else FAILURES.get(own)


_FILTER = "filter: "


def filtered(reason: str, *, exhausted: bool = False) -> str:
    """Return the drop reason of a group that a filter rejected for `reason`: `filter: zero_variance`; `exhausted`: its
    prompt may not be returned again.
    """
    return f"{_FILTER}{reason}_exhausted" if exhausted else _FILTER + reason


def failed_in(label: str | None) -> str:
    """Return the drop reason of a failed rollout; it names the user's code, if known: `failed: reward my.py:score`."""
    return DropReason.failed if label is None else f"{DropReason.failed}: {label}"


def is_filter_reason(reason: str) -> bool:
    """True if `reason` comes from a filter."""
    return reason.startswith(_FILTER)


LOST_EPISODES = "rollout/lost_episodes: "
"""Prefix of the metrics that count episodes dropped while the rest of their groups continued. The text after it names
what failed and how: `rollout/lost_episodes: env my.py:Game.step raised ValueError`.
"""


def lost_episodes(metrics: Mapping[str, float]) -> Counter[str]:
    """Return the number of lost episodes in `metrics`, by what failed."""
    begins = LOST_EPISODES
    lost = {name.removeprefix(begins): int(value) for name, value in metrics.items() if name.startswith(begins)}
    return Counter(lost)
