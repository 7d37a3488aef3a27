"""Sources come in proportion to their weights, every row at least once, always the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.datasets import DataRecord
from asyncrl.data.files import FileDataset
from asyncrl.data.mixture import Mixture


class Rows:
    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def __len__(self) -> int:
        return self.size

    def row(self, index: int) -> dict[str, str]:
        return {"prompt": f"{self.name}{index}"}


sizes_and_weights = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), min_size=1, max_size=4)


@given(sizes_and_weights)
def test_shares_are_those_of_the_weights_and_no_row_is_left_out(drawn: list[tuple[int, int]]) -> None:
    sources = [Rows(f"s{number}-", size) for number, (size, _) in enumerate(drawn)]
    weights = [weight for _, weight in drawn]
    mixture = Mixture(sources, weights, [source.name for source in sources])
    rows = [mixture.row(index) for index in range(len(mixture))]
    counts = Counter(row["source"] for row in rows)
    scale = max(size / weight for size, weight in drawn)
    for source, weight in zip(sources, weights, strict=True):
        assert abs(counts[source.name] - scale * weight) <= 0.5
        uses = Counter(row["prompt"] for row in rows if row["source"] == source.name)
        assert len(uses) == len(source)
        assert max(uses.values()) - min(uses.values()) <= 1


def test_each_stretch_is_mixed_as_the_whole() -> None:
    mixture = Mixture([Rows("a", 300), Rows("b", 10)], [3, 1], ["a", "b"])
    assert len(mixture) == 400
    for start in range(0, 400, 40):
        assert 9 <= sum(mixture.row(index)["source"] == "b" for index in range(start, start + 40)) <= 11


def test_weights_that_make_no_mixture_are_refused() -> None:
    with pytest.raises(ValueError, match="weight of 'b' is 0"):
        Mixture([Rows("a", 3), Rows("b", 1)], [1, 0], ["a", "b"])
    with pytest.raises(ValueError, match="give small sources less weight"):
        Mixture([Rows("a", 1000), Rows("b", 1)], [1, 10**6], ["a", "b"])


def test_the_name_of_a_source_is_kept_from_a_column_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "numina.jsonl").write_text('{"source": "olympiads", "problem": "1+1=", "solution": "2"}\n')
    mixture = Mixture([FileDataset(path=str(tmp_path / "numina.jsonl"))], [1.0], ["numina"])
    assert mixture.row(0)["source"] == "numina"


def test_a_changed_row_of_a_source_is_named(tmp_path: Path) -> None:
    def mixed(prompt: str) -> Mixture:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("a", prompt, "c")))
        return Mixture([Rows("x", 6), FileDataset(path=str(path))], [1, 1], ["x", "file"])

    record = DataRecord.of(mixed("b"))
    assert record.difference(mixed("b"), "mine") is None
    assert "rows.jsonl:2 is not what it was" in str(record.difference(mixed("B"), "mine"))
