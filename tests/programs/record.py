"""Run installed programs and write what they sent into `recorded/`, and their table into docs/endpoint.md.

    python -m tests.programs.record [NAME...]        without names: those that are installed

Recorded requests are the last ones of the task's conversation. Long texts are cut. Of tools that look alike the first
is kept, besides those that are called. Names of sessions and folders are replaced.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..conftest import CHAT_MODEL
from .episode import Episode, chat_format, play
from .programs import PROGRAMS, Program

RECORDED = Path(__file__).parent / "recorded"
PAGE = Path(__file__).parents[2] / "docs" / "endpoint.md"
LONGEST, KEPT = 120, 40
"""Characters of the longest text that is kept whole, and of what is kept of longer ones."""
NAMES = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|(?<![\w-])[A-Za-z]*_?[0-9a-f]{16,}")
"""Names that differ from run to run."""


def record(episode: Episode, folder: Path) -> dict[str, Any]:
    """What an episode in `folder` leaves for tests and the table."""
    body = json.loads(json.dumps(episode.body).replace(str(folder), ""))
    offered = [name_of(tool) for tool in body.get("tools", ())]
    if "tools" in body:
        called = set(re.findall(r'"name": "(\w+)"', json.dumps({**body, "tools": []})))
        body["tools"] = list(_unlike(body["tools"], called))
    return {
        "version": episode.program.version,
        "api": episode.program.api,
        "requests": len(episode.bodies),
        "samples": [[len(sample.tokens), int(sample.loss_mask.sum())] for sample in episode.samples],
        "offered": offered,
        "body": shortened(body, {}),
    }


def name_of(tool: Any) -> str:
    """A tool's name, or its type if it has none."""
    return str(tool.get("function", tool).get("name") or tool["type"])


def _unlike(tools: Sequence[Any], called: set[str]) -> Iterator[Any]:
    seen = set()
    for tool in tools:
        look = (tool.get("type"), *sorted(tool), *sorted(tool.get("function", ())))
        if look not in seen or name_of(tool) in called:
            yield {**tool, "tools": list(_unlike(tool["tools"], called))} if "tools" in tool else tool
        seen.add(look)


def shortened(value: Any, names: dict[str, str]) -> Any:
    """`value` with its long texts cut, and other names of sessions, which `names` collects."""
    if isinstance(value, dict):
        return {name: shortened(each, names) for name, each in value.items()}
    if isinstance(value, list):
        return [shortened(each, names) for each in value]
    if not isinstance(value, str):
        return value
    text = NAMES.sub(lambda found: names.setdefault(found[0], f"name{len(names)}"), value)
    return f"{text[:KEPT]}…" if len(text) > LONGEST else text


def recorded(program: Program) -> Any:
    """What is recorded of `program`."""
    return json.loads((RECORDED / f"{program.name}.json").read_text())


HEAD, END = "<!-- programs: made by tests/programs/record.py -->\n", "<!-- end of programs -->\n"


def table() -> str:
    """The table of docs/endpoint.md."""
    columns = "| program | API | start | what it sends | tools | samples: tokens (with loss) |\n"
    return f"{HEAD}{columns}|---|---|---|---|--:|---|\n{''.join(map(_row, PROGRAMS))}{END}"


def _row(program: Program) -> str:
    found = recorded(program)
    start = "; ".join(
        f"`{text}`" for text in (program.start, *(f"{name}: {text}" for name, text in program.files.items()))
    )
    start = start.replace("'{task}'", '"…"').replace("{folder}", "$PWD")
    samples = "; ".join(f"{_rounded(tokens):,} ({with_loss})" for tokens, with_loss in found["samples"])
    cells = (f"{program.package} {found['version']}", f"`{program.api}`", start, program.sends)
    return f"| {' | '.join(cells)} | {len(found['offered'])} | {samples} |\n"


def _rounded(tokens: int) -> int:
    return round(tokens, 2 - len(str(tokens)))


async def main(names: Sequence[str]) -> None:
    """Run the programs with these names."""
    chat = chat_format(CHAT_MODEL)
    for program in PROGRAMS:
        if program.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            episode = await play(program, Path(folder), chat)
            print(program.name, episode.code, episode.refused, [path for path, _ in episode.bodies])
            if episode.code:
                print(episode.output)
            found = record(episode, Path(folder))
        text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
        (RECORDED / f"{program.name}.json").write_text(text)
        print(f"{len(text)} characters; samples {found['samples']}")


if __name__ == "__main__":
    asked = sys.argv[1:] or [program.name for program in PROGRAMS if program.executable.exists()]
    asyncio.run(main(asked))
    before, _, after = PAGE.read_text().partition(HEAD)
    PAGE.write_text(before + table() + after.partition(END)[2])
