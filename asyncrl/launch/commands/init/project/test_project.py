"""A test of your code; `pytest` runs it in a second, without a model."""

import json
from pathlib import Path

from reward import score

ROWS = [json.loads(line) for line in (Path(__file__).parent / "rows.jsonl").read_text().splitlines()]


def test_every_row_has_an_answer_that_the_reward_finds_right() -> None:
    for row in ROWS:
        assert score(row, f"some steps#{row['answer']}") == 1.0


def test_a_wrong_answer_and_none_at_all_earn_nothing() -> None:
    assert score(ROWS[0], "some steps#no number") == 0.0
    assert score(ROWS[0], "") == 0.0
