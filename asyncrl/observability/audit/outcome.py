"""What the surviving history of a ledger came to, for those who hold the run's other files against it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from asyncrl.comm.ledger_lines import RunSettings


@dataclass(slots=True)
class StepTotals:
    """What the trained lines of a step add up to."""

    rollouts: int = 0
    samples: int = 0
    episodes: int = 0
    tokens: int = 0
    reward: float = 0.0
    """Sum over episodes."""
    ages: float = 0.0
    """Sum over those tokens that are within max_head_offpolicyness, of which there are `young_tokens`."""
    young_tokens: int = 0
    oldest_age: int = 0
    whole_tokens: int | None = 0
    """Tokens with those of prompts and environments; None where a rollout was trained before it was told finished."""


@dataclass(slots=True)
class Outcome:
    """What the history came to."""

    version: int = 0
    """The last step."""
    ended: bool = False
    """Whether the last launch ended by itself."""
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    abandoned: int = 0
    live: int = 0
    lost: int = 0
    """Rollouts that were under way when a launch ended without a word."""
    lineages: int = 0
    settings: RunSettings | None = None
    steps: dict[int, StepTotals] = field(default_factory=dict)
    used: list[str] = field(default_factory=list)
    """Prompts trained or dropped for good, in the order in which they were."""
    used_at: dict[int, int] = field(default_factory=dict)
    """By the number of a checkpoint's line, how many of `used` there were."""
    whole: bool = True
    """Whether the ledger has all of the run's history."""
