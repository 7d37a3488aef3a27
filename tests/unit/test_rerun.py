"""CI forgives a whole run that fails once, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "rerun.py"
PASSES = "def test_it() -> None:\n    pass\n"
FAILS = "def test_it() -> None:\n    assert False\n"


def rerun(folder: Path, tests: dict[str, str]) -> tuple[int, str]:
    """Exit code and output where these tests failed in the suite; by name, with what they are when they run alone."""
    for name, content in tests.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    cache = folder / "cache" / "v" / "cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps({f"{name}::test_it": True for name in tests}))
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider --import-mode=importlib\n")
    ended = subprocess.run(
        [sys.executable, SCRIPT, folder / "cache"], cwd=folder, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout


def test_both_results_of_a_whole_run_that_passes_alone_are_printed(tmp_path: Path) -> None:
    code, output = rerun(tmp_path, {"tests/faults/test_a.py": PASSES})
    assert code == 0, output
    reported = [line for line in output.splitlines() if line.startswith("FLAKY")]
    assert reported == [
        "FLAKY tests/faults/test_a.py::test_it",
        "FLAKY   in the suite: failed, see above",
        "FLAKY   alone: passed",
    ]


@pytest.mark.parametrize(
    "tests",
    [
        {"tests/e2e/test_a.py": PASSES, "tests/e2e/test_b.py": FAILS},
        {"tests/unit/test_a.py": PASSES},
        {"tests/e2e/test_a.py": PASSES, "tests/integration/test_b.py": PASSES},
        {f"tests/faults/test_{name}.py": PASSES for name in "abc"},
        {},
    ],
    ids=["fails alone too", "a unit test", "an integration test beside it", "three of them", "no test failed"],
)
def test_nothing_else_is_forgiven(tmp_path: Path, tests: dict[str, str]) -> None:
    code, output = rerun(tmp_path, tests)
    assert code != 0, output
