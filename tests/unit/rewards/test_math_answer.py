from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rewards.math_answer import as_number, final_answer, math_answer_reward

GSM8K_ROW = {"answer": "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\n#### 1,200"}


@pytest.mark.parametrize(
    "completion",
    [
        "#### 1200",
        "so #### $1,200.",
        "\\boxed{1200}",
        "\\boxed{1200.0}",
        "a\n#### 1200\nDone.",
        "\\boxed{\\frac{2400}{2}}",
    ],
)
def test_the_same_number_in_another_notation_is_right(completion: str) -> None:
    assert math_answer_reward(GSM8K_ROW, completion) == 1.0


@pytest.mark.parametrize("completion", ["", "1200", "#### 1201", "####", "\\boxed{}", "\\boxed{1200", "#### 12 00 1"])
def test_another_number_or_an_unmarked_one_is_wrong(completion: str) -> None:
    assert math_answer_reward(GSM8K_ROW, completion) == 0.0


def test_the_last_number_counts_only_where_it_is_asked_for() -> None:
    assert math_answer_reward(GSM8K_ROW, "it is 7, no, 1,200.", last_number=True) == 1.0
    assert math_answer_reward(GSM8K_ROW, "it is 7, no, 1,200.") == 0.0


def test_the_last_box_is_the_answer_and_may_nest() -> None:
    assert final_answer("\\boxed{1} then \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"


def test_text_answers_agree_without_spaces() -> None:
    assert math_answer_reward({"answer": "\\boxed{x + 1}"}, "\\boxed{x+1}") == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [("-\\frac{1}{2}", -0.5), ("1/4", 0.25), ("50%", 50), ("-3.50", -3.5), ("x", None), ("1/0", None)],
)
def test_numbers_are_read_in_their_usual_notations(text: str, value: float | None) -> None:
    assert as_number(text) == value


@given(st.text(max_size=300))
def test_no_completion_raises(completion: str) -> None:
    assert math_answer_reward(GSM8K_ROW, completion, last_number=True) in (0.0, 1.0)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "completion", ["#### " + "9" * 100_000, "\\boxed{" * 20_000, "#### 1e999999999", "#### 1/" + "7" * 10_000]
)
def test_a_hostile_completion_is_wrong_without_delay(completion: str) -> None:
    assert math_answer_reward(GSM8K_ROW, completion) == 0.0
