"""Processor time of tests by file, their processes' included; a plugin of pytest, which xdist may spread.

    PYTHONPATH=.ci python -m pytest -p cpu_seconds tests/unit/config

Whole runs are forked from a template, which is not below their test: it notes what each used (`tests/warm.py`).
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

NOTES = "ASYNCRL_TESTS_CPU_SECONDS"
"""Names the file to which the template writes `<seconds> <test> (<phase>)` of each whole run that ended."""
SPENT = pytest.StashKey[float]()
by_test: Counter[str] = Counter()


def pytest_configure() -> None:
    if NOTES not in os.environ:
        handle, os.environ[NOTES] = tempfile.mkstemp(prefix="asyncrl-cpu-seconds-")
        os.close(handle)


def _now() -> float:
    """Seconds of this process and of all below it, those that have ended included."""
    total = 0.0
    root = psutil.Process()
    for process in [root, *root.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


@pytest.hookimpl(wrapper=True)
def _phase(item: pytest.Item) -> Generator[None, object, object]:
    before = _now()
    try:
        return (yield)
    finally:
        item.stash[SPENT] = item.stash.get(SPENT, 0.0) + _now() - before


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _phase


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        report.user_properties = [*report.user_properties, ("cpu_s", item.stash[SPENT])]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == "cpu_s" and report.when == "teardown":
            by_test[report.nodeid] += float(value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in Path(os.environ[NOTES]).read_text().splitlines():
        seconds, _, test = line.partition(" ")
        by_test[test.rpartition(" (")[0]] += float(seconds)
    by_file: Counter[str] = Counter()
    for test, spent in by_test.items():
        by_file[test.partition("::")[0]] += spent
    terminalreporter.section(f"{sum(by_file.values()):.0f} s of processors")
    for name, spent in [*by_file.most_common(40), *by_test.most_common(40)]:
        terminalreporter.write_line(f"{spent:8.1f} s  {name}")
