"""Assignment of pushers to pullers, for any number of either.

With N pushers and M pullers the larger side is dealt out over the smaller in turn: for N >= M every pusher has one
puller and the pullers' loads differ by at most one; for N < M every puller has one pusher and the pushers' shares
differ by at most one. So no puller starves.

    group(["a", "b", "c"], ["P"])         {"a": ("P",), "b": ("P",), "c": ("P",)}
    group(["a", "b", "c"], ["P", "Q"])    {"a": ("P",), "b": ("Q",), "c": ("P",)}
    group(["a"], ["P", "Q"])              {"a": ("P", "Q")}

The result depends on who is there alone, so every pusher works out its own share, and all agree. To move as few as can
be when somebody comes or goes they would have to agree on what was before: two that saw the others come in another
order left a puller to nobody.
"""

from __future__ import annotations

from collections.abc import Iterable

Groups = dict[str, tuple[str, ...]]
"""Pusher to its pullers, sorted."""


def group(pushers: Iterable[str], pullers: Iterable[str]) -> Groups:
    """Deal pushers and pullers out to each other; without pullers every pusher has none."""
    pushers, pullers = sorted(set(pushers)), sorted(set(pullers))
    if not pushers or not pullers:
        return dict.fromkeys(pushers, ())
    dealt: dict[str, list[str]] = {pusher: [] for pusher in pushers}
    for turn in range(max(len(pushers), len(pullers))):
        dealt[pushers[turn % len(pushers)]].append(pullers[turn % len(pullers)])
    return {pusher: tuple(targets) for pusher, targets in dealt.items()}
