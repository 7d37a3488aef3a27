"""Which settings are secret: they are hidden wherever settings leave the run: trackers, pages, messages, output.

A value is secret by its name (`openai_key`, `--auth-token X`, `PASSWORD=...`), or by its shape (`sk-...`, a token of a
hub, `Bearer ...`, `https://user:password@host`). Settings have no list of secret ones, since arguments of a user's code
have any names.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
_LONGEST = 200
"""Characters of a value in a message."""


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_STRONG = _set(
    "apikey apitoken authorization authtoken bearer cookie cookies credential credentials jwt passcode passphrase "
    "passwd password passwords privatekey pwd secret secretkey secrets"
)
"""Words that make a name secret wherever they are in it."""
_ABOUT = _set(
    "bits bucket column columns count dir dtype env field file files folder format id ids index length len limit mode "
    "name names num number path policy prefix py size template type version"
)
"""Last words of names of something about a secret, such as its file."""
_PUBLIC_TOKENS = _set(
    "answer begin bos class cls decoder end eos eot image last first mask new next pad per prompt sep special start "
    "stop text think tool unk video"
)
_PUBLIC_KEYS = _set(
    "answer audio batch by cache column data dict extra field foreign group hash image images index info input json "
    "label lookup map message messages metric metrics num output partition primary problem prompt public question "
    "required response reward row sample score shard solution sort state target task text tool tools video"
)
_HOLDERS = _set("access anthropic api auth bearer gemini hf hub openai private refresh secret session")
"""Words before a plural that make it one of secrets: `api_keys`, `access_tokens`."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)", re.DOTALL)
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"sk[-_](?=[\w-]*[0-9A-Z_])[\w-]{16,}|rk_live_\w{16,}|gsk_\w{16,}|nvapi-[\w-]{16,}|r8_\w{16,}|xai-[\w-]{16,}"
    r"|hf_[A-Za-z0-9]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|npm_\w{16,}|pypi-[\w-]{16,}"
    r"|xox[abeprs]-[\w-]{10,}|xapp-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{16,}"
    r"|SG\.[\w-]{16,}\.[\w-]{16,}|wandb_v1_\w{16,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_WEBHOOK = re.compile(r"(https://(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/)[^\s\"']+")
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^\s/@\"']+(?:@[^\s/@\"']+)*)@")
_BEARER = re.compile(r"(?i)\b(bearer|negotiate)\s+[^\s\"',;]+")
_BASIC = re.compile(r"(?i)\b(basic)\s+([A-Za-z0-9+/]+=*)")
_ASSIGNED = re.compile(
    r"(?P<name>(?<![\w.-])-{0,2}[A-Za-z][\w.-]*)(?P<sign>=|[\"']\s*:\s*|:\s*)"
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s&;,\"'}\])]+)"
)
_FLAG = re.compile(r"(?P<name>(?<!\S)--?[A-Za-z][\w-]*)(?P<sign>\s+)(?P<value>\"[^\"]*\"|'[^']*'|[^\s-]\S*)")


def is_secret(name: str) -> bool:
    """Return True if a setting, argument, header or variable of this name holds a secret."""
    words = [word.lower() for word in _WORDS.findall(name.rpartition(".")[2])]
    if not words or words[-1] in _ABOUT:
        return False
    *before, last = words
    if _STRONG & set(words) or last in ("auth", "pat"):
        return True
    if last == "token":
        return not _PUBLIC_TOKENS & set(before)
    if last == "key":
        return bool(before) and not _PUBLIC_KEYS & set(before)
    return last in ("tokens", "keys") and bool(_HOLDERS & set(before))


def without_secrets(value: Any, name: str = "") -> Any:
    """Return the value of the setting `name` with every secret in it replaced by `HIDDEN`, at any depth."""
    if isinstance(value, Mapping):
        named = value.get("name", value.get("key"))  # {name: API_KEY, value: ...}
        return {
            key: without_secrets(each, name if is_secret(name) else str(named if key == "value" else key))
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        flags, pair = ["", *value], len(value) == 2  # ["--api-key", "..."], ["Authorization", "..."]
        return [
            without_secrets(each, str(flag) if isinstance(flag, str) and (pair or flag.startswith("-")) else name)
            if not is_secret(name)
            else without_secrets(each, name)
            for flag, each in zip(flags, value, strict=False)
        ]
    if value is None or isinstance(value, bool):
        return value
    if is_secret(name) and value != "" and (isinstance(value, str) or _STRONG & set(name.lower().split("_"))):
        return HIDDEN
    return hide(value) if isinstance(value, str) else value


def hide(text: str) -> str:
    """Return `text`, such as a command or a message, with every part replaced by `HIDDEN` that looks secret."""
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = _SHAPES.sub(HIDDEN, text)
    text = _WEBHOOK.sub(rf"\1{HIDDEN}", text)
    text = _USER.sub(_hide_user, text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    text = _BASIC.sub(lambda found: f"{found[1]} {HIDDEN}" if _is_login(found[2]) else found[0], text)
    for pattern in (_ASSIGNED, _FLAG):
        begin = 0
        while (found := pattern.search(text, begin)) is not None:
            begin = found.end("sign")  # within a value there may be another: url=https://host?token=...
            if _is_assigned(found):
                text = f"{text[:begin]}{HIDDEN}{text[found.end() :]}"
    return text


def shown(name: str, text: str) -> str:
    """Return the value of the setting `name` for a message: without secrets, and not longer than a line or two."""
    text = str(without_secrets(text, name))
    return repr(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


def _hide_user(found: re.Match[str]) -> str:
    """Hide user and password of an address; a user alone is one, except over http, where it is a token."""
    is_secret = ":" in found[2] or found[1].lower() in ("http://", "https://")
    return f"{found[1]}{HIDDEN}@" if is_secret else found[0]


def _is_login(text: str) -> bool:
    """Return True if `text` is base64 of `user:password`."""
    try:
        return b":" in base64.b64decode(text)
    except ValueError:
        return False


def _is_assigned(found: re.Match[str]) -> bool:
    """Return True if a secret name is followed by its value, in a command, an address, a mapping or a header."""
    name, sign = found["name"], found["sign"]
    if sign.startswith(":"):  # not in a sentence or an import path
        before = found.string[: found.start()].rstrip()[-1:]
        if not ("-" in name or (before in ("", "{", ",", "[", "(") and sign != ":")):
            return False
    return not found["value"].lstrip("\"'").startswith(HIDDEN[:7]) and is_secret(name)
