"""A record of the data tells the first line that is not what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.data.datasets import DataRecord, Dataset, load_dataset
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset

LINES = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(5)]


def load(path: Path, lines: list[str], **args: object) -> Dataset:
    path.write_text("\n".join(lines) + "\n")
    return load_dataset(str(path), args, "train", 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.jsonl"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (LINES[:3], "data.jsonl:3 is the last line with a row of training; this trial began with 2 more"),
        ([*LINES, LINES[0]], "data.jsonl:6 is new; this trial began with the 5 rows before it"),
        ([*LINES[:2], "", LINES[3], LINES[2], LINES[4]], "data.jsonl:4 is not what it was"),
        (
            [*LINES[:3], LINES[3].replace("3+1", "9+1")],
            "data.jsonl:4 is not what it was when this trial began (row 3; 4",
        ),
    ],
)
def test_the_first_line_that_differs_is_named(path: Path, lines: list[str], message: str) -> None:
    record = DataRecord.of(load(path, LINES))
    difference = record.difference(load(path, lines), str(path))
    assert difference is not None
    assert message in difference


def test_the_same_rows_are_the_same_data_and_the_record_survives_the_disk(path: Path, tmp_path: Path) -> None:
    DataRecord.of(load(path, LINES)).write(tmp_path / "record.json")
    record = DataRecord.read(tmp_path / "record.json")
    assert record.difference(load(path, ["", *LINES, ""]), str(path)) is None


def test_only_rows_of_the_training_split_count(path: Path) -> None:
    lines = [json.dumps({"prompt": f"{i}+1="}) for i in range(40)]
    share = {"held_out_share": 0.5}
    held_out = load_dataset(str(path), share, "held_out", 0) if load(path, lines) else None
    assert held_out is not None
    last = held_out.row(len(held_out) - 1)["prompt"]
    record = DataRecord.of(load(path, lines, **share))
    changed = [
        json.dumps({"prompt": last, "answer": "?"}) if json.loads(line)["prompt"] == last else line for line in lines
    ]
    assert record.difference(load(path, changed, **share), str(path)) is None


def test_of_a_class_the_number_of_rows_is_compared() -> None:
    record = DataRecord.of(ArithmeticDataset(num_rows=8))
    assert record.difference(ArithmeticDataset(num_rows=8, seed=3), "mine:Sums") is None
    assert record.difference(ArithmeticDataset(num_rows=7), "mine:Sums") == (
        "'mine:Sums' has 7 rows; this trial began with 8"
    )
