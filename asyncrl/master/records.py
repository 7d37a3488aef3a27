"""What the master knows of a rollout: ids, lengths, versions and rewards, never a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.manager.messages import DroppedRollout

STALE = "stale"
"""Drop reason: its oldest token is older than η allows; the prompt is tried again."""
DUPLICATE_PROMPT = "duplicate_prompt"
"""Drop reason: another rollout of the same prompt came first."""


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """Metadata of one received rollout of S samples.

    `oldest_version` and `newest_version` are over all generated tokens of the group (-1: nothing was generated).
    `version_tokens` counts the generated tokens by policy version. `worker` is the ModelWorker that holds the tensors.
    """

    rollout_id: str
    prompt_id: str
    order: int
    worker: int
    oldest_version: int
    version_tokens: Mapping[int, int]
    lengths: tuple[int, ...]
    generated: tuple[int, ...]
    rewards: tuple[float, ...]
    truncated: tuple[bool, ...]

    @classmethod
    def from_meta(cls, worker: int, meta: Mapping[str, Any]) -> RolloutRecord:
        """The record of one entry of a `poll_buffer` reply from ModelWorker `worker`."""
        return cls(
            rollout_id=meta["rollout_id"],
            prompt_id=meta["prompt_id"],
            order=meta["order"],
            worker=worker,
            oldest_version=meta["oldest_version"],
            version_tokens={int(version): count for version, count in meta["version_tokens"].items()},
            lengths=tuple(meta["lengths"]),
            generated=tuple(meta["generated"]),
            rewards=tuple(meta["rewards"]),
            truncated=tuple(bool(flag) for flag in meta["truncated"]),
        )

    @property
    def tokens(self) -> int:
        """Tokens of all samples, prompts included."""
        return sum(self.lengths)

    @property
    def generated_tokens(self) -> int:
        """Tokens that the policy generated."""
        return sum(self.generated)

    @property
    def newest_version(self) -> int:
        """Policy version of the newest generated token; -1 if nothing was generated."""
        return max(self.version_tokens, default=-1)


@dataclass(frozen=True, slots=True)
class Drop:
    """A received rollout that will not be trained, and why."""

    record: RolloutRecord
    reason: str
    return_prompt: bool

    @property
    def message(self) -> DroppedRollout:
        """What the manager is told of it."""
        return DroppedRollout(self.record.rollout_id, self.reason, self.return_prompt)
