"""Commands and snippets of the README and of the pages: each is parsed, loaded or executed in this process.

Start commands go through their own parser, and their settings are loaded. Python blocks are compiled and executed, YAML
blocks are merged into the schema, JSON blocks are read, `pycon` blocks are run as doctests. `EXCEPTIONS` lists blocks
that cannot be executed here. Experiments of the tutorials pass `doctor EXPERIMENT`, which plays their first row.
"""

from __future__ import annotations

import argparse
import doctest
import functools
import importlib
import itertools
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from omegaconf import DictConfig, OmegaConf

from asyncrl import launch
from asyncrl.commands import COMMANDS, doctor_experiment
from asyncrl.commands.init import write_project
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.trainer.supervised.settings import SFTConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TUTORIALS = [page for page in PAGES if page.name.startswith("tutorial_")]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:python -m asyncrl\.launch|make|python benchmarks/)[^`]*)`")
START = re.compile(r"(?:python -m asyncrl\.launch|(?:^|\s)asyncrl) (.*)")
END = re.compile(r"[|>&;]|\[")
"""Begins the word after a command: another command, or optional arguments that stand for others."""
PLACEHOLDERS = {"EXPERIMENT": "async_ppo"}
"""Names in texts that stand for an experiment of the reader's."""
EXCEPTIONS = {
    "run = asyncrl.run(": "starts a run",
    "run = asyncrl.load_run(": "reads a run of the reader's",
    'ds.dataset("~/.cache': "reads a run of the reader's",
    "from openai import": "needs a package that is no dependency",
    "request = GenerationRequest(": "two lines out of an agent's method",
}
"""Python blocks that are only compiled, by a text that is in them, and the reason."""


class Parsed(Exception):
    """A command line that its parser takes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self.arguments = arguments


@functools.cache
def fences_of(page: Path) -> list[tuple[str, str]]:
    """Language and text of each block of a page."""
    found: list[tuple[str, str]] = FENCE.findall(page.read_text(encoding="utf-8"))
    return found


def blocks_of(page: Path, *languages: str) -> list[str]:
    return [text for language, text in fences_of(page) if language in languages]


def lines_of(page: Path) -> Iterator[str]:
    """Lines of shell, and commands within the text."""
    for block in blocks_of(page, "bash", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.removeprefix("$ ")
    yield from INLINE.findall(re.sub(FENCE, "", page.read_text(encoding="utf-8")).replace("\n", " "))


def commands_of(page: Path) -> list[list[str]]:
    """Words after `python -m asyncrl.launch`, of each command of a page."""
    text = "\n".join(lines_of(page))
    found = []
    for match in START.finditer(text):
        words = match[1]
        rest = text[match.end() :]
        while words.count("'") % 2 and rest:  # a quoted argument goes on in the next line
            line, _, rest = rest.lstrip("\n").partition("\n")
            words += f" {line}"
        words = re.sub(r"<[^<>]*>", "EXPERIMENT", words)
        taken = itertools.takewhile(lambda word: not END.match(word), shlex.split(words, comments=True))
        found.append([PLACEHOLDERS.get(word, word) for word in taken if word != "..."])
    return found


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project that `init` writes, with the experiment `mine`, and the files of the tutorials."""
    folder = tmp_path_factory.mktemp("docs") / "project"
    write_project(folder)
    for page in TUTORIALS:
        for block in blocks_of(page, "python", "yaml"):
            name = re.match(r"# (\w+\.(?:py|yaml))\n", block)
            assert name is not None, f"{page.name}: the first line names the file: {block[:40]}"
            (folder / name[1]).write_text(block)
    return folder


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Arguments as the command's own parser takes them; SystemExit where it refuses."""
    if words[:1] and words[0] in COMMANDS:
        module = importlib.import_module(f"asyncrl.commands.{words[0]}")
        with pytest.raises(Parsed) as caught:
            module.main(list(words[1:]), "asyncrl")
        return caught.value.arguments
    return launch._parse(list(words), "asyncrl")


@functools.cache
def loaded(experiment: str, overrides: tuple[str, ...], folder: Path) -> None:
    load_experiment(experiment, overrides, folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_parsed_and_their_settings_loaded(
    page: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = commands_of(page)
    monkeypatch.chdir(project)

    def stops_after(parse: Any) -> Any:
        def first(self: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> NoReturn:
            raise Parsed(parse(self, argv))

        return first

    real = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_intermixed_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stops_after(real[0]))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_intermixed_args", stops_after(real[1]))
    for words in commands:
        arguments = parsed(words)
        experiment = getattr(arguments, "experiment", None)
        overrides = getattr(arguments, "overrides", [])
        if experiment and words[0] != "replay":
            loaded(experiment, tuple(overrides), project)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_and_targets_are_there(page: Path, project: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in lines_of(page):
        words = line.split()
        if words[:1] == ["make"] and len(words) > 1:
            assert words[1] in targets, line
        if words[:1] == ["python"] and len(words) > 1 and words[1].endswith(".py"):
            assert (ROOT / words[1]).exists() or (project / words[1]).exists(), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_is_compiled_and_executed(page: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    for number, block in enumerate(blocks_of(page, "python")):
        code = compile(block, f"{page.name}, python block {number}", "exec")
        if not any(text in block for text in EXCEPTIONS):
            exec(code, {"__name__": f"snippet_{number}"})


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.name)
def test_a_tutorials_experiment_passes_every_check_of_a_start(
    page: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    for block in blocks_of(page, "python"):
        exec(block, {"__name__": "script"})
    experiments = [block.partition("\n")[0] for block in blocks_of(page, "yaml")]
    assert experiments
    for name in experiments:
        assert doctor_experiment.main([name.removeprefix("# ").removesuffix(".yaml"), "--config-dir", "."], "") == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_and_json_are_loaded(page: Path) -> None:
    for block in blocks_of(page, "yaml"):
        supervised = page.name in ("sft.md", "preferences.md")
        given = OmegaConf.create(block)
        assert isinstance(given, DictConfig), block
        given.pop("defaults", None)
        OmegaConf.merge(OmegaConf.structured(SFTConfig if supervised else ExperimentConfig), given)
    for block in blocks_of(page, "json"):
        for line in block.splitlines():
            json.loads(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sessions_print_what_is_shown(page: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    session = "\n".join(blocks_of(page, "pycon"))
    test = doctest.DocTestParser().get_doctest(session, {}, page.name, str(page), 0)
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0


def test_every_kind_of_snippet_is_found_and_every_exception_is_used() -> None:
    assert sum(len(commands_of(page)) for page in PAGES) > 40
    for language in ("python", "yaml", "json", "pycon"):
        assert any(blocks_of(page, language) for page in PAGES), language
    python = [block for page in PAGES for block in blocks_of(page, "python")]
    assert [text for text in EXCEPTIONS if not any(text in block for block in python)] == []
