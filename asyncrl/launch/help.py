"""What `--help` and `--cfg job` print: the commands, the experiments, an experiment's settings.

The texts on settings are made from the settings' own definitions.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from dataclasses import fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from asyncrl.config.load import Config, experiment_folders, known_experiments
from asyncrl.config.secrets import without_secrets
from asyncrl.config.setting import SettingInfo, setting_info
from asyncrl.config.values import to_yaml
from asyncrl.launch.commands import USES, program

_PAGE = """\
{program} <experiment> [setting=value ...] [options]
{program} COMMAND --help

commands:
{commands}
(`asyncrl` and `python -m asyncrl.launch` are the same command)

options:
  --help             this page; with an experiment: its settings
  --cfg job          print the resolved config and stop
  --dry-run          print the processes a run would start and stop
  --show-allocation  print where each training rank goes and what memory it will need, and stop
  --show-graph [F]   print the training step's graph and stop, or write it to F as SVG
  --config-dir DIR   folder of your own experiments, beside the built-in ones
"""


def help_page(folder: Path | None) -> str:
    """Return the usage, and `list_experiments(folder)`.

    Raises:
        ConfigError: there is no such folder.
    """
    width = max(map(len, USES))
    commands = "\n".join(f"  {use:<{width}}  {what}" for use, what in USES.items())
    return _PAGE.format(program=program(), commands=commands) + list_experiments(folder)


def list_experiments(folder: Path | None) -> str:
    """Return every experiment with its one-line description: those of the user's `folder`, the built-in ones, recipes.

    Raises:
        ConfigError: there is no such folder.
    """
    *own, built_in, recipes = experiment_folders(folder)
    titles = {each: f"experiments in {each}" for each in own}
    titles[built_in] = "built-in experiments" if own else "experiments"
    titles[recipes] = "recipes: objectives of papers, games, examples of a feature, base models"
    known = {each: known_experiments(each) for each in titles}
    width = max((len(name) for names in known.values() for name in names), default=0)
    text = ""
    for each, title in titles.items():
        lines = [f"  {name:<{width}}   {summary}" for name, summary in known[each].items()]
        text += "\n".join(["", f"{title}:", *(lines or ["  none"]), ""])
    return text.rstrip("\n")


def experiment_help(name: str, config: Config) -> str:
    """Return every setting of the experiment with its value, by group."""
    lines = [f"{program()} {name} [setting=value ...]", ""]
    lines += _group_lines(config, "", "run")
    return "\n".join(lines)


def _group_lines(group: Any, prefix: str, title: str) -> list[str]:
    hints = get_type_hints(type(group))
    summary = (type(group).__doc__ or "").splitlines()[0]
    lines, nested = [f"{title}: {summary}"], []
    for item in fields(group):
        value, path = getattr(group, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            nested += _group_lines(value, f"{path}.", path)
        else:
            lines += _setting_lines(path, hints[item.name], value, setting_info(item))
    return [*lines, "", *nested]


def _setting_lines(path: str, kind: Any, value: Any, info: SettingInfo) -> list[str]:
    value = without_secrets(value, path)
    shown = "null" if value is None else repr(str(value)) if isinstance(value, str) else str(value)
    notes = [_type_name(kind)]
    if info.unit:
        notes.append(info.unit)
    is_enum = isinstance(kind, type) and issubclass(kind, StrEnum)
    if choices := list(kind) if is_enum else info.choices:
        notes.append("one of " + ", ".join(choices))
    if info.minimum is not None:
        notes.append(f"≥ {info.minimum:g}")
    if info.maximum is not None:
        notes.append(f"≤ {info.maximum:.10g}")
    if info.fixed:
        notes.append("cannot change once a trial has a checkpoint")
    return [f"  {path} = {shown}", f"      {info.help} ({'; '.join(notes)})"]


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Union:
        return " or ".join("null" if part is type(None) else _type_name(part) for part in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, str):
        return "str"
    return {dict: "mapping", list: "list"}.get(get_origin(kind), getattr(kind, "__name__", str(kind)))


def resolved_yaml(config: Config) -> str:
    """Return the resolved config as YAML; secrets are hidden."""
    return to_yaml(without_secrets(msgspec.to_builtins(config)))


def fitted(text: str) -> str:
    """Return `text` with lines as wide as the terminal at most; a continued line begins below the last column.

    Without a terminal the lines stay as they are.
    """
    width, lines = max(60, shutil.get_terminal_size((sys.maxsize, 24)).columns), list[str]()
    for line in text.splitlines():
        before = re.match(r" *(\S+( \S+)* {2,})?", line)
        indent = " " * (before.end() if before else 0)
        lines += textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return "\n".join(lines)
