"""Do the tests notice a changed line? Changes one thing at a time in the modules that decide, and runs tests near it.

    python benchmarks/mutants.py [--sample 200] [--seed 1] [--groups NAME ...] [--share I/N] [--out FILE] [--list]

A mutant is the package with one comparison, operator, condition, number, boundary or statement changed. It is killed if
one of its tests fails or does not end. Of the tests in the folder of `tests/unit` that mirrors its group, its tests are
those that run the changed line: all are run once without a change, which tells the lines and seconds of each. The
quickest come first. Where no test runs the line in its own process, all are run.

A mutant that survives is either a gap in the tests or the same program written in another way. Those of the second kind
are in `mutants_equivalent.json`, with the line before and after the change and the reason; they count for neither.
What decides nothing is not changed: annotations, messages, assertions (`strict=` of `zip` among them), and numbers that
a module names (`POLL_S = 10.0`), which a test could only repeat.

The sample is drawn evenly from the groups, by the seed alone. `--share I/N` tries the I-th of N parts of it, which have
few modules in common. Results are lines of JSON in FILE, written as they come: the same command goes on where it was
stopped. A changed module is tried again, and so is a survivor whose tests have changed. `--list` prints the survivors.

Each mutant runs in a process forked from one that has imported what tests need but nothing of asyncrl, in a copy of the
checkout: what a test starts sees the change too.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import hashlib
import importlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.json")
TARGET = 0.95
LIMIT_S = 1800.0
"""Seconds of a group's tests without a change; with one they have more, as each test has a limit."""
PATIENCE_S, PATIENCE = 20.0, 5.0
"""A mutant's test has so many seconds, and so many times what it took without a change; then it does not end."""
GROUPS: dict[str, tuple[str, ...]] = {
    "gate": ("manager/rollouts/staleness_gate.py", "manager/rollouts/rollout_state.py"),
    "pacing": ("manager/rollouts/pacing.py",),
    "queue": ("data/prompt_queue.py", "data/curriculum.py"),
    "buffer": ("master/data/sample_buffer.py", "master/data/order.py", "master/data/while_waiting.py"),
    "wait for a batch": ("master/train_loop.py",),
    "step plan": ("master/step.py",),
    "router": ("manager/router.py",),
    "fleet": ("manager/fleet/decisions.py", "staging/fan_out.py", "manager/fleet/servers.py"),
    "rebuild": ("manager/rollouts/workers.py",),
    "ledger": ("manager/rollouts/ledger_files.py",),
    "objective": ("algorithms/objective.py", "algorithms/kl.py", "algorithms/policy_losses.py"),
    "advantages": ("algorithms/advantages.py", "algorithms/grpo.py"),
    "corrections": ("algorithms/corrections.py",),
    "packing": ("trainer/batches/*.py",),
    "chat": ("chat/conversation.py", "chat/parsers.py", "chat/call_formats.py"),
    "rewards": ("plugins/rewards/math_answer.py", "plugins/rewards/text.py", "plugins/rewards/code_tests.py"),
}
ONLY = {"master/train_loop.py": {"next_batch", "_enough_rollouts", "_more", "_nothing_would_expire", "_refreshed"}}
"""Functions of a module that are changed; what the others decide, only whole processes show."""
PRELOADED = (
    "aiohttp",
    "hydra",
    "hypothesis",
    "msgspec",
    "numpy",
    "omegaconf",
    "psutil",
    "pytest_asyncio",
    "pytest_timeout",
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "zmq",
)
"""Modules that most tests import, and that import nothing of asyncrl."""
_PAIRS: tuple[tuple[type[ast.AST], type[ast.AST]], ...] = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.And, ast.Or),
)
_OPPOSITE = {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult} | dict(_PAIRS) | {other: one for one, other in _PAIRS}
_OTHER_CALL = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
_SAYS = {"log", "_log", "logger", "logging", "warnings", "print"}
"""Calls that tell people something: what they say is not what is tried here."""


@dataclass(frozen=True)
class Mutant:
    """One change of `file` (below `asyncrl/`): the bytes from `start` to `end` become `text`.

    Attributes:
        first, last: lines of the statement that a test must run to notice it; 0 if the module's import runs it.
        before, after: the changed line or lines.
        key: its name in the results, of the module's text and the change.
    """

    key: str
    group: str
    file: str
    line: int
    first: int
    last: int
    start: int
    end: int
    text: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"asyncrl/{self.file}:{self.line}: {self.before}  ->  {self.after}"

    def known(self, equivalent: Sequence[dict[str, str]]) -> bool:
        """True if it is among those that change nothing."""
        return any((e["file"], e["before"], e["after"]) == (self.file, self.before, self.after) for e in equivalent)


def mutants(group: str, file: str, text: str) -> list[Mutant]:
    """Return the mutants of a module."""
    tree, starts, encoded = ast.parse(text), [0], text.encode()
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    roots: list[ast.AST] = [tree]
    if file in ONLY:
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        roots = [function for function in functions if function.name in ONLY[file]]
    for node, after, (first, last) in (change for root in roots for change in _changes(root, None)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        if isinstance(node, ast.expr):
            after = f"({after})"
        lines = encoded[starts[node.lineno - 1] : start], encoded[end : starts[node.end_lineno]]
        line_before, line_after = (
            " ".join((lines[0] + middle + lines[1]).decode().split()) for middle in (encoded[start:end], after.encode())
        )
        key = hashlib.blake2b(encoded + f"{file}:{start}:{after}".encode(), digest_size=8).hexdigest()
        found.append(Mutant(key, group, file, node.lineno, first, last, start, end, after, line_before, line_after))
    return found


_Span = tuple[int, int]


def _changes(node: ast.AST, span: _Span | None) -> Iterator[tuple[ast.stmt | ast.expr, str, _Span]]:
    """Yield each node that is changed below `node`, with its new text and the lines of its statement.

    `span`: lines of the statement that `node` is of; None outside functions, whose statements the import runs.
    """
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _says_nothing(node, name, child):
                continue
            within = span
            if isinstance(child, ast.stmt) and (
                span or (name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
            ):
                body = getattr(child, "body", None)
                last = max(child.lineno, body[0].lineno - 1) if body else child.end_lineno or child.lineno
                within = child.lineno, last
            if isinstance(child, ast.stmt | ast.expr):
                for changed in _of(child):
                    yield child, ast.unparse(ast.fix_missing_locations(changed)), within or (0, 0)
            yield from _changes(child, within)


def _says_nothing(parent: ast.AST, field: str, child: ast.AST) -> bool:
    """True for what decides nothing: annotations, decorators, messages, docstrings, assertions, named numbers."""
    if field in ("annotation", "returns", "decorator_list", "type_params") or isinstance(child, ast.JoinedStr):
        return True
    if isinstance(parent, ast.Raise) or isinstance(child, ast.Assert | ast.Import | ast.ImportFrom):
        return True
    if isinstance(child, ast.FunctionDef) and child.name in ("__repr__", "__str__"):
        return True
    if isinstance(child, ast.keyword) and child.arg == "strict":
        return True
    if isinstance(parent, ast.Module) and isinstance(child, ast.Assign | ast.AnnAssign) and child.value is not None:
        plain = ast.Constant | ast.BinOp | ast.UnaryOp | ast.Tuple | ast.operator | ast.unaryop | ast.expr_context
        return all(isinstance(each, plain) for each in ast.walk(child.value))
    if isinstance(child, ast.Expr):
        if isinstance(child.value, ast.Constant):
            return True
        if isinstance(child.value, ast.Call):
            return not _SAYS.isdisjoint(ast.unparse(child.value.func).split("."))
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
    """Return the test files that may try a module: those of the folder that mirrors its group; where none of them
    imports it, also those elsewhere that do.

    Raises:
        SystemExit: no folder mirrors its package.
    """
    module = "asyncrl." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    folder = Path(file).parent
    while not (tests / "unit" / folder).is_dir():
        folder = folder.parent
    if folder == Path() != Path(file).parent:
        raise SystemExit(
            f"{file}: tests/unit/{Path(file).parts[0]} is not there; its tests have moved: move them along"
        )
    found = {*(tests / "unit" / folder).glob("test_*.py")}
    if not any(module in _imported(path) for path in found):
        found |= {path for path in (tests / "unit").rglob("test_*.py") if module in _imported(path)}
    return sorted(str(path.relative_to(tests.parent)) for path in found)


@cache
def _imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def files_of(group: str) -> list[str]:
    """Return the modules of a group, below `asyncrl/`.

    Raises:
        SystemExit: one of its patterns names none.
    """
    files: list[Path] = []
    for pattern in GROUPS[group]:
        if not (found := sorted((ROOT / "asyncrl").glob(pattern))):
            raise SystemExit(f"group {group!r}: no file {pattern}; it has moved: change GROUPS")
        files += found
    return [path.relative_to(ROOT / "asyncrl").as_posix() for path in files]


def drawn(groups: Sequence[str], sample: int, seed: int) -> list[Mutant]:
    """Return `sample` mutants, as many of each group as there are of it, up to an even share."""
    of_group: dict[str, list[Mutant]] = {}
    for group in groups:
        named = [(file, (ROOT / "asyncrl" / file).read_text()) for file in files_of(group)]
        of_group[group] = [mutant for file, text in named for mutant in mutants(group, file, text)]
        random.Random(f"{seed}/{group}").shuffle(of_group[group])
    chosen: list[Mutant] = []
    while len(chosen) < sample and any(of_group.values()):
        chosen += [each.pop() for each in of_group.values() if each][: sample - len(chosen)]
    return chosen


def share_of(sample: Sequence[Mutant], share: str) -> list[Mutant]:
    """Return the mutants of the part `share` (`I/N`, from 1) in the sample's order; a part has few modules.

    Raises:
        SystemExit: there is no such part.
    """
    part, _, parts = share.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise SystemExit(f"--share {share}: name part I of N as I/N, with 1 <= I <= N")
    sorted_ = sorted(sample, key=lambda mutant: (mutant.group, mutant.file, mutant.start))
    begin, end = (len(sample) * at // int(parts) for at in (int(part) - 1, int(part)))
    chosen = set(sorted_[begin:end])
    return [mutant for mutant in sample if mutant in chosen]


@dataclass(frozen=True)
class Profile:
    """A test without a change: its seconds, and the lines that it runs of each module of the groups."""

    seconds: float
    lines: Mapping[str, Sequence[int]]


def tests_that_run(mutant: Mutant, tests: Mapping[str, Profile]) -> list[str]:
    """Return those of `tests` that run the mutant's statement, in the order of their files' seconds; all if none does.

    If the module's import runs the statement, they are the tests that run any line of the module.
    """
    statement = range(mutant.first, mutant.last + 1) if mutant.first else None
    chosen = [
        name
        for name, profile in tests.items()
        if any(statement is None or line in statement for line in profile.lines.get(mutant.file, ()))
    ] or [*tests]
    seconds: dict[str, float] = defaultdict(float)
    for name in chosen:
        seconds[name.partition("::")[0]] += tests[name].seconds
    return sorted(chosen, key=lambda name: (seconds[name.partition("::")[0]], name.partition("::")[0]))


class _Plugin:
    """A plugin of pytest that notes what fails. Of properties a failure is not made smaller, which takes minutes."""

    def __init__(self) -> None:
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_sessionstart(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile("mutants", settings.default, phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")

    def report(self) -> object:
        """Return what it noted, as JSON values."""
        raise NotImplementedError


class _Profiler(_Plugin):
    """Notes the profiles of tests."""

    def __init__(self, package: Path, files: Sequence[str]) -> None:
        super().__init__()
        self._files = {str(package / file): file for file in files}
        self._lines: set[tuple[str, int]] = set()
        self._shared: dict[Path, set[tuple[str, int]]] = defaultdict(set)
        self._tests: dict[str, tuple[Path, float, set[tuple[str, int]]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._path, self._lines, began = item.path, set(), time.monotonic()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self._tests[item.nodeid] = item.path, time.monotonic() - began, self._lines

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """What a fixture of several tests runs, all tests of the file are taken to run."""
        own = self._lines
        if fixturedef.scope != "function":
            self._lines = self._shared[self._path]
        try:
            return (yield)
        finally:
            self._lines = own

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def report(self) -> object:
        tests = {}
        for name, (path, seconds, lines) in self._tests.items():
            of_file: dict[str, list[int]] = defaultdict(list)
            for file, line in sorted(lines | self._shared[path]):
                of_file[self._files[file]].append(line)
            tests[name] = {"seconds": round(seconds, 4), "lines": of_file}
        return {"tests": tests, "failed": sorted(set(self._failed))}

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._trace_lines if frame.f_code.co_filename in self._files else None

    def _trace_lines(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self._lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._trace_lines


class _Chosen(_Plugin):
    """Runs the tests of these profiles, in this order; one that does not end fails."""

    def __init__(self, tests: Mapping[str, Profile]) -> None:
        super().__init__()
        self._tests, self._place = tests, {name: place for place, name in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._place]
        for item in chosen:
            limit_s = PATIENCE_S + PATIENCE * self._tests[item.nodeid].seconds
            # a thread ends the process: an event loop that never rests would swallow an exception
            item.add_marker(pytest.mark.timeout(limit_s, method="thread"), append=False)
        items[:] = sorted(chosen, key=lambda item: self._place[item.nodeid]) or items

    def report(self) -> object:
        return "".join(self._failed[:1])


class Trial:
    """Tries mutants in a copy of the checkout. Profiles are kept in the file `kept`, by the texts that they are of."""

    def __init__(self, copied: Path, kept: Path) -> None:
        self._copied, self._kept = copied, kept
        self._traced = sorted({file for group in GROUPS for file in files_of(group)})
        self._modules = _digest([copied / "asyncrl" / file for file in self._traced])
        self._known: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}

    def digest(self, mutant: Mutant) -> str:
        """Return a digest of the mutant's tests."""
        return _digest([self._copied / file for file in tests_of(mutant.file, self._copied / "tests")])

    def outcome(self, mutant: Mutant) -> tuple[str, str]:
        """Run the mutant's tests; return `killed` or `survived`, and the test that failed, if one did.

        Raises:
            SystemExit: no test passes without a change.
        """
        tests = self._profiles(tests_of(mutant.file, self._copied / "tests"))
        chosen = {name: tests[name] for name in tests_that_run(mutant, tests)}
        target = self._copied / "asyncrl" / mutant.file
        files = list(dict.fromkeys(name.partition("::")[0] for name in chosen))
        original, status = target.read_bytes(), target.stat()
        target.write_bytes(original[: mutant.start] + mutant.text.encode() + original[mutant.end :])
        limit_s = LIMIT_S + PATIENCE * sum(each.seconds for each in chosen.values())
        try:
            code, failed = _run(_Chosen(chosen), ["-x", *files], self._copied, limit_s)
        finally:
            target.write_bytes(original)
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))  # its bytecode is its own again
        return ("survived", "") if code == 0 else ("killed", failed or f"pytest ended with {code}")

    def _profiles(self, files: Sequence[str]) -> dict[str, Profile]:
        """Return the profiles of the tests in `files` that pass without a change."""
        digests = {file: f"{self._modules} {_digest([self._copied / file])}" for file in files}
        if new := [file for file in files if self._known.get(file, {}).get("digest") != digests[file]]:
            profiler = _Profiler(self._copied / "asyncrl", self._traced)
            code, found = _run(profiler, new, self._copied, LIMIT_S)
            if found is None:
                raise SystemExit(f"without a change, pytest ends with {code}: pytest {' '.join(new)}")
            for name in found["failed"]:
                print(f"fails without a change, so it is left out: {name}", file=sys.stderr)
                found["tests"].pop(name, None)
            for file in new:
                of_file = {name: each for name, each in found["tests"].items() if name.partition("::")[0] == file}
                self._known[file] = {"digest": digests[file], "tests": of_file}
            self._kept.write_text(json.dumps(self._known))
        tests = {name: Profile(**each) for file in files for name, each in self._known[file]["tests"].items()}
        if not tests:
            raise SystemExit(f"without a change, no test passes: pytest {' '.join(files)}")
        return tests


def _digest(files: Sequence[Path]) -> str:
    return hashlib.blake2b(b"\0".join(file.read_bytes() for file in files), digest_size=8).hexdigest()


def _run(plugin: _Plugin, arguments: Sequence[str], copied: Path, limit_s: float) -> tuple[int, Any]:
    """Run pytest with `plugin` in a fork of this process.

    Returns:
        Its code, -1 after the limit, and the plugin's report, None if there is none.
    """
    report = copied.parent / "report.json"
    report.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = os.EX_SOFTWARE
        try:
            os.setsid()
            os.chdir(copied)
            with open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), 1)
                os.dup2(nothing.fileno(), 2)
            elsewhere = [path for path in sys.path if "site-packages" in path or not path.startswith(str(ROOT))]
            sys.path[:] = [str(copied), *elsewhere]
            os.environ["PYTHONPATH"] = str(copied)
            if isinstance(plugin, _Chosen):  # a mutant's bytecode must not be taken for another's
                sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
            options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
            code = pytest.main([*options, *arguments], plugins=[plugin])
            report.write_text(json.dumps(plugin.report()))
        finally:
            os._exit(code)
    ends = os.pidfd_open(child)
    ended, _, _ = select.select([ends], [], [], limit_s)
    os.close(ends)
    with contextlib.suppress(ProcessLookupError):  # what the tests have left, too
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    found = json.loads(report.read_text()) if ended and report.exists() else None
    return os.waitstatus_to_exitcode(status) if ended else -1, found


def table(results: Sequence[dict[str, str]]) -> str:
    """Return the table of results by group."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for result in results:
        for group in (result["group"], "all"):
            counts[group][result["outcome"]] += 1
    rows = ["| group | mutants | killed | survived | equivalent | share |", "|---|--:|--:|--:|--:|--:|"]
    for group in (*(group for group in GROUPS if group in counts), "all"):
        of = counts[group]
        killed, survived = of["killed"], of["survived"]
        share = f"{killed / (killed + survived):.3f}" if killed + survived else "-"
        rows.append(f"| {group} | {sum(of.values())} | {killed} | {survived} | {of['equivalent']} | {share} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Try the sample, print the table; return 1 where fewer than TARGET are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=200, help="mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", nargs="*", default=list(GROUPS), choices=list(GROUPS), metavar="NAME")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="the I-th of N parts of the sample")
    parser.add_argument("--out", type=Path, default=ROOT / "mutants.log", help="results, one line of JSON each")
    parser.add_argument("--list", action="store_true", help="print the survivors of --out, and try nothing")
    options = parser.parse_args(argv)
    equivalent = json.loads(EQUIVALENT.read_text())
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    known: dict[str, dict[str, Any]] = {row["key"]: row for row in map(json.loads, lines)}
    sample = drawn(options.groups, options.sample, options.seed)
    if not options.list:
        os.environ |= {"OMP_NUM_THREADS": "1", "ASYNCRL_COLD_TESTS": "1"}
        for name in PRELOADED:
            importlib.import_module(name)
        mine = share_of(sample, options.share)
        with tempfile.TemporaryDirectory() as scratch:
            copied = Path(scratch, "checkout")  # of what tests read, with the bytecode that is there
            skipped = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", "site")
            shutil.copytree(ROOT, copied, ignore=skipped, symlinks=True)
            trial = Trial(copied, options.out.with_suffix(".tests"))
            for number, mutant in enumerate(mine, 1):
                before, tests = known.get(mutant.key), trial.digest(mutant)
                if mutant.known(equivalent) or (before and (before["outcome"] == "killed" or before["tests"] == tests)):
                    continue
                outcome, by = trial.outcome(mutant)
                row = {"outcome": outcome, "by": by, "tests": tests, **asdict(mutant)}
                known[mutant.key] = row
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{number}/{len(mine)} {outcome}: {mutant}", file=sys.stderr, flush=True)
    results = [
        {"group": mutant.group, "outcome": "equivalent" if mutant.known(equivalent) else known[mutant.key]["outcome"]}
        for mutant in sample
        if mutant.known(equivalent) or mutant.key in known
    ]
    for mutant in sample if options.list else ():
        if mutant.key in known and known[mutant.key]["outcome"] == "survived" and not mutant.known(equivalent):
            print(mutant)
    print(table(results))
    killed, survived = (sum(row["outcome"] == outcome for row in results) for outcome in ("killed", "survived"))
    return int(killed < TARGET * (killed + survived))


if __name__ == "__main__":
    sys.exit(main())
