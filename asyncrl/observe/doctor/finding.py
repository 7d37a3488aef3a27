"""A finding of the doctor, and its text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto

PAGE = "docs/troubleshooting.md"


class Level(StrEnum):
    """Severity of a finding."""

    problem = auto()
    """Something is wrong: the run is stalled, learns nothing or loses data."""
    bottleneck = auto()
    """Nothing is wrong; this stage sets the pace."""
    notice = auto()
    """Worth knowing, nothing to do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding.

    Attributes:
        kind: name for scripts, and of the section in `PAGE`.
        title: the finding in a few words.
        sentence: the observation, with figures.
        advice: what to set, or where to look; may be empty.
        step_s: the run's seconds per step; None if unknown.
        at_best_s: seconds per step that the advice can reach at best; None if unknown.
    """

    kind: str
    level: Level
    title: str
    sentence: str
    advice: str = ""
    step_s: float | None = None
    at_best_s: float | None = None

    @property
    def link(self) -> str:
        """Link to the documentation of the finding."""
        return f"{PAGE}#{self.kind}"

    @property
    def gain(self) -> str:
        """Largest gain that the advice can bring; empty if it is unknown or small."""
        if self.step_s is None or self.at_best_s is None or self.at_best_s > 0.97 * self.step_s:
            return ""
        return f"At best: {self.step_s:.2f} → {self.at_best_s:.2f} s a step."

    def line(self) -> str:
        """Return the finding in one line."""
        parts = [f"{self.title}: {self.sentence}", self.advice, self.gain]
        return " ".join(part for part in parts if part)


def percent(share: float) -> str:
    """Return `share` as text in percent."""
    return f"{100 * share:.0f} %"
