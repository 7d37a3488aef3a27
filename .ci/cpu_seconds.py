"""Processor time of tests by file, their processes' included; a plugin of pytest, which xdist may spread.

    PYTHONPATH=.ci python -m pytest -p cpu_seconds tests/unit/config

Processes that were not started by the test are not counted: those that are forked from the template of whole runs
(`tests/warm.py`) are, by the first worker of pytest.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import psutil
import pytest

SPENT = pytest.StashKey[float]()
by_file: Counter[str] = Counter()


def _now() -> float:
    """Seconds of this process and of all below it, those that have ended included."""
    total, roots = 0.0, [psutil.Process()]
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0" and (
        template := os.environ.get("ASYNCRL_TESTS_TEMPLATE_PROCESS")
    ):
        roots.append(psutil.Process(int(template)))
    for root in roots:
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
            by_file[report.nodeid.partition("::")[0]] += float(value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section(f"{sum(by_file.values()):.0f} s of processors")
    for file, seconds in by_file.most_common(40):
        terminalreporter.write_line(f"{seconds:8.1f} s  {file}")
