"""docs/commands.md, made from the commands' own argument parsers."""

from __future__ import annotations

import argparse
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.launch.__main__ import main
from asyncrl.launch.commands import COMMANDS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "commands.md"
HEAD = """# Commands

For users who look for a command or an option. All begin with `python -m asyncrl.launch`; if the package is
installed, `asyncrl` is the same. `COMMAND --help` prints what is here. Settings are on [their own page](settings.md).

"""
VARIANTS = {"doctor RUN": ["doctor", "/"], "doctor EXPERIMENT": ["doctor", "async_ppo"]}
"""Commands with more than one parser, and the arguments that lead to each."""


class Found(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    def found(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise Found(parser)

    if arguments[0] in COMMANDS:
        module = importlib.import_module(f"asyncrl.launch.commands.{arguments[0]}")
        call = functools.partial(module.main, arguments[1:], "python -m asyncrl.launch")
    else:
        call = functools.partial(main, arguments)
    with monkeypatch.context() as patched:
        for name in ("parse_args", "parse_known_args", "parse_intermixed_args", "parse_known_intermixed_args"):
            patched.setattr(argparse.ArgumentParser, name, found)
        with pytest.raises(Found) as caught:
            call()
    return caught.value.parser


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()


def rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or "--help" in action.option_strings:
            continue
        value = action.metavar or action.dest.upper()
        value = " ".join(value) if isinstance(value, tuple) else value
        if action.option_strings:
            name = action.option_strings[-1] + ("" if action.nargs == 0 else f" {value}")
        else:
            name = str(action.metavar or action.dest)
        notes = [plain((action.help or "") % (vars(action) | {"prog": parser.prog}))]
        if action.choices:
            notes.append(f"one of {', '.join(map(str, action.choices))}")
        default = action.default
        told = not isinstance(default, int | float | str) or default in (False, "") or str(default) in notes[0]
        if action.option_strings and not told:
            notes.append(f"default {plain(str(default))}")
        yield f"| `{name}` | {'; '.join(filter(None, notes))} |\n"


def page(monkeypatch: pytest.MonkeyPatch) -> str:
    named = {"EXPERIMENT [setting=value ...]": ["async_ppo"]}
    for command in COMMANDS:
        variants = {name: given for name, given in VARIANTS.items() if given[0] == command}
        named |= variants or {command: [command]}
    lines = [HEAD]
    for name, arguments in named.items():
        parser = parser_of(arguments, monkeypatch)
        lines.append(f"## {name}\n\n")
        if parser.description:
            lines.append(" ".join(parser.description.split()) + "\n\n")
        elif arguments == ["async_ppo"]:
            lines.append("Check an experiment and run it; without one, list the experiments.\n\n")
        if found := list(rows(parser)):
            lines += ["| argument | meaning |\n|---|---|\n", *found, "\n"]
    return "".join(lines).rstrip("\n") + "\n"


def test_the_page_has_every_command_and_option(monkeypatch: pytest.MonkeyPatch) -> None:
    made, before = page(monkeypatch), PAGE.read_text() if PAGE.exists() else ""
    if made != before:
        PAGE.write_text(made)
    assert made == before, (
        "docs/commands.md was not made from the commands; it has been made anew: look at it, commit it"
    )
