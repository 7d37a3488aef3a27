"""The test command reports the tests that it left out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
LEFT_OUT = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2])
def test_on_a_gpu(size):
    pytest.skip("needs a CUDA device")

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="needs a newer CUDA device")
def test_on_a_newer_gpu():
    pass

def test_of_the_moon():
    pytest.skip("the moon is not up")
"""


@pytest.mark.parametrize(
    ("until", "lines"),
    [
        (
            "inf",
            [
                "3 skipped: no CUDA device; to include them: make test, on a machine with an NVIDIA GPU",
                "1 skipped: the moon is not up",
            ],
        ),
        ("0", ["4 skipped: no time left (ASYNCRL_TESTS_UNTIL)"]),
    ],
)
def test_tests_left_out_for_one_reason_are_one_line_with_the_command_that_includes_them(
    tmp_path: Path, warm_python: str, until: str, lines: list[str]
) -> None:
    (tmp_path / "test_left_out.py").write_text(LEFT_OUT)
    path = os.pathsep.join([str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [warm_python, "-m", "pytest", "-q", "-c", os.devnull, "-p", "tests.conftest", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path, "ASYNCRL_TESTS_UNTIL": until},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert [line for line in ended.stdout.splitlines() if "skipped: " in line] == lines


def test_what_is_left_out_where_memory_is_slow_are_files_that_there_are() -> None:
    lines = (TESTS.parent / ".ci" / "left_out_where_memory_is_slow").read_text().splitlines()
    assert lines
    for line in lines:
        assert (TESTS.parent / line.removeprefix("--ignore=")).is_file(), line
