"""Parameters of an API that are used, ignored or refused.

Every parameter of a request belongs to one of four kinds:

- *used*: a field of the API's Struct, which has its type.
- *ignored*: it does not change the meaning of the answer (metadata, caching, tiers, hints).
- *neutral* for values that request nothing (`presence_penalty: 0`), and refused for others.
- unknown, or known and not supported: refused by name. If a parameter were silently left out, an agent would be trained
  on other answers than it asked for.

`null` means the same as a missing parameter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import msgspec

from asyncrl.comm import typed
from asyncrl.inference.openai.api_errors import ApiError, refused

T = TypeVar("T", bound=msgspec.Struct)

IGNORED_BY_OPENAI: Final = frozenset(
    (
        "store",
        "user",
        "safety_identifier",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    )
)
"""Parameters that are left out in both of OpenAI's APIs."""

_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)


@dataclass(frozen=True)
class SupportedParameters(Generic[T]):
    """The parameters of one API.

    Attributes:
        used: the Struct of a request.
        ignored: names that are left out.
        neutral: for each name, the values that are left out; every other value is refused.
        hints: for each name, what to do instead.
    """

    used: type[T]
    ignored: frozenset[str] = frozenset()
    neutral: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)

    def read(self, body: bytes) -> T:
        """Return the request in `body`.

        Raises:
            ApiError: it is not a JSON object, or a parameter is refused or has the wrong type.
        """
        try:
            given = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
        if not isinstance(given, dict):
            raise ApiError(400, "the body is not a JSON object", code="invalid_json")
        known = {each.encode_name for each in msgspec.structs.fields(self.used)}
        kept = {}
        for name, value in given.items():
            if value is None or name in self.ignored:
                continue
            if name in known:
                kept[name] = value
            elif name not in self.neutral or value not in self.neutral[name]:
                why = "not supported" if name in self.neutral or name in self.hints else "no such parameter here"
                hint = self.hints.get(name, "leave it out")
                raise refused(name, value, f"{why}; {hint}")
        return convert(kept, self.used)


def convert(value: Any, kind: type[T], where: str = "") -> T:
    """Convert `value`, which the request has at `where`, to `kind`.

    Raises:
        ApiError: it is not of that kind; the message names the field.
    """
    try:
        return typed.convert(value, kind)
    except msgspec.ValidationError as error:
        found = _PATH.match(str(error))
        what, path = (found["what"], found["path"] or "") if found else (str(error), "")
        param = ".".join(part for part in (where, path) if part)
        raise ApiError(400, f"{param}: {what}" if param else what, param=param or None, code="invalid_value") from None
