"""Pages that are made from the code have every setting, metric, command and name."""

from __future__ import annotations

import re

import asyncrl.api
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import settings
from asyncrl.launch.commands import COMMANDS
from asyncrl.observe.metrics.glossary import glossary
from docs.made_pages import made, parser_of


def first_cells(page: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", made(page), re.MULTILINE)


def headings(page: str, level: int) -> list[str]:
    return re.findall(rf"^{'#' * level} (.+)$", made(page), re.MULTILINE)


def test_every_setting_has_its_row() -> None:
    assert sorted(first_cells("settings.md")) == sorted(path for path, _, _ in settings(ExperimentConfig))
    assert "| `max_head_offpolicyness` | `4` |" in made("settings.md")


def test_every_metric_and_figure_has_its_row() -> None:
    known = glossary()
    assert first_cells("metrics.md") == [
        *(metric.name for group in known.groups for metric in known.metrics if metric.group == group),
        *(figure.name for figure in known.figures),
    ]


def test_every_command_has_its_options() -> None:
    assert {heading.split()[0] for heading in headings("commands.md", 2)} == {"EXPERIMENT", *COMMANDS}
    options = [name for action in parser_of(["chaos"])._actions for name in action.option_strings[-1:]]
    assert len(options) > 3
    section = made("commands.md").partition("## chaos\n")[2].partition("\n## ")[0]
    assert [name for name in options if f"`{name}" not in section and name != "--help"] == []


def test_every_name_that_a_user_imports_has_its_section() -> None:
    assert headings("api.md", 2) == ["asyncrl.run", "asyncrl.load_run", *asyncrl.api.__all__]
