"""Received rollouts that will not be trained, and why."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.trainer.messages import RolloutRecord

STALE = "stale"
"""Drop reason: its oldest token is older than η allows; the prompt is tried again."""
DUPLICATE_PROMPT = "duplicate_prompt"
"""Drop reason: another rollout of the same prompt came first."""


@dataclass(frozen=True, slots=True)
class Drop:
    """A received rollout that will not be trained, and why."""

    record: RolloutRecord
    reason: str
    return_prompt: bool
