"""The tasks of SmolLM2's experiments: what is held out, what a sentence has to be, when a worked example is right."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.api.reward import is_verdict
from asyncrl.config.load import experiments_dir
from asyncrl.config.plugin_code.import_paths import load_plugin
from asyncrl.plugins.rewards.text import numeric_match

FILE = experiments_dir() / "smollm2.py"


def of(name: str) -> Any:
    return load_plugin(f"{FILE}:{name}")


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("The sea is quiet at night.", 1.0),
        ("Quiet waves touch the sea!\n", 1.0),
        ("The sea is quiet at night", 0.0),
        ("The sea is quiet. I like it.", 0.0),
        ("The sea is calm at night.", 0.0),
        ("The sea is quietly at rest.", 0.0),
        ("Quiet.", 0.0),
        ("The sea uses the word quiet often.", 0.0),
        ('The sea is "quiet" at night.', 0.0),
        ("A quiet train is a quiet train.", 0.0),
        ("The sea is quiet and the sky is too.", 1.0),
        ("The sea is quiet at night, and the boats and the birds sleep until the sun.", 0.0),
        ("Here is one:\nThe sea is quiet at night.", 0.0),
        ("", 0.0),
    ],
)
def test_a_right_answer_is_one_short_sentence_with_the_word_and_not_about_it(answer: str, right: float) -> None:
    reward = of("one_short_sentence")
    assert is_verdict(reward)
    assert reward({"word": "quiet"}, answer) == right


def test_no_word_and_no_problem_of_the_held_out_split_is_trained() -> None:
    train, held_out = (
        {of("Sentences")(split=split, num_rows=2000).row(i)["word"] for i in range(2000)}
        for split in ("train", "held_out")
    )
    assert len(train) > 30
    assert len(held_out) > 5
    assert not train & held_out
    train, held_out = (
        {str(of("WordProblems")(split=split, num_rows=2000).row(i)["steps"]) for i in range(2000)}
        for split in ("train", "held_out")
    )
    assert not train & held_out


def test_a_careful_worked_example_is_right_and_a_careless_one_often_is_not() -> None:
    for careless, least, most in ((0.0, 1.0, 1.0), (0.25, 0.4, 0.8)):
        problems = of("WordProblems")(careless=careless)
        rows = [problems.row(index) for index in range(300)]
        right = [numeric_match(row, problems.demonstration(row)) for row in rows]
        assert least <= sum(right) / len(right) <= most
        assert all(int(row["answer"]) > 0 for row in rows)


@pytest.mark.parametrize(("name", "value", "message"), [("split", "test", "split"), ("num_rows", 0, "num_rows")])
def test_a_wrong_argument_is_named(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of("Sentences")(**{name: value})
    with pytest.raises(IndexError, match="row 5"):
        of("WordProblems")(num_rows=5).row(5)
