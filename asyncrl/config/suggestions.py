"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SIMILAR = 0.6
"""Least similarity, by `difflib.SequenceMatcher.ratio`, of a suggestion among a few names."""
_SIMILAR_SETTING = 0.75
"""The same among all settings, of which there are so many that some are always a little alike."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`, did you mean 'x'?` for the one of `names` that `name` is probably a slip of; empty where none is near."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=_SIMILAR)
    return f", did you mean {close[0]!r}?" if close else ""


def nearest_setting(name: str, settings: Iterable[str]) -> str | None:
    """The setting that `name` is probably a slip of; None where none is near.

    A setting of the same last part is nearest (`lr`: `optimizer.lr`; `steps`: `total_train_steps`), of several the one
    whose group is most like what was written, then the shallowest, then the first. After those come settings that hold
    all the words of `name` (`batch_size`: `train_batch_size`), then those that are spelt like it; `.` and `_` are the
    same there (`model_path`: `model.path`).
    """
    group, _, leaf = name.rpartition(".")
    flat, words = name.replace(".", "_"), set(leaf.split("_"))

    def distance(path: str) -> tuple[float, ...]:
        own_group, _, own_leaf = path.rpartition(".")
        depth, flat_path = path.count("."), path.replace(".", "_")
        if own_leaf == leaf or flat_path == flat or (not group and not own_group and own_leaf.endswith(f"_{leaf}")):
            return 0, -_similarity(group, own_group) if group else 0, depth
        similarity = max(_similarity(flat, flat_path), _similarity(leaf, own_leaf))
        if len(leaf) > 2 and words <= set(own_leaf.split("_")):
            return 1, depth, -similarity
        return (2, -similarity, depth) if similarity >= _SIMILAR_SETTING else (3,)

    best = min(settings, key=distance, default=None)
    return best if best is not None and distance(best) < (3,) else None


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
