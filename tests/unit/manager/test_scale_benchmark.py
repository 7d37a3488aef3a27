"""`benchmarks/scale.py --against` compares a row only if both checkouts measure it with the same code."""

from __future__ import annotations

from pathlib import Path

from benchmarks import scale

BENCHMARK = '''
from asyncrl.manager import gate

ROLLOUTS = 100


def _rollouts():
    """Rollouts of a measurement."""
    return ROLLOUTS


def expire(quick):
    return _rollouts()


def blocking(quick):
    import other

    return other.measure()


ROWS = (RowKind("expire", "buffer.expire", "ms", 0.01, "less", expire), RowKind("blocking", "", "ms", 1, "", blocking))
'''


def code(folder: Path, text: str, row: str) -> str | None:
    file = folder / "scale.py"
    file.write_text(text)
    return scale.code_of(file, row)


def test_the_code_of_a_row_is_what_it_uses_without_imports_and_docstrings(tmp_path: Path) -> None:
    known = code(tmp_path, BENCHMARK, "expire")
    assert known is not None
    assert "ROLLOUTS = 100" in known
    renamed = BENCHMARK.replace("asyncrl.manager", "asyncrl.rooms").replace("Rollouts of", "The rollouts of")
    assert code(tmp_path, renamed.replace("measure()", "measure(1)"), "expire") == known, "the other row's"
    assert code(tmp_path, BENCHMARK.replace("100", "200"), "expire") != known
    assert code(tmp_path, BENCHMARK.replace('"ms", 0.01', '"s", 0.01'), "expire") != known
    assert code(tmp_path, BENCHMARK, "unknown") is None


def test_the_code_of_a_row_has_that_of_another_benchmark_that_it_uses(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("def measure(): return 1")
    known = code(tmp_path, BENCHMARK, "blocking")
    (tmp_path / "other.py").write_text("def measure(): return 2")
    assert code(tmp_path, BENCHMARK, "blocking") != known
