from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.plugins.rewards import math_answer
from asyncrl.plugins.rewards.math_answer import answers_agree, as_number, final_answer, math_answer_reward
from asyncrl.plugins.rewards.text import last_number_in, numeric_match
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


def test_an_answer_has_at_most_200_characters_and_a_number_in_text_100() -> None:
    for size, fits in ((200, True), (201, False)):
        number = "1" * size
        assert final_answer(f"\\boxed{{{number}}}") == (number if fits else None)
        assert answers_agree(number, number) == (as_number(number) == int(number)) == fits
        if fits:
            assert math_answer_reward({"answer": number}, f"#### {number}") == 1.0
        else:
            with pytest.raises(ValueError, match="marks no final answer of at most 200 characters"):
                math_answer_reward({"answer": number}, f"#### {number}")
    assert last_number_in("9" * 100) == int("9" * 100)
    assert last_number_in("9" * 101) is None
    assert last_number_in("5" + " " * 9_999) == 5
    assert last_number_in("5" + " " * 10_000) is None


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
        ("5 dollars per hour", "5 dollars"),
        ("5 dollars", "5 dollars/hour"),
        ("(B) Paris", "B. paris"),
        ("(B) Paris", "B"),
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
        ("(B) Paris", "(B) London"),
        ("18", "B"),
        ("B", "18"),
        ("5 dollars per hour", "5 dollars per day"),
        ("x=", "5"),
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
        (r"7\frac{-1}{2}", None),
        (r"-7\frac{0}{2}", -7),
        (r"0\frac{-1}{2}", None),
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
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0), "no limit is left to whoever computes next"


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
        assert [numeric_match(row, completion) for completion in (*right, gold)] == [1.0] * 5, gold
        assert [numeric_match(row, f"{row['question']} #### {other}") for other in wrong] == [0.0] * len(wrong), gold
    for row, other in itertools.pairwise(rows):
        same = row["answer"].rpartition("####")[2] == other["answer"].rpartition("####")[2]
        assert math_answer_reward(row, other["answer"]) == numeric_match(row, other["answer"]) == float(same)


def test_a_time_limit_that_something_swallows_is_raised_again() -> None:
    """As Python does with what is raised in a callback of the garbage collector."""
    end = time.process_time() + 10.0

    def computes() -> None:
        while time.process_time() < end:
            pass

    def continues() -> None:
        with contextlib.suppress(math_answer._OutOfTimeError):
            computes()
        computes()

    with pytest.raises(math_answer._OutOfTimeError), math_answer._at_most(0.05):
        continues()


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        ("x > 5", "5 < x"),
        ("101_2", "101_{2}"),
        ("18 square cm", "18 cm^2"),
        ("18", "18 cm²"),
        ("-5", "−5"),
        ("-5", "–5"),
        ("-5", "-\\$5"),
        ("-5", "-$5"),
        ("-5", "$-5$"),
        ("-5", "$-5"),
        ("(-1,2)", "(−1, 2)"),
        ("(B)", "B"),
        ("B", "(B)"),
        ("B", "B."),
        ("\\text{(B)}", "B"),
        ("\\textbf{(B)}", "B"),
        ("B", "\\text{(B) } 18"),
        ("B", "B. Paris"),
        ("A", "\\mathrm{(A)}"),
        ("C", "C)"),
        ("50%", "1/2"),
        ("50\\%", "0.50"),
        ("1,234.56", "1.234,56"),
        ("1234567", "1.234.567"),
        ("100000", "1,00,000"),
        ("1200", "1'200"),
        ("yes", "Yes"),
        ("True", "true"),
        ("Monday", "monday"),
        ("New York", "new york"),
        ("Alice", "alice"),
        ("ab", "ba"),
        ("xy", "yx"),
        ("\\text{No}", "no"),
        ("12/25/2024", "12/25/2024"),
        ("10:30", "10:30"),
        ("3:30 pm", "3:30 pm"),
        ("\\frac12", "0.5"),
        ("\\dfrac{1}{2}", "1/2"),
        ("\\tfrac{1}{2}", "1/2"),
        ("7\\frac12", "7.5"),
        ("7 1/2", "15/2"),
        ("7½", "7.5"),
        ("1.5\\times 10^3", "1500"),
        ("1.5e3", "1500"),
        ("1.5 × 10^3", "1500"),
        ("1.5 x 10^3", "1500"),
        ("20°C", "20"),
        ("20^\\circ C", "20"),
        ("30°", "30"),
        ("30^\\circ", "30 degrees"),
        ("\\{1,2\\}", "{2,1}"),
        ("x=1,2", "1,2"),
        ("1, 2", "2, 1"),
        ("pi", "\\pi"),
        ("\\infty", "infinity"),
        ("５", "5"),
        ("٣", "3"),
        ("18", "18."),
        ("18", "$18$."),
        ("18", "18 dollars."),
        ("18", "18\\,\\text{m}"),
        ("18\\text{ m}^2", "18"),
        ("1{,}200", "1200"),
        ("even", "even."),
        ("2/3", "2:3"),
        ("0", "-0"),
        ("3.0", "3"),
        ("007", "7"),
        ("A, B", "A,B"),
        ("\\text{A, B}", "A, B"),
        ("f(x)=2x", "2x"),
        ("y=2x+3", "2x+3"),
        ("y = 2x + 3", "3+2x=y"),
        ("10^6", "1000000"),
        ("1 million", "1,000,000"),
        ("$1.2$ million", "1200000"),
        ("6 feet", "6 ft"),
        ("5 cents", "5"),
        ("\\text{Evelyn}", "Evelyn"),
        ("Evelyn", "\\text{ evelyn}"),
        ("None", "none"),
        ("x\\in(1,2)", "(1,2)"),
        ("\\emptyset", "\\{\\}"),
        ("4.5", "4½"),
        ("10%", "10 percent"),
        ("1 \\frac{1}{2}", "1.5"),
        ("90", "90^{\\circ}"),
        ("-1/2", "\\frac{1}{-2}"),
        ("-\\frac{1}{2}", "-0.5"),
        ("5", "\\approx 5"),
        ("5", "≈ 5"),
        ("5", "~5"),
        ("B", "Option B"),
        ("B", "The correct answer is (B)"),
        ("B", "Answer: B"),
        ("18 ft²", "18 sq ft"),
        ("5 m/s^2", "5 m/s^2"),
        ("5 μm", "5"),
        ("5 µm", "5 um"),
        ("50%", "５０％"),
        ("Москва", "москва"),
        ("O'Brien", "O’Brien"),
        ("-1/2", "-½"),
        ("2 1/2 hours", "2.5 hours"),
        ("1,000", "1 000"),
        ("5 USD", "$5"),
        ("$5.00", "5"),
        ("Answer", "Answer"),
        ("Option", "option"),
        ("0.5", "1/2"),
        ("x<5", "5>x"),
        ("x \\le 5", "x ≤ 5"),
        ("x≥2", "x \\geq 2"),
        ("5", "5\\%"),
        ("24\\pi", "24π"),
        ("\\sqrt{3}", "√3"),
        ("2\\times3", "6"),
        ("[0, 1]", "[0,1]"),
        ("6", "6.0000"),
        ("6,", "6"),
        ("100", "1e2"),
        ("-0.5", "-.5"),
        ("3+4i", "4i+3"),
        ("\\text{yes}", "Yes."),
        ("neither", "Neither"),
        ("Saturday", "saturday."),
        ("4 apples", "4 oranges"),
        ("60°", "60 degrees"),
        ("3 m", "3 meters"),
        ("3 m", "3m"),
        ("\\$1,234.50", "1234.5"),
        ("1.5 million", "1500000"),
    ],
)
def test_words_choices_signs_units_and_groups_of_digits_that_mean_the_same_agree(expected: str, given: str) -> None:
    assert answers_agree(given, expected)


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        ("no", "on"),
        ("> 5", "5"),
        ("5", "> 5"),
        ("\\geq 5", "5"),
        ("≥5", "5"),
        ("x>5", "5"),
        ("101_2", "101"),
        ("101_{2}", "5"),
        ("18 cm²", "18 cm³"),
        ("18 cm^2", "18 cm^3"),
        ("18\\text{ cm}^2", "18\\text{ cm}^3"),
        ("18 cm", "18 cm^2"),
        ("18 m/s", "18 m/h"),
        ("18 km/h", "18 mph"),
        ("5", "−5"),
        ("B", "C"),
        ("(B)", "(C)"),
        ("1200", "1.200"),
        ("1.2", "1,2"),
        ("Yes", "no"),
        ("true", "false"),
        ("yes", "y"),
        ("stop", "pots"),
        ("\\text{no}", "on"),
        ("odd", "ddo"),
        ("2024-01-05", "2018"),
        ("1/2/4", "1/8"),
        ("3:30 pm", "3:30 am"),
        ("20°C", "20°F"),
        ("[1,2]", "(1,2)"),
        ("(1,2)", "(2,1)"),
        ("5", "±5"),
        ("\\pm 5", "5"),
        ("x^2", "x^3"),
        ("2:3", "3:2"),
        ("5", "five"),
        ("18 and a half", "18"),
        ("", ""),
        ("A and B", "B and A"),
        ("6 ft", "6 in"),
        ("5 dollars", "5 cents"),
        ("1/3", "0.333333"),
        ("3 hours 30 minutes", "3.5 hours"),
        ("9x", "9"),
        ("2x", "2"),
        ("5k", "5"),
        ("2 cm", "2 seconds"),
        ("12:00", "noon"),
        ("B", "option C"),
        ("5 m/s", "5 m/s²"),
        ("5 μm", "5 mm"),
        ("北京", "京北"),
        ("5 kg", "5 g"),
        ("5 cm²", "5 m²"),
        ("3", "\\text{three}"),
        ("x<5", "x > 5"),
        ("4 hours", "4 days"),
        ("10 dollars", "10 euros"),
        ("5x", "5"),
        ("III", "3"),
    ],
)
def test_words_relations_bases_dates_and_units_are_no_plain_numbers(expected: str, given: str) -> None:
    assert not answers_agree(given, expected)


@pytest.mark.parametrize(
    ("text", "number", "reward"),
    [
        ("The temperature is −5", "-5", 1),
        ("The temperature is −5", "5", 0),
        ("lost: -$5", "-5", 1),
        ("lost: -$5", "5", 0),
        ("It is -\\$5.", "-5", 1),
        ("is –5.", "-5", 1),
        ("10-5", "5", 1),
        ("range 3-5", "-5", 0),
        ("range 3-5", "5", 1),
        ("pages 10-15", "-15", 0),
        ("3–5", "-5", 0),
        ("is 3/5", "3/5", 1),
        ("is 3/5", "5", 0),
        ("is 1e5", "100000", 1),
        ("is 1e5", "5", 0),
        ("7 1/2", "15/2", 1),
        ("7 1/2", "2", 0),
        ("7 1/2", "7.5", 1),
        ("18%.", "18", 1),
        ("Answer:18", "18", 1),
        ("x=18", "18", 1),
        ("18kg", "18", 1),
        ("18 cm^2", "18", 1),
        ("2^10", "10", 0),
        ("at 10:30", "30", 0),
        ("1.5 × 10^3", "1500", 1),
        ("101_2", "101", 0),
        ("1,200", "1200", 1),
        ("1.234,56", "1234.56", 1),
        ("US$18", "18", 1),
        ("\\frac{3}{5}", "0.6", 1),
        ("$\\frac{3}{5}$", "5", 0),
        ("(18)", "18", 1),
        ("**18**", "18", 1),
        ("\\boxed{18}", "18", 1),
        ("\\boxed{-5}", "-5", 1),
        ("5 - 3", "3", 1),
        ("- 5", "5", 1),
        ("1e100", "1", 0),
        ("1.2.3", "3", 0),
        ("３", "3", 1),
        ("$1,000,000.50", "1000000.5", 1),
        ("step 1: a. Step 2: 7", "7", 1),
        ("12/25/2024", "2024", 0),
        ("no", "0", 0),
        ("18 (eighteen)", "18", 1),
        ("costs 5¢", "5", 1),
        ("#### - 5", "-5", 1),
        ("it is $= - 5$", "-5", 1),
    ],
)
def test_the_last_number_is_read_with_its_sign_and_as_a_whole(text: str, number: str, reward: float) -> None:
    assert numeric_match({"answer": number}, text) == reward
    assert math_answer_reward({"answer": number}, text, last_number=True) == reward


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed 18", "18"),
        ("\\boxed18", "18"),
        ("$\\boxed 18$", "18"),
        ("\\boxed{18}", "18"),
        ("\\boxed{}", ""),
        ("\\boxed{1} \\boxed{}", ""),
        ("\\boxed {18}", "18"),
        ("\\boxed{\\text{a}}", "\\text{a}"),
        ("#### 18", "18"),
        ("\\boxed{1}\n#### 2", "1"),
        ("\\fbox{3}", "3"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed 18 and \\boxed{19}", "19"),
        ("\\boxed 17 or \\boxed 18 or", "18"),
        ("<answer>3</answer> or <answer>4</answer>", "4"),
        ("#### 17\n#### 18\nor 19", "18"),
        ("\\boxed\\frac12 .", "\\frac12"),
        ("\\boxed{\\left\\{1\\right\\}}", "\\left\\{1\\right\\}"),
        ("\\boxed{1", None),
        ("<think>5</think><answer>4</answer>", "4"),
        ("<answer>so \\boxed{4}</answer>", "4"),
        ("<answer>4", None),
    ],
)
def test_the_final_answer_is_that_of_the_last_box(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "number", "reward"),
    [
        ("1/0", "1", 0),
        ("is 7½", "7.5", 1),
        ("is 7 \\frac{1}{2}", "7.5", 1),
        ("It costs $5.00.", "5", 1),
        ("−5°C", "-5", 1),
        ("(−5)", "-5", 1),
        ("= −5", "-5", 1),
        ("So −$1,200.50", "-1200.5", 1),
        ("Total: 5,", "5", 1),
        ("5%", "5", 1),
        ("+5", "5", 1),
        ("1/2", "0.5", 1),
        ("5!", "5", 1),
        ("5?", "5", 1),
        ("5...", "5", 1),
        ("5)", "5", 1),
        ("'5'", "5", 1),
        ("5\\%", "5", 1),
        ("\\(5\\)", "5", 1),
        ("5-", "5", 1),
        ("—5", "5", 1),
        ("~5", "5", 1),
        (">5", "5", 1),
        ("5e-3", "0.005", 1),
        ("0x1F", "31", 0),
        ("1st", "1", 1),
        ("no. 5", "5", 1),
        ("#5", "5", 1),
        ("v2", "2", 0),
        ("5km/h", "5", 1),
        ("5/km", "5", 1),
        ("5 / 10", "0.5", 1),
        ("10 / 5 = 2", "2", 1),
        ("3*4=12", "12", 1),
        ("2x=10", "10", 1),
        ("x=-5", "-5", 1),
        ("5–10", "10", 1),
        ("−5 – −3", "-3", 1),
        ("-3/5", "-0.6", 1),
        ("½", "0.5", 1),
        ("7½", "7.5", 1),
        ("−½", "-0.5", 1),
        ("–½", "-0.5", 1),
    ],
)
def test_numbers_in_text_are_read_in_their_usual_forms(text: str, number: str, reward: float) -> None:
    assert numeric_match({"answer": number}, text) == reward
