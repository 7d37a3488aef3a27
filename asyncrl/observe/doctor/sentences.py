"""Parts of sentences that the rules on speed share."""

from __future__ import annotations

from asyncrl.observe.doctor.finding import Finding, Level
from asyncrl.observe.doctor.measured import Measured


def bottleneck(
    m: Measured, kind: str, title: str, sentence: str, advice: str, at_best_s: float | None = None
) -> Finding:
    """Return the finding that a stage sets the pace; `at_best_s`: seconds of a step without it, None if unknown."""
    return Finding(kind, Level.bottleneck, title, sentence, advice, m.step_s, at_best_s)


def waits(m: Measured) -> str:
    """Return text on how long the trainer waits for rollouts."""
    return f"training waits for rollouts {percent(m.wait)} of the time ({m.wait_s:.2f} of {m.step_s:.2f} s a step)"


def percent(share: float) -> str:
    """Return `share` as text in percent."""
    return f"{100 * share:.0f} %"
