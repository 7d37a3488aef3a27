"""`python -m asyncrl.launch init FOLDER`: create a small project of your own, which runs at once.

Exit codes: 0 written, 2 the folder is not empty or cannot be written.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from asyncrl.launch.commands import refuse
from asyncrl.runtime.settings import EXIT_OK

TEMPLATES = ("README.md", "mine.yaml", "reward.py", "agent.py", "test_project.py")
ROWS_FILE = "rows.jsonl"
ROWS, SEED = 512, 0


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"{program} init",
        description="Write a small project of your own: an experiment, data, a reward, an agent and a test of them.",
    )
    parser.add_argument("folder", type=Path, help="a new or empty folder")
    folder = parser.parse_args(argv).folder.expanduser()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            return refuse(f"{folder} is not an empty folder; give a new one")
        write_project(folder)
    except OSError as error:
        return refuse(f"{folder}: {error.strerror or error}")
    print(f"{folder} has a project: see its README.md, or begin with")
    print(f"    cd {folder} && {program} mine --config-dir .")
    return EXIT_OK


def write_project(folder: Path) -> None:
    """Write the project's files into `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TEMPLATES:
        text = files("asyncrl.launch.commands.init").joinpath("project", name).read_text(encoding="utf-8")
        (folder / name).write_text(text, encoding="utf-8")
    (folder / ROWS_FILE).write_text("".join(json.dumps(row) + "\n" for row in _rows()), encoding="utf-8")


def _rows() -> Iterator[dict[str, str]]:
    """Yield sums like those that the demo's base model can do."""
    numbers = random.Random(SEED)
    for _ in range(ROWS):
        terms = [numbers.randint(1, 40) for _ in range(numbers.randint(2, 4))]
        yield {"prompt": "+".join(map(str, terms)) + "=", "answer": str(sum(terms))}
