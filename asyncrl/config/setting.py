"""One definition per setting: default, unit, choices, bounds and help live in the dataclass field that holds it.

A choice is a `StrEnum` whose members are named as in the settings. If each choice is a separate class or file, the
choices are the names in the registry or folder (`choices=`). Code compares with the enum's members, never with strings.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import StrEnum
from typing import Any

from asyncrl.config.secrets import hide

_KEY = "asyncrl.setting"
MOST_SEED = 2**31 - 1
"""Largest seed. Together with a number of 32 bits it fits into the 64 bits of torch's generators."""


class ConfigError(ValueError):
    """A setting is invalid. The message names the setting, the value and the fix. No process has started.

    Secrets in the message are hidden: it goes to terminals, notebooks and logs.
    """

    def __init__(self, message: str) -> None:
        super().__init__(hide(message))


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """Documentation and bounds of a setting."""

    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    fixed: bool = False


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    unit: str = "",
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    fixed: bool = False,
) -> Any:
    """Return a dataclass field with documentation and bounds.

    `minimum` and `maximum` are inclusive. `choices` are for strings; a field annotated with an enum has the enum's
    members. A `fixed` setting determines what a checkpoint means, so a trial with checkpoints cannot continue with
    another value.
    """
    info = SettingInfo(help=help, unit=unit, choices=choices, minimum=minimum, maximum=maximum, fixed=fixed)
    if factory is not None:
        return field(default_factory=factory, metadata={_KEY: info})
    return field(default=default, metadata={_KEY: info})


def setting_info(dataclass_field: Field[Any]) -> SettingInfo:
    """Return the `SettingInfo` of a field made by `setting`; an empty `SettingInfo` for a group of settings."""
    info = dataclass_field.metadata.get(_KEY)
    return info if isinstance(info, SettingInfo) else SettingInfo(help="")


def value_problems(path: str, value: object, info: SettingInfo) -> Iterator[str]:
    """Yield an error message for each bound of the setting `path` that `value` violates, or if it is not a choice."""
    if info.choices and value not in info.choices:
        yield not_a_choice(path, value, info.choices)
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{path}={value}: not a finite number; give one{f' ({info.unit})' if info.unit else ''}"
    elif isinstance(value, (int, float)):
        if info.minimum is not None and value < info.minimum:
            yield f"{path}={value}: below the least allowed value; use {_amount(info.minimum, info.unit)} or more"
        if info.maximum is not None and value > info.maximum:
            yield f"{path}={value}: above the greatest allowed value; use {_amount(info.maximum, info.unit)} or less"


def _amount(number: float, unit: str) -> str:
    """Return the number with its unit, in the singular for 1: `2 rollouts`, `1 rollout`, `0.01 s`."""
    return f"{number:.10g} {unit.removesuffix('s') if number == 1 and len(unit) > 2 else unit}".rstrip()


def group_problems(group: str, config: Any) -> Iterator[str]:
    """Yield the error messages of the settings that lie directly in the group `config`."""
    for item in fields(config):
        yield from value_problems(f"{group}.{item.name}", getattr(config, item.name), setting_info(item))


_SIMILAR = 0.6
"""Least similarity, by `difflib.SequenceMatcher.ratio`, of a suggestion among a few names."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `, did you mean 'x'?` with the most similar of `names`; an empty string if none is similar."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=_SIMILAR)
    return f", did you mean {close[0]!r}?" if close else ""


def not_a_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Return the message for a setting `name` whose `value` is not one of its `choices`."""
    choices = list(choices)
    hint = did_you_mean(str(value), choices) or ";"
    return f"{name}={value!r}: not a choice{hint} choose one of {', '.join(choices)}"


class Dtype(StrEnum):
    """Type of weights."""

    auto = "auto"
    """bfloat16 on GPUs, float32 on CPUs."""
    float32 = "float32"
    bfloat16 = "bfloat16"

    def on(self, device: str) -> Dtype:
        """Return the type in a process that computes on `device` (`cpu`, `cuda`, `cuda:1`); resolves `auto`."""
        if self is not Dtype.auto:
            return self
        return Dtype.bfloat16 if device.startswith("cuda") else Dtype.float32


class Device(StrEnum):
    """Device on which a process computes."""

    auto = "auto"
    """`cuda` if there is a GPU."""
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class ChoiceConfig:
    """A registered algorithm, or the import path of the user's own function, with its parameters."""

    name: str = setting("", "registered name, or import path `package.module:function` or `path/to/file.py:function`")
    params: dict[str, Any] = setting(help="keyword arguments of the function", factory=dict)


@dataclass
class PluginConfig:
    """A user's class or function, named by import path."""

    path: str = setting("", "import path `package.module:Name`, or a file `path/to/file.py:Name`")
    args: dict[str, Any] = setting(
        help="keyword arguments of the constructor (of the call, for a function)", factory=dict
    )


_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
MOST_IDS = 1 << 20
"""Longest range; larger than any vocabulary."""


def token_ids(text: str) -> tuple[int, ...]:
    """Parse a setting of token ids, `31744-31999,2`: ids and inclusive ranges, separated by commas. Return the ids in
    ascending order; none for empty text.

    Raises:
        ValueError: the text has another form, a range is empty or longer than `MOST_IDS`, or an id occurs twice.
    """
    found: list[int] = []
    for part in (part.strip() for part in text.split(",")) if text.strip() else ():
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is neither an id nor a range; write ids and ranges as in 31744-31999,2")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + MOST_IDS:
            raise ValueError(f"the range {part!r} is empty or too long; write the lower id first")
        found += range(first, last + 1)
    if len(set(found)) < len(found):
        raise ValueError("an id occurs twice; write each id once")
    return tuple(sorted(found))
