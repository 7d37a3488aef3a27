"""Assignment of pushers to pullers, for any number of either.

The larger side is dealt out over the smaller in turn. With at least as many pushers as pullers, every pusher has one
puller and the pullers' loads differ by at most one; with fewer, every puller has one pusher and the pushers' shares
differ by at most one. So no puller is left without data.

    group(["a", "b", "c"], ["P"])         {"a": ("P",), "b": ("P",), "c": ("P",)}
    group(["a", "b", "c"], ["P", "Q"])    {"a": ("P",), "b": ("Q",), "c": ("P",)}
    group(["a"], ["P", "Q"])              {"a": ("P", "Q")}

The result depends only on who is present, so every pusher computes its own share and all agree. Keeping more of the
previous assignment when somebody comes or goes would need agreement on what that was: two pushers that saw the others
arrive in different orders could leave a puller without any.
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
