"""Token ids in settings: `31744-31999,2`."""

from __future__ import annotations

import re

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
MOST_IDS = 1 << 20
"""Longest range; larger than any vocabulary."""


def token_ids(text: str) -> tuple[int, ...]:
    """Parse ids and inclusive ranges, separated by commas. Return the ids in ascending order; none for empty text.

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
