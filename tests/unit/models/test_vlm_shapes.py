"""The experiment `vlm_shapes`: its pictures, and the base model that comes with the package."""

from __future__ import annotations

import json
import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest

from asyncrl.api.picture import picture_from

sys.path.insert(0, str(Path(__file__).parents[3] / "experiments" / "recipes"))

from vlm_shapes_base import FOLDER, RECORD_FILE, accuracy_of, shapes

RECORD = json.loads((FOLDER / RECORD_FILE).read_text(encoding="utf-8"))


def test_no_held_out_picture_is_trained_on_and_none_tells_its_answer_otherwise() -> None:
    splits = [[shapes(split).row(number) for number in range(len(shapes(split)))] for split in ("train", "held_out")]
    seen = [{picture_from(row["images"][0]).sha256 for row in rows} for rows in splits]
    assert [len(each) for each in seen] == [len(rows) for rows in splits]
    assert not seen[0] & seen[1]
    assert 180 < len(seen[1]) < 260
    answers = [row["answer"] for row in splits[1]]
    assert sorted(set(answers)) == [*"12345678"]
    assert max(map(answers.count, answers)) / len(answers) < 0.25


def test_a_blind_rows_picture_is_of_its_split_and_does_not_tell_its_answer() -> None:
    plain, blind = shapes("held_out"), shapes("held_out", blind=True)
    rows = [(plain.row(number), blind.row(number)) for number in range(len(plain))]
    assert all((row["prompt"], row["answer"]) == (other["prompt"], other["answer"]) for row, other in rows)
    reported = {picture_from(row["images"][0]).sha256: row["answer"] for row, _ in rows}
    swapped = [(reported[picture_from(other["images"][0]).sha256], other["answer"]) for _, other in rows]
    assert Counter(shown for shown, _ in swapped) == Counter(reported.values()), "the same pictures"
    assert sum(shown == answer for shown, answer in swapped) / len(swapped) < 0.25


def test_the_package_has_the_base_model_as_it_was_made() -> None:
    """After a change to it: `python experiments/recipes/vlm_shapes_base.py`."""
    files = {file.name: file for file in FOLDER.iterdir() if file.name != RECORD_FILE}
    assert {name: sha256(file.read_bytes()).hexdigest() for name, file in files.items()} == RECORD["sha256"]
    assert sum(file.stat().st_size for file in files.values()) < 1 << 20


def test_the_base_model_sees_some_shapes_and_guesses_without_looking() -> None:
    accuracy = accuracy_of(FOLDER)
    assert 0.3 < accuracy < 0.5
    assert accuracy == pytest.approx(RECORD["greedy_accuracy"], abs=0.03)
    assert accuracy_of(FOLDER, blind=True) < 0.25
