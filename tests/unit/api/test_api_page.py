"""docs/api.md, made from the signatures and docstrings of `asyncrl.api`, `asyncrl.run` and `asyncrl.load_run`."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncrl
import asyncrl.api

PAGE = Path(__file__).resolve().parents[3] / "docs" / "api.md"
HEAD = """# Python interfaces

This page is for whoever writes an agent, an environment, a reward or a tool, and looks a name up. `asyncrl.run` and
`asyncrl.load_run` are described with examples in [runs from Python](python_api.md); all other names are imported from
`asyncrl.api`, which loads no torch.

"""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
ANNOTATION = re.compile(r"(: |-> )'([^']*)'")


def told(thing: Any) -> str:
    """Return the docstring, in which a generic parameter such as <step> is no HTML."""
    text = inspect.getdoc(thing) or ""
    return re.sub(r"^(\w[\w ]*):$", r"**\1:**\n", text, flags=re.MULTILINE).replace("<", "&lt;")


def signature(name: str, thing: Any) -> str:
    try:
        found = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return name
    return ANNOTATION.sub(r"\1\2", ADDRESS.sub("", f"{name}{found}"))


def block(code: str) -> str:
    return f"```text\n{code}\n```\n\n"


def members(kind: type) -> Iterator[str]:
    for name, member in vars(kind).items():
        if name.startswith("_") or (issubclass(kind, enum.Enum) and not inspect.isfunction(member)):
            continue
        if isinstance(member, property):
            yield f"### {kind.__name__}.{name}\n\n{told(member)}\n\n"
        elif inspect.isfunction(member) or isinstance(member, classmethod | staticmethod):
            called = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            start = "async " if inspect.iscoroutinefunction(called) else ""
            yield f"### {kind.__name__}.{name}\n\n{block(start + signature(name, called))}{told(called)}\n\n"


def section(name: str, thing: Any) -> str:
    if not isinstance(thing, type):
        if not inspect.isroutine(thing):
            return f"## {name}\n\n{block(f'{name} = {thing}')}"
        return f"## {name}\n\n{block(signature(name, thing))}{told(thing)}\n\n"
    if issubclass(thing, enum.Enum):
        values = "\n".join(f"- `{each.value}`" for each in thing)
        return f"## {name}\n\n{told(thing)}\n\n{values}\n\n" + "".join(members(thing))
    shown = "" if getattr(thing, "_is_protocol", False) else block(signature(name, thing))
    return f"## {name}\n\n{shown}{told(thing)}\n\n" + "".join(members(thing))


def page() -> str:
    names = {f"asyncrl.{name}": getattr(asyncrl, name) for name in ("run", "load_run")}
    names |= {name: getattr(asyncrl.api, name) for name in asyncrl.api.__all__}
    text = HEAD + "".join(section(name, thing) for name, thing in names.items())
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def test_the_page_is_what_the_code_says() -> None:
    made, before = page(), PAGE.read_text() if PAGE.exists() else ""
    if made != before:
        PAGE.write_text(made)
    assert made == before, "docs/api.md was not made from the code; it has been made anew: look at it, commit it"
