"""What the suite leaves out is listed by names that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.further_cases import FURTHER_CASES, is_further

ROOT = Path(__file__).resolve().parents[2]
TESTS = [test for tests in FURTHER_CASES.values() for test in tests]


@pytest.mark.parametrize("test", TESTS)
def test_each_is_a_test(test: str) -> None:
    file, _, name = test.partition("[")[0].partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_none_is_listed_twice() -> None:
    assert len(set(TESTS)) == len(TESTS)


def test_a_case_is_left_out_and_another_of_its_test_is_not() -> None:
    case = TESTS[0]
    assert is_further(case)
    assert not is_further(case.partition("[")[0] + "[another]")
