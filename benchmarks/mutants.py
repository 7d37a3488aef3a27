"""Do the tests notice a changed line? Changes one thing at a time in the rooms that decide, and runs the tests near it.

    python benchmarks/mutants.py [--sample 200] [--seed 1] [--rooms NAME ...] [--jobs 1] [--out FILE] [--list]

A mutant is the package with one comparison, operator, condition, number, boundary or statement changed. Its tests are
those of `tests/unit` that import the changed module, then those in the folder that mirrors its room. It is killed if
one of them fails or does not end. A mutant that survives is either a gap in the tests or the same program written in
another way; those of the second kind are in `mutants_equivalent.json`, each with its reason, and count for neither.

The sample is drawn evenly from the rooms, by the seed alone. Results are lines of JSON in FILE, written as they come,
by the text of the module: the same command goes on where it was stopped, and a changed module is tried again.
`--list` prints the survivors of FILE.

Each mutant runs in a process forked from one that has imported what tests need but nothing of asyncrl, in a copy of the
checkout: what a test starts sees the change too.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.json")
TARGET = 0.95
LIMIT_S = 900.0
"""Seconds of a module's tests without a change. A mutant's have five times what they took, and half a minute."""
ROOMS: dict[str, tuple[str, ...]] = {
    "gate": ("manager/rollouts/staleness_gate.py", "manager/rollouts/rollout_state.py"),
    "admission": ("manager/rollouts/admission.py", "manager/rollouts/pacing.py"),
    "queue": ("plugins/datasets/queue/*.py",),
    "buffer": ("master/data/sample_buffer.py", "master/data/collector.py"),
    "batch order": ("master/data/buffer_order.py", "master/data/batches.py"),
    "step plan": ("master/data/step_plan.py", "master/data/score_ahead.py"),
    "router": ("manager/router.py",),
    "fleet": ("manager/fleet/decisions.py", "manager/fleet/fan_out.py", "manager/fleet/targets.py"),
    "rebuild": ("manager/rollouts/rebuild.py", "manager/rollouts/rollout_events.py"),
    "ledger": ("master/books/ledger.py", "master/books/reports.py"),
    "objective": ("algorithms/objective/objective.py", "algorithms/objective/kl.py", "algorithms/policy_losses/*.py"),
    "advantages": ("algorithms/advantages/*.py",),
    "corrections": ("algorithms/objective/corrections.py", "algorithms/objective/selections.py"),
    "packing": ("trainer/batches/*.py",),
    "chat": ("plugins/chat/conversation.py", "plugins/chat/turn_recorder.py", "plugins/chat/parsers/*.py"),
    "rewards": ("plugins/rewards/math_answer.py", "plugins/rewards/text.py", "plugins/rewards/code_tests.py"),
}
PRELOADED = (
    "numpy",
    "torch",
    "transformers",
    "hypothesis",
    "pytest",
    "omegaconf",
    "hydra",
    "aiohttp",
    "zmq",
    "msgspec",
)
_OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_OTHER_CALL = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
_SAYS = ("log", "logger", "warn", "note", "print")
"""Calls that tell people something: what they say is not what is tried here."""


@dataclass(frozen=True)
class Mutant:
    """One change: `before` at `line` of `file` (below `asyncrl/`) becomes `after`; `start` and `end` are offsets."""

    room: str
    file: str
    line: int
    start: int
    end: int
    before: str
    after: str

    @property
    def key(self) -> str:
        """Its name in the results: the module's text and the change."""
        text = (ROOT / "asyncrl" / self.file).read_bytes()
        change = f"{self.file}:{self.start}:{self.after}".encode()
        return hashlib.blake2b(text + change, digest_size=8).hexdigest()

    def known(self, equivalent: Sequence[dict[str, str]]) -> bool:
        """True if it is among those that change nothing."""
        return any((e["file"], e["before"], e["after"]) == (self.file, self.before, self.after) for e in equivalent)


def mutants(room: str, file: str, text: str) -> list[Mutant]:
    """Return the mutants of a module."""
    tree, starts = ast.parse(text), [0]
    encoded = text.encode()
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, after in _changes(tree):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = encoded[start:end].decode()
        if isinstance(node, ast.expr):
            after = f"({after})"
        found.append(Mutant(room, file, node.lineno, start, end, before, after))
    return found


def _changes(node: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Yield each node that is changed below `node`, with its new text."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _says_nothing(node, name, child):
                continue
            if isinstance(child, ast.stmt | ast.expr):
                for changed in _of(child):
                    yield child, ast.unparse(ast.fix_missing_locations(changed))
            yield from _changes(child)


def _says_nothing(parent: ast.AST, field: str, child: ast.AST) -> bool:
    """True for what decides nothing: annotations, decorators, messages, docstrings, names."""
    if field in ("annotation", "returns", "decorator_list", "type_params") or isinstance(child, ast.JoinedStr):
        return True
    if isinstance(parent, ast.Raise) or isinstance(child, ast.Assert | ast.Import | ast.ImportFrom):
        return True
    if isinstance(child, ast.FunctionDef) and child.name in ("__repr__", "__str__"):
        return True
    if isinstance(child, ast.Expr):
        if isinstance(child.value, ast.Constant):
            return True
        if isinstance(child.value, ast.Call):
            return ast.unparse(child.value.func).rsplit(".", 1)[0].lstrip("_") in _SAYS
    return isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"


def _of(node: ast.stmt | ast.expr) -> Iterator[ast.AST]:
    """Yield `node` changed in each way."""
    other = copy.deepcopy(node)
    match other:
        case ast.Compare(ops=[op]) if type(op) in _OPPOSITE:
            other.ops = [_OPPOSITE[type(op)]()]  # type: ignore[list-item]
            yield other
        case ast.BinOp(op=op) if type(op) in _OPPOSITE and not isinstance(other.left, ast.Constant | ast.JoinedStr):
            other.op = _OPPOSITE[type(op)]()  # type: ignore[assignment]
            yield other
        case ast.AugAssign(op=op) if type(op) in _OPPOSITE:
            other.op = _OPPOSITE[type(op)]()  # type: ignore[assignment]
            yield other
            yield ast.Pass()
        case ast.BoolOp():
            other.op = _OPPOSITE[type(other.op)]()  # type: ignore[assignment]
            yield other
            yield from other.values[:1]
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield other.operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1 if isinstance(value, int) else value * 2 if value else 1.0)
        case ast.IfExp():
            yield ast.IfExp(other.test, other.orelse, other.body)
        case ast.Call(func=ast.Name(id=name)) if name in _OTHER_CALL:
            other.func = ast.Name(_OTHER_CALL[name])
            yield other
        case ast.Call(func=ast.Attribute(attr=name) as function) if name in _OTHER_CALL:
            function.attr = _OTHER_CALL[name]
            yield other
        case ast.Call(func=ast.Name(id="sorted"), args=[first, *_]):
            yield ast.Call(ast.Name("list"), [first], [])
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.Delete():
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


def tests_of(file: str, tests: Path) -> list[str]:
    """Return the test files that try a module: those that import it, then those of the folder that mirrors its room."""
    module = "asyncrl." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    imports = [path for path in sorted((tests / "unit").rglob("test_*.py")) if module in _imported(path)]
    folder = Path(file).parent
    while not (tests / "unit" / folder).is_dir():
        folder = folder.parent
    near = sorted((tests / "unit" / folder).glob("test_*.py"), key=lambda path: Path(file).stem not in path.stem)
    imports.sort(key=lambda path: Path(file).stem not in path.stem)
    return [str(path.relative_to(tests.parent)) for path in dict.fromkeys([*imports, *near])]


_IMPORTED: dict[Path, set[str]] = {}


def _imported(path: Path) -> set[str]:
    if path not in _IMPORTED:
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        _IMPORTED[path] = names
    return _IMPORTED[path]


def drawn(rooms: Sequence[str], sample: int, seed: int) -> list[Mutant]:
    """Return `sample` mutants, as many of each room as there are of it, up to an even share."""
    of_room: dict[str, list[Mutant]] = {}
    for room in rooms:
        files = [path for pattern in ROOMS[room] for path in sorted((ROOT / "asyncrl").glob(pattern))]
        if not files:
            raise SystemExit(f"room {room!r}: no file {' or '.join(ROOMS[room])}; its files have moved: change ROOMS")
        named = [(path.relative_to(ROOT / "asyncrl").as_posix(), path.read_text()) for path in files]
        of_room[room] = [mutant for file, text in named for mutant in mutants(room, file, text)]
        random.Random(f"{seed}/{room}").shuffle(of_room[room])
    chosen: list[Mutant] = []
    while len(chosen) < sample and any(of_room.values()):
        chosen += [each.pop() for each in of_room.values() if each][: sample - len(chosen)]
    return chosen


class Trial:
    """Tries mutants in a copy of the checkout."""

    def __init__(self, copied: Path) -> None:
        self._copied = copied
        self._limits: dict[str, float] = {}

    def outcome(self, mutant: Mutant) -> str:
        """Run the mutant's tests; return `killed` or `survived`.

        Raises:
            SystemExit: the tests fail without any change, so that they would seem to notice each.
        """
        tests, target = tests_of(mutant.file, ROOT / "tests"), self._copied / "asyncrl" / mutant.file
        if mutant.file not in self._limits:
            begun = time.monotonic()
            if (code := _run(tests, self._copied, LIMIT_S)) != 0:
                raise SystemExit(f"without a change, pytest ends with {code}: pytest {' '.join(tests)}")
            self._limits[mutant.file] = 30.0 + 5.0 * (time.monotonic() - begun)
        original = target.read_bytes()
        target.write_bytes(original[: mutant.start] + mutant.after.encode() + original[mutant.end :])
        try:
            code = _run(tests, self._copied, self._limits[mutant.file])
        finally:
            target.write_bytes(original)
        return "survived" if code == 0 else "killed"


def _run(tests: Sequence[str], copied: Path, limit_s: float) -> int:
    """Run pytest on `tests` in a fork of this process, up to the first failure; return its code, -1 after the limit."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(copied)
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        elsewhere = [path for path in sys.path if "site-packages" in path or not path.startswith(str(ROOT))]
        sys.path[:] = [str(copied), *elsewhere]
        sys.dont_write_bytecode = True  # a mutant may have its original's size and second
        import pytest

        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))
    until, code = time.monotonic() + limit_s, None
    while code is None and time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.05)  # a benchmark looks; it synchronises nothing
    if code is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return -1 if code is None else code


def copy_of_checkout(scratch: Path) -> Path:
    """Return a copy of what tests read."""
    copied = scratch / "checkout"
    skipped = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "site")
    shutil.copytree(ROOT, copied, ignore=skipped, symlinks=True)
    return copied


def table(results: Sequence[dict[str, str]]) -> str:
    """Return the table of results by room."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for result in results:
        for room in (result["room"], "all"):
            counts[room][result["outcome"]] += 1
    rows = ["| room | mutants | killed | survived | equivalent | share |", "|---|--:|--:|--:|--:|--:|"]
    for room in (*(room for room in ROOMS if room in counts), "all"):
        of = counts[room]
        killed, survived = of["killed"], of["survived"]
        share = f"{killed / (killed + survived):.3f}" if killed + survived else "-"
        rows.append(f"| {room} | {sum(of.values())} | {killed} | {survived} | {of['equivalent']} | {share} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Try the sample, print the table; return 1 where fewer than TARGET are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=200, help="mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", nargs="*", default=list(ROOMS), choices=list(ROOMS), metavar="NAME")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="every N-th of the sample, from the I-th")
    parser.add_argument("--out", type=Path, default=ROOT / "mutants.log", help="results, one line of JSON each")
    parser.add_argument("--list", action="store_true", help="print the survivors of --out, and try nothing")
    options = parser.parse_args(argv)
    equivalent = json.loads(EQUIVALENT.read_text())
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    known: dict[str, dict[str, str]] = {row["key"]: row for row in map(json.loads, lines)}
    sample = drawn(options.rooms, options.sample, options.seed)
    part, parts = map(int, options.share.split("/"))
    mine = sample[part - 1 :: parts]
    if not options.list:
        os.environ |= {"OMP_NUM_THREADS": "1", "ASYNCRL_COLD_TESTS": "1"}
        for name in PRELOADED:
            importlib.import_module(name)
        with tempfile.TemporaryDirectory() as scratch:
            trial = Trial(copy_of_checkout(Path(scratch)))
            for number, mutant in enumerate(mine, 1):
                if mutant.known(equivalent) or mutant.key in known:
                    continue
                row = {"key": mutant.key, "outcome": trial.outcome(mutant), **asdict(mutant)}
                known[mutant.key] = row
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{number}/{len(mine)} {row['outcome']}: {said(mutant)}", file=sys.stderr, flush=True)
    results = [
        {"room": mutant.room, "outcome": "equivalent" if mutant.known(equivalent) else known[mutant.key]["outcome"]}
        for mutant in sample
        if mutant.known(equivalent) or mutant.key in known
    ]
    for mutant in sample if options.list else ():
        if mutant.key in known and known[mutant.key]["outcome"] == "survived" and not mutant.known(equivalent):
            print(said(mutant))
    print(table(results))
    killed, survived = (sum(row["outcome"] == outcome for row in results) for outcome in ("killed", "survived"))
    return int(killed < TARGET * (killed + survived))


def said(mutant: Mutant) -> str:
    """Return the change in a line."""
    before, after = (" ".join(text.split()) for text in (mutant.before, mutant.after))
    return f"asyncrl/{mutant.file}:{mutant.line}: {before}  ->  {after}"


if __name__ == "__main__":
    sys.exit(main())
