"""Totals of the surviving history of a ledger, for checks of the run's other files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from asyncrl.comm.ended_rollouts import RolloutCounts, RunSettings, Trained
from asyncrl.data.prompt_queue import epoch_of


@dataclass(slots=True)
class StepTotals:
    """Sums over the trained lines of a step."""

    samples: int = 0
    episodes: int = 0
    tokens: int = 0
    reward: float = 0.0
    """Sum over episodes."""
    ages: float = 0.0
    """Sum over the tokens within max_head_offpolicyness, of which there are `young_tokens`."""
    young_tokens: int = 0
    oldest_age: int = 0
    newest_epoch: int = 0
    policy_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of the samples of each trained policy, if there are several."""
    whole_tokens: int | None = 0
    """Tokens including those of prompts and environments; None if a rollout has no line that it is finished."""

    def add(self, line: Trained, whole_tokens: int | None, eta: int | None) -> None:
        """Add a trained line.

        Args:
            whole_tokens: all tokens of the rollout; None if it has no line that it is finished.
            eta: max_head_offpolicyness; None if unknown.
        """
        self.samples += line.samples
        self.tokens += sum(line.versions.values())
        self.episodes += line.episodes
        self.reward += line.reward * line.episodes
        for policy, share in line.policies.items():
            self.policy_tokens[policy] += share.trained
        self.newest_epoch = max(self.newest_epoch, epoch_of(line.prompt))
        for version, count in line.versions.items():
            if eta is not None and 0 <= (age := line.step - 1 - version) <= eta:
                self.ages += age * count
                self.young_tokens += count
                self.oldest_age = max(self.oldest_age, age)
        if whole_tokens is None or self.whole_tokens is None:
            self.whole_tokens = None
        else:
            self.whole_tokens += whole_tokens


@dataclass(slots=True)
class Outcome:
    """Result of replaying the history."""

    version: int = 0
    """The last step."""
    ended: bool = False
    """True if the last launch ended by itself."""
    summed_up: bool = False
    """True if the last launch left a summary, which is written after the end of the ledger."""
    submitted: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    abandoned: int = 0
    live: int = 0
    lost: int = 0
    """Number of rollouts that were live when a launch ended without an `end` line."""
    lineages: int = 0
    settings: RunSettings | None = None
    steps: dict[int, StepTotals] = field(default_factory=dict)
    used: list[str] = field(default_factory=list)
    """Prompts trained or dropped for good, in that order."""
    rollouts: dict[str, Trained] = field(default_factory=dict)
    """Trained lines by rollout."""
    tokens: dict[str, int] = field(default_factory=dict)
    """All tokens of each finished rollout."""
    counts_at: dict[int, RolloutCounts] = field(default_factory=dict)
    """By step, the books in its line."""
    begun: int = 0
    """The version at which the last lineage began."""
    steps_of_launch: int = 0
    """Steps of the last launch."""
    admitted: bool = False
    """True if a rollout was admitted to a worker, not read from kept samples."""
    whole: bool = True
    """True if the ledger has the run's whole history."""

    @property
    def is_over(self) -> bool:
        """True if the last launch ended by itself, according to the ledger or, if that is cut off, to the summary."""
        return self.ended or self.summed_up
