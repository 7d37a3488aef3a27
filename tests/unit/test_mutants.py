"""`benchmarks/mutants.py`: which changes it makes, which tests it runs, and that a change that is noticed counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import mutants
from benchmarks.mutants import Mutant, Profile

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("x = a < b", ["x = (a <= b)"]),
        ("x = a and b", ["x = (a or b)", "x = (a)"]),
        ("x = not a", ["x = (a)"]),
        ("x = f(1)", ["x = f((2))"]),
        ("x = f(0.5)", ["x = f((1.0))"]),
        ("x = f(True)", ["x = f((False))"]),
        ("x = a if b else c", ["x = (c if b else a)"]),
        ("x = max(a, b)", ["x = (min(a, b))"]),
        ("x = sorted(a, key=f)", ["x = (list(a))"]),
        ("x += y", ["x -= y", "pass"]),
        ("f(x)", ["pass"]),
        ("if a: raise Problem(1)", ["if a: pass"]),
        ("while a: break", ["while a: continue"]),
        ("return_ = 'é' if a else b; f(a)", ["return_ = (b if a else 'é'); f(a)", "return_ = 'é' if a else b; pass"]),
    ],
)
def test_a_line_is_changed_in_each_way(text: str, changed: list[str]) -> None:
    assert [mutant.after for mutant in mutants.mutants("gate", "x.py", text)] == changed


@pytest.mark.parametrize(
    "text",
    [
        '"""A docstring."""',
        "x: Literal[1]",
        "raise Problem(f'{1}')",
        "_log.warning('%d', 1)",
        "assert a < b",
        "x = zip(a, b, strict=True)",
        "LIMIT_S = -2 * 60.0",
        "if TYPE_CHECKING: f()",
        "@dataclass(frozen=True)\nclass C: ...",
    ],
)
def test_what_decides_nothing_stays(text: str) -> None:
    assert [mutant.after for mutant in mutants.mutants("gate", "x.py", text) if mutant.after != "pass"] == []


MODULE = """
def f(a=1):
    if (
        a < 2
    ):
        g(3)
"""


def test_a_statement_is_run_by_the_tests_that_run_its_lines_the_quickest_file_first() -> None:
    of = {mutant.after: mutant for mutant in mutants.mutants("gate", "x.py", MODULE)}
    tests = {
        "slow.py::a": Profile(2.0, {"x.py": [3, 4, 6]}),
        "slow.py::b": Profile(0.1, {"x.py": [3, 4]}),
        "quick.py::a": Profile(0.3, {"x.py": [4]}),
        "quick.py::b": Profile(0.3, {"y.py": [4]}),
    }
    assert mutants.tests_that_run(of["g((4))"], tests) == ["slow.py::a"]
    assert mutants.tests_that_run(of["(a <= 2)"], tests) == ["quick.py::a", "slow.py::a", "slow.py::b"]
    assert len(mutants.tests_that_run(of["def f(a=(2)):"], tests)) == 3, "the import runs it: all that run the module"
    unseen = {name: Profile(each.seconds, {}) for name, each in tests.items()}
    assert len(mutants.tests_that_run(of["g((4))"], unseen)) == 4, "perhaps a process that one of them starts"


def test_the_parts_of_a_sample_are_the_sample() -> None:
    sample = mutants.drawn(["gate", "queue"], 41, seed=1)
    parts = [mutants.share_of(sample, f"{part}/3") for part in (1, 2, 3)]
    assert sorted(each.key for part in parts for each in part) == sorted(each.key for each in sample)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(len({mutant.file for mutant in part}) <= 4 for part in parts), "few modules are in several"
    for wrong in ("0/3", "4/3", "1", "x/y"):
        with pytest.raises(SystemExit, match="name part I of N"):
            mutants.share_of(sample, wrong)


@pytest.mark.parametrize("group", mutants.GROUPS)
def test_a_group_is_tried_by_the_tests_of_its_package(group: str) -> None:
    tests = Path(mutants.ROOT, "tests")
    for file in mutants.files_of(group):
        package = Path("tests", "unit", *Path(file).parts[:1])
        assert any(Path(each).is_relative_to(package) for each in mutants.tests_of(file, tests)), file
    with pytest.raises(SystemExit, match="tests/unit/no_such_package is not there"):
        mutants.tests_of("no_such_package/module.py", tests)


def test_each_mutant_that_is_known_to_change_nothing_is_there_and_has_its_reason() -> None:
    entries = json.loads(mutants.EQUIVALENT.read_text())
    in_groups = {file for group in mutants.GROUPS for file in mutants.files_of(group)}
    of_file = dict[str, list[Mutant]]()
    for file in {each["file"] for each in entries} & in_groups:
        of_file[file] = mutants.mutants("any", file, (ROOT / "asyncrl" / file).read_text())
    found = [sum(mutant.known([each]) for mutant in of_file.get(each["file"], ())) for each in entries]
    assert not [each for each, count in zip(entries, found, strict=True) if not count], "changed since: say them anew"
    assert max(found, default=1) == 1, "an entry that several lines of a file look like: it may be wrong for one"
    assert all(each["reason"] for each in entries)
    assert [each["file"] for each in entries] == sorted(each["file"] for each in entries)


DRIVER = """
import sys
from pathlib import Path
from benchmarks import mutants
mutants.ROOT, mutants.EQUIVALENT = Path.cwd(), Path("equivalent.json")
mutants.GROUPS, mutants.PRELOADED = {"toy": ("toy.py",)}, ("hypothesis", "pytest_asyncio")
sys.exit(mutants.main(["--out", "out.log", *sys.argv[1:]]))
"""
TOY = """
def is_positive(x):
    return 0 < x


def unchanged(x):
    return x + 0
"""
TESTS = """
import subprocess, sys

def test_another_process_sees_the_change():
    script = "from asyncrl.toy import is_positive; print([is_positive(x) for x in (-1, 1)])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).stdout == b"[False, True]\\n"

def test_that_fails_anyway():
    raise NotImplementedError
"""
ADDED = """
from asyncrl.toy import is_positive

def test_the_bound_is_outside():
    assert not is_positive(0)
"""


def test_a_change_that_a_test_notices_is_killed_and_a_survivor_is_tried_again_with_a_new_test(tmp_path: Path) -> None:
    tests, package = tmp_path / "tests" / "unit" / "test_toy.py", tmp_path / "asyncrl"
    tests.parent.mkdir(parents=True)
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "toy.py").write_text(TOY)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    tests.write_text(TESTS)
    known = [{"file": "toy.py", "before": "return x + 0", "after": "return (x - 0)", "reason": "it adds nothing"}]
    (tmp_path / "equivalent.json").write_text(json.dumps(known))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", DRIVER, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)

    first = run()
    assert "fails without a change, so it is left out: tests/unit/test_toy.py::test_that_fails_anyway" in first.stderr
    assert "| toy | 4 | 1 | 2 | 1 | 0.333 |" in first.stdout, first.stderr
    tests.write_text(TESTS + ADDED)
    again = run()
    assert len([line for line in again.stderr.splitlines() if ": asyncrl/toy.py:" in line]) == 2, "killed ones stay so"
    assert "| toy | 4 | 2 | 1 | 1 | 0.667 |" in again.stdout, again.stderr
    assert again.returncode == 1
    assert run("--list").stdout.splitlines()[0] == "asyncrl/toy.py:7: return x + 0  ->  return x + (1)"
