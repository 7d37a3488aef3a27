"""Pages of the site that are made from the code: settings, metrics, commands and Python interfaces.

    python docs/made_pages.py        # writes them beside this file; `make docs` does it before it builds the site

They are not committed: `--help`, the docstrings and `asyncrl/observe/metrics/glossary.yaml` say the same.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import asyncrl
import asyncrl.api
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import settings
from asyncrl.config.setting import SettingInfo
from asyncrl.launch.__main__ import main as launch
from asyncrl.launch.commands import COMMANDS
from asyncrl.observe.metrics.glossary import Metric, glossary

DOCS = Path(__file__).resolve().parent


def cell(text: str) -> str:
    """Return a text as it may stand in a cell of a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()


# --- settings -------------------------------------------------------------------------------------------------------

SETTINGS = """# Settings

For users who look for a setting: each with its default, its bounds and its meaning. `python -m
asyncrl.launch EXPERIMENT --help` prints the same with the values of an experiment, and `--cfg job` the resolved
configuration. On the command line a setting is `name=value`; in YAML, groups are nested.

**Values.** A setting of text is what was written, from the first character to the last: `trial_name=1.10`, `revision:
007` and `split: no` need no quotes. On the command line a value in brackets, braces or quotes is YAML
(`rollout.sampling.stop=["\\n\\n"]`, `agent.args={tries: 3}`). So in double quotes `\\n` is a newline, and without
quotes or in single ones it is two characters. In arguments of your code, which may have any type, numbers, `true`,
`false` and `null` are what YAML says; `on`, `off`, `yes` and `no` are refused without quotes, and `007`, dates and
times are texts. In Python values are taken as they are ([runs from Python](python_api.md)). Everywhere
`${optimizer.lr}` stands for another setting, `${oc.env:NAME}` for a variable of the environment, in a file `${here:}`
for its folder, and `\\${` for the characters.

"""


def shown(value: object) -> str:
    """Return a default as it is written on the command line."""
    text = str(value)
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    return f"`{cell(text)}`" if text else "empty"


def settings_page() -> str:
    """Every setting; defaults are those of the schema."""
    schema = ExperimentConfig()
    groups: dict[str, list[tuple[str, SettingInfo]]] = {}
    for path, _, info in settings(ExperimentConfig):
        groups.setdefault(path.rpartition(".")[0], []).append((path, info))
    lines = [SETTINGS]
    for group, each in groups.items():
        lines.append(f"## {group or 'The run'}\n\n| setting | default | meaning |\n|---|---|---|\n")
        for path, info in each:
            meaning = cell(info.help)
            if info.choices:
                meaning += f"; one of {', '.join(map(str, info.choices))}"
            if info.unit:
                meaning += f" ({info.unit})"
            bounds = [f"at least {info.minimum:.10g}"] if info.minimum is not None else []
            bounds += [f"at most {info.maximum:.10g}"] if info.maximum is not None else []
            lines.append(f"| `{path}` | {shown(attrgetter(path)(schema))} | {'; '.join([meaning, *bounds])} |\n")
        lines.append("\n")
    return "".join(lines)


# --- metrics --------------------------------------------------------------------------------------------------------

METRICS = """# Metrics

Look here for a number of a run that you do not know, or for the number that shows what is wrong. The page lists every
metric of `metrics.jsonl` with its unit, its meaning and its value in a healthy run. TensorBoard, Weights & Biases and
the dashboard have the same names; for Prometheus see [the dashboard](dashboard.md#prometheus).

A row of `metrics.jsonl` belongs to a train step. "Of the step" and "since the step before" mean the time between two
rows. A part in `<...>` differs: `eval/<set>/accuracy` is `eval/held_out/accuracy` if a set has the name `held_out`. The
last table lists the figures that processes write about themselves, every two seconds, into the folder `observed/` of
the run.

"""


def metrics_page() -> str:
    """Every metric and figure of the glossary."""
    known = glossary()
    parts = [
        _metrics(title, [metric for metric in known.metrics if metric.group == group])
        for group, title in known.groups.items()
    ]
    rows = [f"| `{each.name}` | {each.of} | {each.unit or '–'} | {each.meaning} |\n" for each in known.figures]
    figures = ["## Figures of processes\n\n| figure | of | unit | meaning |\n|---|---|---|---|\n", *rows]
    return "".join([METRICS, *parts, *figures])


def _metrics(title: str, metrics: list[Metric]) -> str:
    rows = [f"| `{each.name}` | {each.unit or '–'} | {each.meaning} | {each.healthy} |\n" for each in metrics]
    return "".join([f"## {title}\n\n| metric | unit | meaning | healthy |\n|---|---|---|---|\n", *rows, "\n"])


# --- commands -------------------------------------------------------------------------------------------------------

COMMANDS_PAGE = """# Commands

For users who look for a command or an option. All begin with `python -m asyncrl.launch`; if the package is
installed, `asyncrl` is the same. `COMMAND --help` prints what is here. Settings are on [their own page](settings.md).

"""
VARIANTS = {"doctor RUN": ["doctor", "/"], "doctor EXPERIMENT": ["doctor", "async_ppo"]}
"""Commands with more than one parser, and the arguments that lead to each."""


class _Found(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(arguments: list[str]) -> argparse.ArgumentParser:
    """Return the parser to which these arguments come first."""

    def found(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _Found(parser)

    if arguments[0] in COMMANDS:
        module = importlib.import_module(f"asyncrl.launch.commands.{arguments[0]}")
        call = functools.partial(module.main, arguments[1:], "python -m asyncrl.launch")
    else:
        call = functools.partial(launch, arguments)
    names = ("parse_args", "parse_known_args", "parse_intermixed_args", "parse_known_intermixed_args")
    with contextlib.ExitStack() as patched:
        for name in names:
            patched.enter_context(mock.patch.object(argparse.ArgumentParser, name, found))
        try:
            call()
        except _Found as reached:
            return reached.parser
    raise AssertionError(f"{arguments} reached no parser")


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or "--help" in action.option_strings:
            continue
        value = action.metavar or action.dest.upper()
        value = " ".join(value) if isinstance(value, tuple) else value
        if action.option_strings:
            name = action.option_strings[-1] + ("" if action.nargs == 0 else f" {value}")
        else:
            name = str(action.metavar or action.dest)
        notes = [cell((action.help or "") % (vars(action) | {"prog": parser.prog}))]
        if action.choices:
            notes.append(f"one of {', '.join(map(str, action.choices))}")
        default = action.default
        shown = not isinstance(default, int | float | str) or default in (False, "") or str(default) in notes[0]
        if action.option_strings and not shown:
            notes.append(f"default {cell(str(default))}")
        yield f"| `{name}` | {'; '.join(filter(None, notes))} |\n"


def commands_page() -> str:
    """Every command with its arguments, from its own parser."""
    named = {"EXPERIMENT [setting=value ...]": ["async_ppo"]}
    for command in COMMANDS:
        variants = {name: given for name, given in VARIANTS.items() if given[0] == command}
        named |= variants or {command: [command]}
    lines = [COMMANDS_PAGE]
    for name, arguments in named.items():
        parser = parser_of(arguments)
        lines.append(f"## {name}\n\n")
        if parser.description:
            lines.append(" ".join(parser.description.split()) + "\n\n")
        elif arguments == ["async_ppo"]:
            lines.append("Check an experiment and run it; without one, list the experiments.\n\n")
        if found := list(_arguments(parser)):
            lines += ["| argument | meaning |\n|---|---|\n", *found, "\n"]
    return "".join(lines)


# --- Python interfaces ----------------------------------------------------------------------------------------------

API = """# Python interfaces

This page is for whoever writes an agent, an environment, a reward or a tool, and looks a name up. `asyncrl.run` and
`asyncrl.load_run` are described with examples in [runs from Python](python_api.md); all other names are imported from
`asyncrl.api`, which loads no torch.

"""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
ANNOTATION = re.compile(r"(: |-> )'([^']*)'")


def _docstring(thing: Any) -> str:
    """The docstring, in which a generic parameter such as <step> is no HTML."""
    text = inspect.getdoc(thing) or ""
    return re.sub(r"^(\w[\w ]*):$", r"**\1:**\n", text, flags=re.MULTILINE).replace("<", "&lt;")


def _signature(name: str, thing: Any) -> str:
    try:
        found = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return name
    return ANNOTATION.sub(r"\1\2", ADDRESS.sub("", f"{name}{found}"))


def _code(text: str) -> str:
    return f"```text\n{text}\n```\n\n"


def _members(kind: type) -> Iterator[str]:
    for name, member in vars(kind).items():
        if name.startswith("_") or (issubclass(kind, enum.Enum) and not inspect.isfunction(member)):
            continue
        if isinstance(member, property):
            yield f"### {kind.__name__}.{name}\n\n{_docstring(member)}\n\n"
        elif inspect.isfunction(member) or isinstance(member, classmethod | staticmethod):
            called = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            start = "async " if inspect.iscoroutinefunction(called) else ""
            yield f"### {kind.__name__}.{name}\n\n{_code(start + _signature(name, called))}{_docstring(called)}\n\n"


def _section(name: str, thing: Any) -> str:
    if not isinstance(thing, type):
        if not inspect.isroutine(thing):
            return f"## {name}\n\n{_code(f'{name} = {thing}')}"
        return f"## {name}\n\n{_code(_signature(name, thing))}{_docstring(thing)}\n\n"
    if issubclass(thing, enum.Enum):
        values = "\n".join(f"- `{each.value}`" for each in thing)
        return f"## {name}\n\n{_docstring(thing)}\n\n{values}\n\n" + "".join(_members(thing))
    head = "" if getattr(thing, "_is_protocol", False) else _code(_signature(name, thing))
    return f"## {name}\n\n{head}{_docstring(thing)}\n\n" + "".join(_members(thing))


def api_page() -> str:
    """Signatures and docstrings of what a user imports."""
    names = {f"asyncrl.{name}": getattr(asyncrl, name) for name in ("run", "load_run")}
    names |= {name: getattr(asyncrl.api, name) for name in asyncrl.api.__all__}
    return API + "".join(_section(name, thing) for name, thing in names.items())


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "commands.md": commands_page,
    "api.md": api_page,
}


def made(name: str) -> str:
    """Return the text of a page."""
    return re.sub(r"\n{3,}", "\n\n", PAGES[name]()).rstrip("\n") + "\n"


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(made(name), encoding="utf-8")
