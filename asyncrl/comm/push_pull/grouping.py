"""Which pusher sends to which puller, for any number of either.

With N pushers and M pullers the larger side is dealt out over the smaller: for N >= M every pusher has one puller and
the pullers' loads differ by at most one; for N < M every puller has one pusher and the pushers' shares differ by at
most one, so no puller starves. When somebody leaves or joins, members stay where they are as far as balance allows.

Minimal movement: let q, r = divmod(larger, smaller). A balanced dealing has r hubs of q + 1 members and the rest of q.
Of the k_h members that hub h still has, at most its capacity can stay, so what stays is sum(min(k_h, capacity_h));
handing the r larger capacities to the hubs with the largest k_h maximises that sum, hence moves fewest.

    group(["a", "b", "c"], ["P"])                     {"a": ("P",), "b": ("P",), "c": ("P",)}
    group(["a", "b", "c"], ["P", "Q"], previous)      one of the three moves to Q
    group(["a"], ["P", "Q"], previous)                {"a": ("P", "Q")}

The result depends on the arguments alone, so every pusher can work out its own share. Pushers that saw members come and
go in another order may differ in `previous`; that costs balance, never a trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Groups = dict[str, tuple[str, ...]]
"""Pusher to its pullers, sorted."""


def group(
    pushers: Iterable[str], pullers: Iterable[str], previous: Mapping[str, Iterable[str]] | None = None
) -> Groups:
    """Deal pushers and pullers out to each other; without pullers every pusher has none."""
    pushers, pullers = sorted(set(pushers)), sorted(set(pullers))
    if not pullers or not pushers:
        return {pusher: () for pusher in pushers}
    edges = sorted((pusher, puller) for pusher, targets in (previous or {}).items() for puller in targets)
    if len(pushers) >= len(pullers):
        return {pusher: (puller,) for pusher, puller in _deal(pushers, pullers, dict(reversed(edges))).items()}
    hubs = _deal(pullers, pushers, {puller: pusher for pusher, puller in reversed(edges)})
    return {pusher: tuple(puller for puller in pullers if hubs[puller] == pusher) for pusher in pushers}


def _deal(members: list[str], hubs: list[str], previous: Mapping[str, str]) -> dict[str, str]:
    """Member to hub, balanced, keeping `previous` where it can."""
    staying: dict[str, list[str]] = {hub: [] for hub in hubs}
    for member in members:
        if previous.get(member) in staying:
            staying[previous[member]].append(member)
    size, larger = divmod(len(members), len(hubs))
    by_load = sorted(hubs, key=lambda hub: -len(staying[hub]))
    capacity = {hub: size + (rank < larger) for rank, hub in enumerate(by_load)}
    dealt = {member: hub for hub in hubs for member in staying[hub][: capacity[hub]]}
    places = [hub for hub in hubs for _ in range(capacity[hub] - len(staying[hub]))]
    moving = [member for member in members if member not in dealt]
    return dealt | dict(zip(moving, places, strict=True))
