from __future__ import annotations

import contextlib
import json
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.plugins.rewards import math_answer
from asyncrl.plugins.rewards.math_answer import answers_agree, as_number, final_answer, math_answer_reward
from tests.examples import examples

GSM8K_ROW = {"answer": "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\n#### 1,200"}
GSM8K_TEST = [folder / "shared/data/gsm8k/test.jsonl" for folder in Path(__file__).resolve().parents]


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
    assert math_answer_reward({"answer": "12"}, "it is 1,2", last_number=True) == 0.0


def test_the_last_box_is_the_answer_and_may_nest() -> None:
    assert final_answer("\\boxed{1} then \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        ("1200", "1{,}200"),
        ("1200", r"1\,200"),
        ("18", r"\$18"),
        ("18", "18$"),
        ("-18", "-$18"),
        ("18", "18 dollars"),
        ("18", r"18\text{ dollars}"),
        ("18", r"18~\text{eggs}"),
        ("18", r"18 \text{ cm}^2"),
        ("18", "18cm"),
        ("18", "18 eggs per day"),
        ("18", r"\(18\)"),
        ("18", "x = 18"),
        ("x=18", "18"),
        ("x=18", "x = 18"),
        ("18", r"18^{\circ}"),
        ("12000", "12 thousand"),
        ("50%", "50"),
        ("50", r"50\%"),
        ("50", "50 percent"),
        ("0.5", "50%"),
        ("50%", "0.5"),
        ("1/2", r"\frac12"),
        ("1/2", r"\dfrac{1}{2}"),
        ("-1/2", r"\frac{-1}{2}"),
        ("15/2", r"7\frac{1}{2}"),
        ("15/2", "7 1/2"),
        ("1/2", ".5"),
        ("-5", "- 5"),
        ("(1,2]", r"\left(1, 2\right]"),
        ("x+1", "1+x"),
        (r"\{1,2\}", r"\{2,1\}"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        (r"\frac{\pi}{2}", r"\pi/2"),
        ("A", r"\text{A}"),
        (r"\text{Monday}", "Monday"),
        ("x + 1", "x+1"),
        ("18", "**18**"),
        ("18", "`18`"),
        ("-18", "\u201318"),
        ("5.5", "5\u00bd"),
        ("1200", "1\u202f200"),
        ("1200", "1.2e3"),
        ("18", "US$18"),
        ("18", "18 dollars/hour"),
        ("18", "18 times"),
        ("5", "5 L"),
        ("2000000000000", "2 trillion dollars"),
        ("1800", "18 hundred dollars"),
        ("0.001", "10^-3"),
        ("3 pm", "3 p.m."),
        ("5 hours", "5 hrs"),
        (r"5\text{ cm}", "5 centimetres"),
        ("3 pm", "3"),
    ],
)
def test_the_same_answer_written_otherwise_is_right(expected: str, given: str) -> None:
    assert answers_agree(given, expected)


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        ("12", "1,2"),
        ("1200", "12,00"),
        ("1200", "12 00"),
        ("1200", "1,2,00"),
        ("18", "18x"),
        ("18", "18k"),
        ("18", "18 million"),
        ("18", "-18"),
        ("18", "18 and 20"),
        ("18", "18^2"),
        ("18", "x="),
        ("x=18", "y=18"),
        ("50", "0.5"),
        ("1/3", "0.3333"),
        ("3.14", "3.1400001"),
        ("[1,2)", "(1,2)"),
        ("x+1", "x-1"),
        ("18", ""),
        ("18", "18 and a half"),
        ("18", r"18\text{ and a half}"),
        ("18", "18 minus two"),
        ("18", "18 times ten"),
        ("18", "18 divided by x"),
        ("18", "18 squared"),
        ("18", "18 or nineteen"),
        ("18", "18 tenths"),
        ("18", "18 pi"),
        ("18000", "18 dollars per thousand"),
        ("3 am", "3 pm"),
        ("5 m", "5 km"),
        ("5 cents", "5 dollars"),
        (r"5\text{ cm}", "5 mm"),
    ],
)
def test_another_answer_is_wrong_however_like_it_is_written(expected: str, given: str) -> None:
    assert not answers_agree(given, expected)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-\\frac{1}{2}", Fraction(-1, 2)),
        ("1/4", Fraction(1, 4)),
        ("50%", 50),
        ("-3.50", Fraction(-7, 2)),
        ("2 billion", 2 * 10**9),
        ("x", None),
        ("1/0", None),
        ("1,2", None),
    ],
)
def test_numbers_are_read_in_their_usual_notations(text: str, value: Fraction | None) -> None:
    assert as_number(text) == value


@pytest.mark.parametrize("box", [r"\boxed {18}", r"\fbox{18}", "#### **18**", "**#### 18**"])
def test_a_box_is_one_however_it_is_written(box: str) -> None:
    assert math_answer_reward({"answer": "18"}, f"So it is {box}") == 1.0


def test_any_of_several_answers_is_right_and_a_row_without_one_is_an_error() -> None:
    assert math_answer_reward({"answer": ["18", "#### 19"]}, r"\boxed{19}") == 1.0
    assert math_answer_reward({"answer": 18}, r"\boxed{18}") == 1.0
    for row, message in [
        ({"answer": None}, "the row's answer is None: give each row one"),
        (
            {"question": "?", "solution": "18"},
            "fields are question, solution, with no answer: give each row",
        ),
        ({"answer": []}, "the row's answer is []"),
        ({"answer": " "}, "the row's answer is empty"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            math_answer_reward(row, r"\boxed{None}")


@settings(max_examples=examples(50))
@given(st.text(max_size=60))
def test_no_completion_raises(completion: str) -> None:
    assert math_answer_reward(GSM8K_ROW, completion, last_number=True) in (0.0, 1.0)
    assert math_answer_reward(GSM8K_ROW, f"#### {completion}") in (0.0, 1.0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "completion",
    ["#### " + "9" * 100_000, "\\boxed{" * 20_000, "#### 1e999999999", "#### 1/" + "7" * 10_000, "#### 10^8!"],
)
def test_a_hostile_completion_is_wrong_without_delay(completion: str) -> None:
    assert math_answer_reward(GSM8K_ROW, completion) == 0.0


def test_a_busy_machine_makes_no_answer_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is on this process's CPU time: a parser that is kept waiting for longer has as much of it as before."""
    parse, verify = math_answer._math_verify()
    assert answers_agree("2+x", "x+2")  # what it does once, the first time, is done

    waits = [math_answer.VERIFY_LIMIT_S + 0.1]

    def kept_waiting(*args: object, **kwargs: object) -> object:
        while waits:
            time.sleep(waits.pop())
        return parse(*args, **kwargs)

    monkeypatch.setattr(math_answer, "_math_verify", lambda: (kept_waiting, verify))
    assert answers_agree("1+x", "x+1")
    assert not waits


def test_every_gold_answer_of_gsm8k_is_right_and_every_other_is_wrong() -> None:
    file = next((path for path in GSM8K_TEST if path.is_file()), None)
    if file is None:
        pytest.skip("the test problems of GSM8K are not here")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 1319
    for row in rows:
        gold = row["answer"].rpartition("####")[2].strip()
        value = int(gold.replace(",", ""))
        boxed, with_unit = f"So it is \\boxed{{{gold}}}.", f"\\boxed{{{value}\\text{{ in all}}}}"
        right = [row["answer"], boxed, with_unit, f"#### ${value}.00"]
        wrong = [value + 1, value - 1, -value or 3, 10 * value or 3, f"{value or 1}/7", f"{value}.5", f"1{gold}"]
        assert [math_answer_reward(row, completion) for completion in right] == [1.0] * len(right), gold
        verdicts = [math_answer_reward(row, f"{row['question']} #### {other}") for other in wrong]
        assert verdicts == [0.0] * len(wrong), gold


def test_a_time_limit_that_something_swallows_is_raised_again() -> None:
    """As Python does with what is raised in a callback of the garbage collector."""
    end = time.process_time() + 10.0

    def computes() -> None:
        while time.process_time() < end:
            pass

    def goes_on() -> None:
        with contextlib.suppress(math_answer._OutOfTimeError):
            computes()
        computes()

    with pytest.raises(math_answer._OutOfTimeError), math_answer._at_most(0.05):
        goes_on()
