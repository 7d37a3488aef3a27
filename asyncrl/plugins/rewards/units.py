r"""Words after an answer's number: a unit (`cm`, `dollars per hour`, `\text{ eggs}`), or words that change it."""

from __future__ import annotations

import itertools
import re

_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SHORT_UNITS = "cm|mm|km|kg|mg|ml|mL|L|dl|ft|in|yd|mi|lb|lbs|oz|hr|hrs|h|min|mins|sec|secs|ms|mph|km/h|am|pm|USD"
_SAME_UNITS = (
    "mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|in inch inche|ft foot feet|"
    "yd yard|mi mile|mg milligram|g gram|kg kilogram|oz ounce|lb pound|ml milliliter millilitre|l liter litre|"
    "s sec second|min minute|h hr hour|day|week|month|year|am a.m|pm p.m|cent|dollar usd|euro"
)
_UNIT_OF = {name: names.split()[0] for names in _SAME_UNITS.split("|") for name in names.split()}
_NO_UNITS = re.compile(
    r"\b(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|half|hal(?:f|ve)s|thirds?|fifths?|tenths?|hundredths?|thousandths?"
    r"|plus|minus|divided|multiplied|pi|sqrt|not|and an?)\b|^[^a-z]*(?:squared|cubed)\b",
    re.IGNORECASE,
)
"""Words after a number that change its value."""
_LAST_WORD = re.compile(r"\d[\s~]*(?:\\[ ,;!])?(?:\\(?:text|mathrm|textrm|mbox)\s*\{\s*)?([A-Za-z.]+)\s*\}?$")
_UNITS = re.compile(
    r"(?<=[\d.}%])\s*(?:"
    r"\^\s*(?:\{\s*)?\\circ(?:\s*\})?"  # degrees
    r"|(?:\\[ ,;!]|~)*\\(?:text|mathrm|textrm|mbox|textbf|mathbf)\s*\{[^{}\d=<>+*/^]*\}(?:\s*\^\s*\{?\s*\d\s*\}?)?"
    rf"|(?:{_SHORT_UNITS})\b(?:\s*\^\s*\{{?\s*\d\s*\}}?)?"
    r"|(?<=[\s])(?:[A-Za-z][A-Za-z'./-]+)(?:\s+(?:per\s+)?[A-Za-z][A-Za-z'./-]*)*"
    r")\s*$"
)


def says_more(text: str) -> bool:
    """True if a number is followed by words that change its value."""
    match = _UNITS.search(text)
    return match is not None and _NO_UNITS.search(match[0].replace("\\text", "")) is not None


def units_differ(given: str, expected: str) -> bool:
    """True if both end in known units that differ, as `3 am` and `3 pm`."""
    first, second = _known_unit(given), _known_unit(expected)
    return first is not None and second is not None and first != second


def without_unit(text: str) -> tuple[str, int]:
    """`text` without a unit after its number, and the factor that a word such as `thousand` there stands for."""
    match = _UNITS.search(text)
    if match is None or says_more(text):
        return text, 1
    words = re.findall(r"(?<!\\)\b[a-z]+", match[0].lower())
    if "percent" in words:
        return f"{text[: match.start()]}%", 1
    scale = 1
    for word in itertools.takewhile(_SCALES.__contains__, words):
        scale *= _SCALES[word]
    return text[: match.start()].strip(), scale


def _known_unit(text: str) -> str | None:
    match = _LAST_WORD.search(text)
    name = match[1].lower().rstrip(".") if match is not None else ""
    return _UNIT_OF.get(name) or _UNIT_OF.get(name.removesuffix("s"))
