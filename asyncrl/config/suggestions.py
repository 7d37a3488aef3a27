"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SIMILAR = 0.6
"""Least similarity, by `difflib.SequenceMatcher.ratio`, of a suggestion among a few names."""
_SIMILAR_SETTING = 0.75
"""Least similarity of a suggestion among all settings; with that many names, some are always slightly similar."""
_SAME_WORD = 0.9
"""Least similarity of two last parts that count as the same word, such as a singular and its plural."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `, did you mean 'x'?` with the most similar of `names`; an empty string if none is similar."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=_SIMILAR)
    return f", did you mean {close[0]!r}?" if close else ""


def nearest_setting(name: str, settings: Iterable[str]) -> str | None:
    """Return the setting that is probably meant by `name`; None if none is similar. Candidates, in order:

    1. A setting with the same last part (`lr`: `optimizer.lr`; `steps`: `total_train_steps`), or with nearly the same
       last part in the group that `name` gives (`eval.rewards`: `eval.reward`). Among several, the setting with the
       most similar group is chosen, then the shallowest, then the first.
    2. A setting that has all words of the last part (`batch_size`: `train_batch_size`).
    3. A setting with a similar spelling; `.` and `_` are the same here (`model_path`: `model.path`).
    """
    group, _, leaf = name.rpartition(".")
    flat, words = name.replace(".", "_"), set(leaf.split("_"))

    def distance(path: str) -> tuple[float, ...]:
        own_group, _, own_leaf = path.rpartition(".")
        depth, flat_path = path.count("."), path.replace(".", "_")
        ends_so = not group and not own_group and own_leaf.endswith(f"_{leaf}")
        slip = group == own_group != "" and _similarity(leaf, own_leaf) >= _SAME_WORD
        if own_leaf == leaf or flat_path == flat or ends_so or slip:
            return 0, -_similarity(group, own_group) if group else 0, depth
        similarity = max(_similarity(flat, flat_path), _similarity(leaf, own_leaf))
        if len(leaf) > 2 and words <= set(own_leaf.split("_")):
            return 1, depth, -similarity
        return (2, -similarity, depth) if similarity >= _SIMILAR_SETTING else (3,)

    best = min(settings, key=distance, default=None)
    return best if best is not None and distance(best) < (3,) else None


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
