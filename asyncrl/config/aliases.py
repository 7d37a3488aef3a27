"""What is meant by an unknown name of a setting: one of another system, an earlier one, or a misspelt one.

The table of names in other systems is `aliases.yaml`. It serves error messages about unknown settings, and
docs/coming_from.md; its earlier names also the folders of runs that earlier versions made.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.comm.typed import decode_yaml
from asyncrl.config.values import fit, place, read_typed, text_of


class Alias(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One name in other systems.

    Attributes:
        theirs: the name, or its last parts: `rollout.n` also matches `actor_rollout_ref.rollout.n`.
        of: the systems that use the name.
        ours: asyncrl's setting; empty if there is none. With a value (`trainer.engine=sharded`) it is what the name
            means when it is switched on. `{value}` stands for the user's value, `{rest}` for one minus it.
        note: the difference in meaning, or what to do instead, with the same places.
        values: asyncrl's settings by values of the name; empty text: leave it out. Others are not translated.
    """

    theirs: str
    of: str
    ours: str = ""
    note: str = ""
    values: Mapping[str, str] = {}


class AliasTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `aliases.yaml`.

    Attributes:
        renamed: current names of renamed settings, by their names in earlier versions.
        notes: notes that several aliases share.
        values: likewise, their `values`.
        aliases: the names of other systems.
    """

    renamed: Mapping[str, str]
    notes: Mapping[str, str]
    values: Mapping[str, Mapping[str, str]]
    aliases: Sequence[Alias]


@cache
def table() -> AliasTable:
    """Return the table, which is read once."""
    return decode_yaml(Path(__file__).with_name("aliases.yaml").read_bytes(), AliasTable)


def under_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested settings of a run, whose version may have had other names for some, by their current names."""
    made = copy.deepcopy(dict(settings))
    for earlier, name in table().renamed.items():
        *groups, last = earlier.split(".")
        group: Any = made
        for each in groups:
            group = group.get(each) if isinstance(group, dict) else None
        if isinstance(group, dict) and last in group:
            place(made, name.split("."), group.pop(last))
    return made


def elsewhere(name: str) -> list[Alias]:
    """Return the aliases that `name` equals or ends with, after a dot; of several, those with the most parts."""
    fitting = [alias for alias in table().aliases if name == alias.theirs or name.endswith(f".{alias.theirs}")]
    most = max((alias.theirs.count(".") for alias in fitting), default=0)
    return [alias for alias in fitting if alias.theirs.count(".") == most]


def unknown_setting(name: str, known: Mapping[str, Any], where: str, value: Any) -> str:
    """Return the error message about `name`, which is none of the settings `known`."""
    if (now := table().renamed.get(name)) is not None:
        return f"unknown setting {name!r}{where}; it was renamed to {now!r}"
    if aliases := elsewhere(name):

        def fits(setting: str, text: str) -> bool:
            wrong: list[str] = []
            fit(setting, read_typed(text, known[setting]), known[setting], wrong)
            return not wrong

        hints = "; or ".join(answer(alias, text_of(value), fits) for alias in aliases)
        return f"unknown setting {name!r}{where}; {hints} (docs/coming_from.md)"
    nearest = nearest_setting(name, known)
    hint = f"did you mean {nearest!r}? " if nearest else ""
    return f"unknown setting {name!r}{where}; {hint}--help lists all of them"


_OFF = ("false", "off", "no", "none", "null", "disabled", "0", "0.0", "")


def answer(alias: Alias, value: str, fits: Callable[[str, str], bool]) -> str:
    """Return the part of an error message that explains an unknown setting, which was set to `value`.

    Args:
        fits: returns True if a setting of asyncrl's takes a value.
    """
    setting, fixed, _ = alias.ours.partition("=")
    chosen = alias.values.get(value.lower()) if value else None
    is_template = "{value}" in fixed or "{rest}" in fixed
    if alias.theirs == "allocation_mode" and (settings := allocation(value)):
        here = f"here {value} is {settings}"
    elif chosen == "" or (fixed and not is_template and chosen is None and value.lower() in _OFF):
        here = f"with {value} leave it out here"
    elif chosen:
        here = f"here it is {chosen!r}"
    elif not setting:
        here = "here there is no such setting"
    elif fixed:
        here = f"here it is {_filled(alias.ours, value)!r}"
    else:
        copied = value and not alias.values and "{value}" not in alias.note and fits(setting, value)
        here = f"here it is {f'{setting}={value}' if copied else setting!r}"
    note = (
        ""
        if here.startswith(("with ", f"here {value} is")) or chosen or ("{value}" in alias.ours and not value)
        else alias.note
    )
    return f"a name of {alias.of}; {here}" + (f": {_filled(note, value)}" if note else "")


def _filled(text: str, value: str) -> str:
    """Return `text` with the user's value, or a stand-in if there is none."""
    try:
        rest = f"{1 - float(value):.10g}"
    except ValueError:
        rest = "1 - VALUE"
    return text.replace("{value}", value or "VALUE").replace("{rest}", rest)


_ALLOCATION = re.compile(r"(?:sglang|vllm)[.:](\w+)\+(?:(?:fsdp|megatron|archon)[.:])?(\w+)")
_AXES = re.compile(r"([dtmpc])(\d+)")


def allocation(value: str) -> str | None:
    """Translate AReaL's `allocation_mode`, such as `sglang.d4m1p1+d2p1m1`, to our settings; None if it has no
    equivalent.

    The servers' layout comes first, in which `d` is their number; the trainer's layout comes after the `+`.
    """
    if (found := _ALLOCATION.fullmatch(value)) is None:
        return None
    parts = [_AXES.findall(part) for part in found.groups()]
    if ["".join(axis + size for axis, size in part) for part in parts] != list(found.groups()):
        return None
    servers, trainer = ({axis.replace("m", "t"): int(size) for axis, size in part} for part in parts)
    if servers.get("p", 1) > 1 or servers.get("c", 1) > 1:
        return None
    layout = "".join(f"{axis}{trainer[axis]}" for axis in "dctp" if trainer.get(axis, 1) > 1) or "d1"
    tensor = f" generation.sglang.tensor_parallel={servers['t']}" if servers.get("t", 1) > 1 else ""
    return f"trainer.parallel={layout} generation.servers={servers.get('d', 1)}{tensor}"


_SIMILAR_SETTING = 0.75
"""Least similarity of a suggestion among all settings; with that many names, some are always slightly similar."""
_SAME_WORD = 0.9
"""Least similarity of two last parts that count as the same word, such as a singular and its plural."""


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
