"""Reward for programs whose code passes the row's tests; they run in a sandbox (`asyncrl.plugins.sandbox`)."""

from __future__ import annotations

import importlib.util
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from asyncrl.api import verdict
from asyncrl.plugins.sandbox import Ended, Limits, Sandbox

_log = logging.getLogger(__name__)
_BLOCK = re.compile(r"```(?:[Pp]ython3?|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
WALL_BY_CPU = 3.0
"""Wall-clock limit as a multiple of the CPU limit, so that a busy machine does not make a right program fail."""
_NOT_FOUND = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
_CASES, _ASSERTS = "tests", "test_code"
_CASE_FORM = '{"input": ..., "output": ...}'


class CodeTestsReward:
    """Share of the row's tests that the answer's Python program passes; each test runs in a separate sandbox.

    The program is the last block between ``` in the answer, or the whole answer without one. A row has one of:

    - `tests`: a list of `{"input": ..., "output": ...}`. The program reads the input, and its output must be equal
      except for blanks at the ends of lines and empty lines at the end. The program never sees the expected output.
    - `test_code`: Python that runs after the program in the same process, mostly `assert` statements; 1 if it
      completes. A program can cheat here, so prefer `tests`.

    Args:
        all_or_nothing: 1 if every test passes, else 0.
        timeout_s: limit on the CPU time of one test; the wall-clock limit is three times as long. `reward.timeout_s`
            must allow for all tests of a row and for waiting, because only one program per core runs at a time.
        memory_mb, processes: limits of one test, see `asyncrl.plugins.sandbox.Limits`.
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
        packages: Sequence[str] = (),
    ) -> None:
        for name, limit, least in (
            ("timeout_s", timeout_s, 0.1),
            ("memory_mb", memory_mb, 64),
            ("processes", processes, 3),
        ):
            if not limit >= least:
                raise ValueError(f"{name} is {limit}; give {least} or more")
        cpu_s = max(1, math.ceil(timeout_s))
        self._sandbox = Sandbox(Limits(WALL_BY_CPU * timeout_s, cpu_s, memory_mb, processes), packages=packages)
        self._missing: set[str] = set()
        self._all_or_nothing = all_or_nothing
        if all_or_nothing:
            verdict(self)

    def __call__(self, data: Mapping[str, Any], completion: str) -> float:
        """Return the reward of the program in `completion`.

        Raises:
            ValueError: the row has neither kind of tests, or cases of another form.
        """
        program = program_in(completion)
        if data.get(_CASES):
            return self._cases(program, [_case(each) for each in _listed(data[_CASES])])
        if data.get(_ASSERTS):
            return self._asserts(program, str(data[_ASSERTS]))
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
        for package in set(_NOT_FOUND.findall(ended.stderr)) - self._missing:
            self._missing.add(package)
            if importlib.util.find_spec(package) is not None:
                _log.warning(
                    "programs fail that import %r, which the sandbox lacks; args.packages=[%s] gives it to them",
                    *(package, package),
                )
        return ended


def program_in(text: str) -> str:
    """Return the last block between ``` in `text`, closed or not; all of `text` without one."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


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
