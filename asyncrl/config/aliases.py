"""Names of settings in other systems and in asyncrl, for users who know another system.

The table is `aliases.yaml`. It serves error messages about unknown settings, and docs/coming_from.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

from asyncrl.comm.typed import decode_yaml


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


def elsewhere(name: str) -> list[Alias]:
    """Return the aliases that `name` equals or ends with, after a dot; of several, those with the most parts."""
    fitting = [alias for alias in table().aliases if name == alias.theirs or name.endswith(f".{alias.theirs}")]
    most = max((alias.theirs.count(".") for alias in fitting), default=0)
    return [alias for alias in fitting if alias.theirs.count(".") == most]


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
