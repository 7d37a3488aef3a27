"""Reward for programs whose code passes the row's tests; they run in a sandbox (`asyncrl.plugins.sandbox`)."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import logging
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from asyncrl.api import verdict, without_thoughts
from asyncrl.api.reward import note_reward_part
from asyncrl.plugins.sandbox import Ended, Limits, Sandbox

_log = logging.getLogger(__name__)
_FENCE = re.compile(r"(?P<before>[ \t]*(?:(?:[-*+]|\d{1,9}[.)]|>)[ \t]*)*)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)")
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_LANGUAGE = re.compile(r"[\s{.]*([\w+#-]*)")
_PYTHON = re.compile(r"[ic]?py(?:thon|py|con)?\d*(?:[-_]\w*)?")
_QUOTED = re.compile(r"^[ \t]*(?:> ?)+")
_DEEPER = 3
"""A line that closes a block may be indented by so much more than the one that opened it, as in Markdown."""
_MOST_PARSED = 100_000
"""Characters of a block that is parsed to see what it defines."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NOT_FOUND = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_CASES, _ASSERTS = "tests", "test_code"
_CASE_FORM = '{"input": ..., "output": ...}'


class CodeTestsReward:
    """Share of the row's tests that the answer's Python program passes; each test runs in a separate sandbox.

    The program is the answer's last Python block, or the whole answer without one (`program_in`). A row has one of:

    - `tests`: a list of `{"input": ..., "output": ...}`. The program reads the input, and its output must be equal
      except for blanks at the ends of lines and empty lines at the end. The program never sees the expected output.
    - `test_code`: Python that runs after the program in the same process, mostly `assert` statements, as a text or a
      list of texts; 1 if it completes. A program can cheat here, so prefer `tests`.

    Args:
        all_or_nothing: 1 if every test passes, else 0.
        timeout_s: limit on the CPU time of one test; the wall-clock limit is three times as long. `reward.timeout_s`
            must allow for all tests of a row and for waiting, because only one program per core runs at a time.
        memory_mb, processes: limits of one test, see `asyncrl.plugins.sandbox.Limits`.
        output_mb: limit on what a program prints in one test; more is wrong. The metric `reward/output_cut` is the
            share of tests in which programs printed more.
        packages: packages of this Python that programs may import, such as `[numpy]`; else the standard library alone.

    Raises:
        SandboxUnavailable: this machine cannot make a sandbox.
        ValueError: a limit is too low for any program, or a package is not installed or needs more memory.
    """

    def __init__(
        self,
        *,
        all_or_nothing: bool = True,
        timeout_s: float = 5.0,
        memory_mb: int = 512,
        processes: int = 16,
        output_mb: int = 16,
        packages: Sequence[str] = (),
    ) -> None:
        for name, limit, least in (
            ("timeout_s", timeout_s, 0.1),
            ("memory_mb", memory_mb, 64),
            ("processes", processes, 3),
            ("output_mb", output_mb, 1),
        ):
            if not limit >= least:
                raise ValueError(f"{name} is {limit}; give {least} or more")
        limits = Limits.of_cpu(timeout_s, memory_mb, processes, output_bytes=output_mb << 20)
        self._sandbox = Sandbox(limits, packages=packages)
        self._missing: set[str] = set()
        self._all_or_nothing = all_or_nothing
        if all_or_nothing:
            verdict(self)

    def __call__(self, data: Mapping[str, Any], completion: str) -> float:
        """Return the reward of the program in `completion`.

        Raises:
            ValueError: the row has neither kind of tests, or cases of another form.
        """
        program, tests = program_in(completion), self.check_row(data)
        if not program.strip():
            return 0.0
        return self._asserts(program, tests) if isinstance(tests, str) else self._cases(program, tests)

    def check_row(self, data: Mapping[str, Any]) -> str | list[tuple[str, str]]:
        """Return the row's tests: code, or input and output of each.

        Raises:
            ValueError: it has neither, or of another form.
        """
        if data.get(_CASES):
            return [_case(each) for each in _listed(data[_CASES])]
        if data.get(_ASSERTS) is not None:
            return _code_of(data)
        given = [name for name in (_CASES, _ASSERTS) if name in data]
        if given:
            raise ValueError(f"the row's {given[0]!r} is empty; give it tests, or leave the row out")
        raise ValueError(f"the row has neither {_CASES!r} nor {_ASSERTS!r}; it has {', '.join(map(str, data))}")

    def _cases(self, program: str, cases: Sequence[tuple[str, str]]) -> float:
        passed = 0
        for given, wanted in cases:
            ended = self._run(program, given)
            right = _passed(ended) and _lines(ended.stdout) == _lines(wanted)
            if self._all_or_nothing and not right:
                return 0.0
            passed += right
        return passed / len(cases)

    def _asserts(self, program: str, test_code: str) -> float:
        came_to_its_end = uuid4().hex
        ended = self._run(f"{program}\n\n{test_code}\n\nprint({came_to_its_end!r})\n")
        return 1.0 if _passed(ended) and ended.stdout.rstrip().endswith(came_to_its_end) else 0.0

    def _run(self, program: str, stdin: str = "") -> Ended:
        """Run `program`. If it fails because a package is missing, log that once per package."""
        ended = self._sandbox.run({"program.py": program}, ["program.py"], stdin)
        note_reward_part("output_cut", float(ended.stopped == "output"))
        for package in set(_NOT_FOUND.findall(ended.stderr)) - self._missing:
            self._missing.add(package)
            if importlib.util.find_spec(package) is not None:
                _log.warning(
                    "programs fail that import %r, which the sandbox lacks; args.packages=[%s] gives it to them",
                    *(package, package),
                )
        return ended


def program_in(text: str) -> str:
    r"""Return the program of an answer: its last Python block behind the thoughts.

    - A block is between lines of three or more backticks or tildes, indented or not, in lists or quotations too; the
      last one need not be closed. Its language is Python (`python`, `py`, `python3`, `{.python}`, `pycon`, ...), or
      none if no block is marked as Python.
    - A block after it that only tries the program out is not it: one of assertions or comments alone, or one that uses
      names of earlier blocks, defines nothing but tests and reads no input.
    - If it uses functions, classes or variables of earlier Python blocks, these come first.
    - Without a block it is what is within `<answer>`, or the whole text.
    - Prompts of Python's shell are removed, with what the shell printed.
    """
    text = without_thoughts(text).removeprefix("\ufeff")
    blocks = list(_blocks(text))
    marked = [code for language, code in blocks if _PYTHON.fullmatch(language)]
    codes = [_without_prompts(code) for code in marked or [code for language, code in blocks if not language]]
    if not codes:
        answers = _ANSWER.findall(text)
        return str(answers[-1]) if answers else text
    if not marked:  # some may be examples of input and output
        codes = [code for code in codes if _does_something(_parsed(code))] or codes
    if len(codes) == 1:
        return codes[0]
    trees = [_parsed(code) for code in codes]
    last = next(n for n in reversed(range(len(codes))) if n == 0 or not _only_tries(n, trees))
    needed, program = [codes[last]], trees[last]
    missing = _missing(program) if program is not None else set()
    for code, tree in zip(codes[:last][::-1], trees[:last][::-1], strict=True):
        if tree is not None and missing & _defined(tree):
            needed.insert(0, code)
            missing = (missing - _defined(tree)) | _missing(tree)
    return "\n\n".join(needed)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language, in lower case, and content of each fenced block; the last one need not be closed."""
    fence, language, indent, quoted, lines = "", "", 0, False, list[str]()
    for line in re.split(r"\r\n|\r|\n", text):
        mark = _FENCE.fullmatch(line)
        if fence and mark and mark["fence"].startswith(fence) and len(mark["before"]) <= indent + _DEEPER:
            yield language, _without_indent(lines, indent)
            fence = ""
            if not mark["info"].strip():
                continue  # otherwise the block was not closed, and the next one begins
        if fence:
            lines.append(_QUOTED.sub("", line) if quoted else line)
            if line.rstrip().endswith(fence) and not mark:  # it closes the block at the end of its last line
                lines[-1] = lines[-1].rstrip().removesuffix(fence)
                yield language, _without_indent(lines, indent)
                fence = ""
        elif mark:
            fence, language, lines = mark["fence"], _LANGUAGE.match(mark["info"])[1].lower(), []  # type: ignore[index]
            indent, quoted = len(mark["before"]), ">" in mark["before"]
    if fence:
        yield language, _without_indent(lines, indent)


def _without_indent(lines: Sequence[str], indent: int) -> str:
    first = next((line for line in lines if line.strip()), "")
    own = min(indent, len(first) - len(first.lstrip()))
    return textwrap.dedent("\n".join(line[min(own, len(line) - len(line.lstrip())) :] for line in lines))


def _without_prompts(code: str) -> str:
    """Return what was typed, if `code` is a session of Python's shell; else `code`."""
    if not code.lstrip().startswith(">>>"):
        return code
    return "\n".join(line[4:] for line in code.split("\n") if line.startswith((">>>", "...")))


def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code) if len(code) <= _MOST_PARSED else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _does_something(tree: ast.Module | None) -> bool:
    """True if a block has more than values in it."""
    values = (
        ast.Module,
        ast.Expr,
        ast.Constant,
        ast.Name,
        ast.Tuple,
        ast.List,
        ast.UnaryOp,
        ast.unaryop,
        ast.expr_context,
    )
    return tree is not None and not all(isinstance(each, values) for each in ast.walk(tree))


def _only_tries(number: int, trees: Sequence[ast.Module | None]) -> bool:
    """True if block `number` only tries out what earlier blocks define."""
    tree = trees[number]
    if tree is None:
        return False
    if all(isinstance(each, ast.Assert | ast.Import | ast.ImportFrom) for each in tree.body):
        return not tree.body or any(isinstance(each, ast.Assert) for each in tree.body)
    defined = [each.name for each in tree.body if isinstance(each, _DEFINITIONS)]
    if not all(name.lower().startswith("test") for name in defined):
        return False
    reads = any(
        (isinstance(each, ast.Name) and each.id in ("input", "open"))
        or (isinstance(each, ast.Attribute) and each.attr == "stdin")
        for each in ast.walk(tree)
    )
    earlier = {each.name for tree in trees[:number] if tree for each in tree.body if isinstance(each, _DEFINITIONS)}
    return not reads and not earlier.isdisjoint(_missing(tree))


def _missing(tree: ast.Module) -> set[str]:
    """Return the names that a block uses and does not define."""
    used = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
    inner = {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}
    return used - inner - _defined(tree, ast.walk(tree)) - set(dir(builtins))


def _defined(tree: ast.Module, nodes: Iterable[ast.AST] = ()) -> set[str]:
    """Return the names that `nodes` define; without any, those of the statements of a block."""
    found: set[str] = set()
    for each in nodes or (inner for own in tree.body for inner in _own_nodes(own)):
        if isinstance(each, _DEFINITIONS):
            found.add(each.name)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            found.add(each.id)
        elif isinstance(each, ast.alias):
            found.add((each.asname or each.name).partition(".")[0])
        elif isinstance(each, ast.ExceptHandler) and each.name:
            found.add(each.name)
    return found


def _own_nodes(statement: ast.stmt) -> Iterable[ast.AST]:
    return (statement,) if isinstance(statement, _DEFINITIONS) else ast.walk(statement)


def _code_of(row: Mapping[str, Any]) -> str:
    """Return the row's `test_code`, a text or a list of texts, as one program.

    Raises:
        ValueError: it is neither, or empty.
    """
    given = row[_ASSERTS]
    lines = given if isinstance(given, list | tuple) else [given]
    if strays := [each for each in lines if not isinstance(each, str)]:
        raise ValueError(
            f"the row's {_ASSERTS!r} holds {strays[0]!r:.40}, of the type {type(strays[0]).__name__}: give Python code "
            "as a text, or a list of texts, which run one after the other"
        )
    code = "\n".join(lines)
    if not code.strip():
        raise ValueError(f"the row's {_ASSERTS!r} is empty; give it tests, or leave the row out")
    return code


def _listed(cases: Any) -> Sequence[Any]:
    if not isinstance(cases, list | tuple):
        raise ValueError(f"the row's {_CASES!r} is a {type(cases).__name__}: give a list of {_CASE_FORM}")
    return cases


def _case(case: Any) -> tuple[str, str]:
    """Return input and output of a test, as texts."""
    sides = [case.get(side) for side in ("input", "output")] if isinstance(case, Mapping) else [None]
    if not all(isinstance(side, str | int | float) for side in sides):
        raise ValueError(f"a test among the row's {_CASES!r} is {str(case)[:80]!r}: give {_CASE_FORM}, both text")
    return str(sides[0]), str(sides[1])


def _passed(ended: Ended) -> bool:
    return not ended.stopped and ended.exit_code == 0


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
