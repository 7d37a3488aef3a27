"""Rewards for length, in tokens that the policy generated. `weight` scales them.

DAPO's soft over-long punishment is reward shaping: `rollout.shaping=[{name: overlong, ...}]`.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.api import Episode, run_in


@run_in("loop")
def truncated_penalty(episode: Episode) -> float:
    """-1 for an answer that was cut off by a length limit, else 0."""
    return -1.0 if episode.truncated else 0.0


@run_in("loop")
def length_penalty(episode: Episode, *, per_token: float, free_tokens: int = 0) -> float:
    """`-per_token` for each token beyond `free_tokens`."""
    return -per_token * max(0, episode.generated_tokens - free_tokens)


@run_in("loop")
def shorter_in_group(group: Sequence[Episode], *, right_from: float = 1.0) -> list[float]:
    """From 0.5 for the group's shortest answer down to -0.5 for its longest; a wrong answer never gains.

    Kimi k1.5's length reward (arXiv:2501.12599, section 2.3.3): λ = 0.5 - (length - min) / (max - min); λ for right
    answers, min(0, λ) for others, 0 where all have one length.

    Args:
        group: a prompt's samples.
        right_from: reward of the environment from which on an answer counts as right.
    """
    lengths = [episode.generated_tokens for episode in group]
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(group)
    gains = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [gain if e.reward >= right_from else min(0.0, gain) for e, gain in zip(group, gains, strict=True)]
