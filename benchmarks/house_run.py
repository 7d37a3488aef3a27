"""What a run imports and calls: the code that somebody has to know who wants to follow a default run.

    python benchmarks/house_run.py [--seconds 14] [--experiment async_ppo] [setting=value ...]

A profiler hook is in every process. Calls count for some seconds after the fifth step, in which steps go on at their
steady pace; a function that was already running then, such as a loop, is not counted. Per process and in all: files of
the package that are imported, their lines, those that are neither blank nor comments, and of these those that are no
docstrings; files and functions that were called.
"""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common import parser

LIMIT_S = 600.0
LOOK_S = 0.5
KINDS = ("_worker/", "_server/", "_manager/")

HOOK = """
import os, sys, threading

FOLDER, LOOK_S = os.environ["ASYNCRL_HOUSE_RUN"], {look_s}
calls = set()
watching = False


def count(frame, event, argument):
    if watching and event == "call" and "/asyncrl/" in frame.f_code.co_filename:
        calls.add((frame.f_code.co_filename, frame.f_code.co_qualname))


def save():
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("asyncrl")]
    files = {{file for module in modules if (file := getattr(module, "__file__", None))}}
    with open(f"{{FOLDER}}/{{os.getpid()}}.new", "w") as out:
        out.write(" ".join(open("/proc/self/cmdline").read().split("\\0")) + "\\n")
        out.writelines(f"import {{file}}\\n" for file in files)
        out.writelines(f"call {{file}} {{function}}\\n" for file, function in list(calls))
    os.replace(f"{{FOLDER}}/{{os.getpid()}}.new", f"{{FOLDER}}/{{os.getpid()}}.txt")


def look():
    global watching
    while not pause.wait(LOOK_S):
        watching = os.path.exists(f"{{FOLDER}}/watch")
        save()


pause = threading.Event()
threading.setprofile(count)
sys.setprofile(count)
threading.Thread(target=look, daemon=True).start()
"""


@dataclass
class Seen:
    """Files that were imported, and functions, by file, that were called."""

    imported: set[Path] = field(default_factory=set)
    called: set[tuple[str, str]] = field(default_factory=set)

    def row(self, kind: str) -> str:
        lines = [sizes(path) for path in self.imported]
        sums = [sum(column) for column in zip(*lines, strict=True)] or [0, 0, 0]
        figures = [len(self.imported), *sums, len({file for file, _ in self.called}), len(self.called)]
        return f"{kind:>20}" + "".join(f"{figure:>11,}" for figure in figures)


def sizes(path: Path) -> tuple[int, int, int]:
    """Lines; without blank lines and comments; without docstrings, too."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    code = {number for number, line in lines if line.strip() and not line.strip().startswith("#")}
    return text.count("\n"), len(code), len(code - docstrings)


def traced(experiment: str, settings: Sequence[str], seconds: float) -> dict[str, Seen]:
    """Run the experiment for a while; return what was seen by kind of process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(HOOK.format(look_s=LOOK_S))
        environment = os.environ | {"ASYNCRL_HOUSE_RUN": name, "PYTHONPATH": name, "NO_COLOR": "1"}
        command = [sys.executable, "-m", "asyncrl.launch", experiment, f"fileroot={name}/runs", "eval.interval=0"]
        log = folder / "log"
        with log.open("w") as out:
            run = subprocess.Popen(
                [*command, "total_train_steps=100000", *settings], stdout=out, stderr=out, env=environment
            )
        deadline = time.monotonic() + LIMIT_S
        while "step 5/" not in log.read_text():
            if run.poll() is not None or time.monotonic() > deadline:
                run.kill()
                raise SystemExit(log.read_text())
            time.sleep(LOOK_S)
        (folder / "watch").touch()
        time.sleep(seconds)
        (folder / "watch").unlink()
        time.sleep(3 * LOOK_S)
        run.send_signal(signal.SIGINT)
        run.wait(LIMIT_S)
        return seen_in(folder)


def seen_in(folder: Path) -> dict[str, Seen]:
    """What processes have written, by kind of process."""
    found: dict[str, Seen] = defaultdict(Seen)
    for file in sorted(folder.glob("*.txt")):
        title, *rows = file.read_text().splitlines()
        seen = found[kind_of(title)]
        for row in rows:
            what, _, rest = row.partition(" ")
            if what == "import":
                seen.imported.add(Path(rest))
            else:
                path, _, function = rest.partition(" ")
                seen.called.add((path, function))
    return dict(found)


def kind_of(title: str) -> str:
    words = title.split()
    kinds = [word.partition("/")[0] for word in words if any(kind in word for kind in KINDS) and words[0] == "asyncrl"]
    return kinds[0] if kinds else "launcher" if "asyncrl.launch" in title else "helpers"


def main() -> None:
    """Print the table."""
    command = parser(__doc__)
    command.add_argument("--seconds", type=float, default=14.0)
    command.add_argument("--experiment", default="async_ppo")
    command.add_argument("settings", nargs="*", metavar="setting=value")
    options = command.parse_args()
    found = traced(options.experiment, options.settings, options.seconds)
    of = found.values()
    found["all"] = Seen(set().union(*(seen.imported for seen in of)), set().union(*(seen.called for seen in of)))
    print(f"{'':20}{'imported':>44}{'called':>22}")
    columns = ("files", "lines", "code", "no docs", "files", "functions")
    print(f"{'process':>20}" + "".join(f"{column:>11}" for column in columns))
    for kind, seen in found.items():
        print(seen.row(kind))


if __name__ == "__main__":
    main()
