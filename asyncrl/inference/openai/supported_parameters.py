"""Parameters of an API that are used, ignored or refused.

Every parameter of a request belongs to one of four kinds:

- *used*: a field of the API's Struct, which says its type.
- *ignored*: it does not change what the answer means (metadata, caching, tiers, hints).
- *neutral* in some values, which ask for nothing (`presence_penalty: 0`), and refused in others.
- unknown, or known and not supported: refused by name. A parameter that is silently left out would train an agent on
  other answers than it asked for.

`null` is the same as not given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from asyncrl.inference.openai.errors import ApiError, refused

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)


@dataclass(frozen=True)
class SupportedParameters(Generic[T]):
    """The parameters of one API.

    Attributes:
        used: the Struct that a request becomes.
        ignored: names that are left out.
        neutral: by name, the values that are left out; every other is refused.
        hints: by name, what to do instead.
    """

    used: type[T]
    ignored: frozenset[str] = frozenset()
    neutral: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)

    def read(self, body: bytes) -> T:
        """The request in `body`.

        Raises:
            ApiError: it is no JSON object, has a parameter that is refused, or one of a wrong type.
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
    """`value` as `kind`, which the request has at `where`.

    Raises:
        ApiError: it is none; names the field.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        found = _PATH.match(str(error))
        what, path = (found["what"], found["path"] or "") if found else (str(error), "")
        param = ".".join(part for part in (where, path) if part)
        raise ApiError(400, f"{param}: {what}" if param else what, param=param or None, code="invalid_value") from None
