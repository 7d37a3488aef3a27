"""How many rollouts that ended are remembered by id, so that a late or repeated message about them is known as such."""

from __future__ import annotations

AT_LEAST = 65_536
"""At 2,000 rollouts a second, half a minute, which is longer than a client repeats one call; some 10 MB."""
LIVES = 4


def ids_remembered(batch_size: int, max_staleness: int) -> int:
    """Ids to remember where `(max_staleness + 1) * batch_size` rollouts may be under way.

    All of them may leave the count at once, their workers being cut off, and come back; as may those that took their
    places. So several times as many are remembered as live, whatever their number is.
    """
    return max(AT_LEAST, LIVES * (max_staleness + 1) * batch_size)
