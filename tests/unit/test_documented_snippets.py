"""Commands and snippets of the README and of the pages: each is parsed, loaded or executed in this process.

Start commands go through their own parser, their settings are loaded, and with `--dry-run` they pass the checks that
need no process; commands that read a run are executed on one by `tests/e2e/test_kept_samples.py`. Python blocks are
compiled and executed, YAML blocks are merged into the schema, JSON blocks are read, `pycon` blocks are run as doctests.
`EXCEPTIONS` lists blocks that cannot be executed here. Experiments of the tutorials pass `doctor EXPERIMENT`, which
plays their first row.
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
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from omegaconf import DictConfig, OmegaConf

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.launch import __main__ as launch
from asyncrl.launch.commands import COMMANDS
from asyncrl.launch.commands.doctor import start_checks
from asyncrl.launch.commands.init import write_project
from asyncrl.trainer.supervised.settings import SFTConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = [page for page in PAGES if page.name.startswith("tutorial_")]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:python -m asyncrl\.launch|make|python (?:benchmarks|docs|experiments|tests)/)[^`]*)`")
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


READERS = ("show", "doctor", "trace", "dashboard", "audit", "export")
"""Commands that read a run."""
OF_A_RUN = re.compile(r"RUN|~/.*|\w+\.run")
"""Stands for the folder of a run of the reader's."""
ELSEWHERE = ("--plan", "--eval")
"""Options of these that other tests cover, as they take seconds or other runs."""


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


def commands_that_read(run: Path, steps: int) -> list[list[str]]:
    """Commands of all pages that read a run, made to read `run`, whose steps are 1 to `steps`, and to serve nothing."""
    found = set()
    for words in itertools.chain.from_iterable(map(commands_of, PAGES)):
        if words[0] not in READERS or not any(map(OF_A_RUN.fullmatch, words)) or {*words} & {*ELSEWHERE}:
            continue
        made = [str(run) if OF_A_RUN.fullmatch(word) else word for word in words]
        for place, option in enumerate(made):
            if option in ("--step", "--steps"):
                made[place + 1] = re.sub(r"\d+", str(steps), made[place + 1])
        if words[0] == "dashboard" and "--report" not in words:
            made += ["--report", "report.html"]
        found.add(tuple(made))
    return [list(each) for each in sorted(found)]


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
        module = importlib.import_module(f"asyncrl.launch.commands.{words[0]}")
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


OWN_FILES = {
    "my_data.jsonl": '{"prompt": "1+1=", "answer": "2"}\n',
    "my_test.jsonl": '{"prompt": "1+2=", "answer": "3"}\n',
    "my_rewards.py": "def score(data, completion):\n    return float(data['answer'] in completion)\n",
    "my_agent.py": "def MyAgent(prompt, env, client):\n    return 1.0\n",
    "my_env.py": "from asyncrl.api import Environment\n\n\nclass MyEnv(Environment):\n"
    "    def __init__(self, reward): ...\n    def reset(self, **options): ...\n    def step(self, action): ...\n",
}
"""What readers bring, in commands that say `my_...`."""
NOT_HERE = re.compile(r"NVIDIA GPU|\.venv-sglang/bin/python")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_start_a_run_pass_the_checks_that_need_no_process(
    page: Path, project: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of the reader's is replaced by one that is here; a GPU or SGLang that is not may be what is refused."""
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    for name, text in OWN_FILES.items():
        (project / name).write_text(text)
    if not (project / "model").exists():
        shutil.copytree(tiny_model, project / "model")
        config = json.loads((project / "model" / "config.json").read_text())
        (project / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 16}))
    for words in commands_of(page):
        if not words or words[0] in COMMANDS or {*words} & {"--help", "--show-allocation"}:
            continue
        if page in TUTORIALS:  # which make their data
            for block in blocks_of(page, "python"):
                exec(block, {"__name__": "script"})
        made = ["model.path=model" if word.startswith("model.path=") else word for word in words]
        code = launch.main([*made, "--dry-run"])
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert [line for line in errors if not NOT_HERE.search(line)] == [], words
        assert code == (2 if errors else 0), words


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
        assert start_checks.main([name.removeprefix("# ").removesuffix(".yaml"), "--config-dir", "."], "") == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_and_json_are_loaded(page: Path) -> None:
    for block in blocks_of(page, "yaml"):
        supervised = page.name == "sft.md"
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
    assert {words[0] for words in commands_that_read(ROOT, 4)} == {*READERS}
    for language in ("python", "yaml", "json", "pycon"):
        assert any(blocks_of(page, language) for page in PAGES), language
    python = [block for page in PAGES for block in blocks_of(page, "python")]
    assert [text for text in EXCEPTIONS if not any(text in block for block in python)] == []
