"""One definition per setting: default, unit, choices, bounds and help live in the dataclass field that holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field
from typing import Any

_KEY = "asyncrl.setting"


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """What is known of a setting beside its type and default."""

    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    unit: str = "",
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A dataclass field that carries its documentation and bounds.

    `minimum` and `maximum` are inclusive. `choices` apply to strings.
    """
    info = SettingInfo(help=help, unit=unit, choices=choices, minimum=minimum, maximum=maximum)
    if factory is not None:
        return field(default_factory=factory, metadata={_KEY: info})
    return field(default=default, metadata={_KEY: info})


def setting_info(dataclass_field: Field[Any]) -> SettingInfo:
    """The `SettingInfo` of a field made by `setting`; an empty one for a group of settings."""
    info = dataclass_field.metadata.get(_KEY)
    return info if isinstance(info, SettingInfo) else SettingInfo(help="")
