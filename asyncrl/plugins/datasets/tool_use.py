"""The tool demo's task: arithmetic that a small model cannot do without tools, and a calculator that it may call.

    user        What is 347*29+58?
    assistant   <tool_call>{"name": "calculator", "arguments": {"expression": "347*29+58"}}</tool_call>
    tool        10121
    assistant   It is 10121.

`CalculatorQuestions` are the questions for RL. `CalculatorDemonstrations` train a base model that mostly answers
without a call (wrongly), sometimes calls the calculator, and then often miswrites the call. So RL has something to
select. As in `arithmetic`, rows are computed, and the split of a problem depends on the problem alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any
from zlib import crc32

from asyncrl.plugins.datasets.arithmetic import HELD_OUT_SHARE, ComputedRows, Split

SIGNATURE = "calculator(expression)"
"""Description of the demo's tool in its chat template."""


def problem(rng: random.Random) -> str:
    """Return an expression of two or three numbers with a product in it."""
    product = f"{rng.randint(12, 999)}*{rng.randint(12, 99)}"
    form = rng.randrange(3)
    if form == 0:
        return product
    return f"{product}{'+-'[form - 1]}{rng.randint(12, 999)}"


def split_of(expression: str) -> Split:
    """Return the split of a problem, the same for every seed."""
    return "held_out" if crc32(expression.encode()) % HELD_OUT_SHARE == 0 else "train"


def value_of(expression: str) -> int:
    """Return the value of `expression`, which comes from `problem`."""
    product, sign, rest = expression, 1, 0
    for operator in "+-":
        if operator in expression:
            product, _, last = expression.partition(operator)
            sign, rest = (1 if operator == "+" else -1), int(last)
    left, _, right = product.partition("*")
    return int(left) * int(right) + sign * rest


class CalculatorQuestions(ComputedRows):
    """`num_rows` questions of one split; see `ComputedRows` for the arguments."""

    def expression(self, index: int) -> str:
        """Return the problem of row `index`.

        Raises:
            IndexError: `index` is not within the dataset.
        """
        rng = self.rng(index)
        while split_of(expression := problem(rng)) != self.split:
            pass
        return expression

    def row(self, index: int) -> dict[str, Any]:
        """`prompt` (text of the user's turn), `answer` (digits) and `index`."""
        expression = self.expression(index)
        return {"prompt": f"What is {expression}?", "answer": str(value_of(expression)), "index": index}


class CalculatorDemonstrations(CalculatorQuestions):
    """Single answers within conversations, rendered as the demo's chat template renders them.

    Args:
        in_head: share of questions that are answered without a call, at random.
        miswritten: share of the calls that are wrong: another expression, or no JSON.
        after_call: share of the rows that are the answer after a call.
    """

    def __init__(
        self,
        *,
        split: Split = "train",
        seed: int = 0,
        num_rows: int = 16384,
        in_head: float = 0.0,
        miswritten: float = 0.0,
        after_call: float = 0.3,
    ) -> None:
        super().__init__(split=split, seed=seed, num_rows=num_rows)
        for name, share in (("in_head", in_head), ("miswritten", miswritten), ("after_call", after_call)):
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"dataset {name} is {share}: it is a share, give 0 to 1")
        self._in_head, self._miswritten, self._after_call = in_head, miswritten, after_call

    def row(self, index: int) -> dict[str, Any]:
        """`prompt` (all that the model reads), `answer`, `index` and the answer to imitate, `imitate`."""
        rng = random.Random(f"{self.seed}/demonstration/{index}")
        expression = self.expression(index)
        prompt = conversation(expression)
        if rng.random() < self._after_call:
            shown = str(value_of(expression)) if rng.random() < 0.5 else str(rng.randint(-999, 99999))
            prompt, imitate = answered(prompt, call_text(expression), shown), f"It is {shown}."
        elif rng.random() < self._in_head:
            imitate = f"It is {rng.randint(100, 99999)}."
        else:
            imitate = call_text(expression)
            if rng.random() < self._miswritten:
                imitate = _miswritten(expression, rng)
        return {"prompt": prompt, "answer": str(value_of(expression)), "index": index, "imitate": imitate}

    def demonstration(self, row: Mapping[str, Any]) -> str:
        """Return the answer that supervised training imitates."""
        return str(row["imitate"])


def conversation(expression: str) -> str:
    """Return the text that the model reads before its first answer."""
    return (
        f"<|im_start|>system\nTools: {SIGNATURE}<|im_end|>\n"
        f"<|im_start|>user\nWhat is {expression}?<|im_end|>\n<|im_start|>assistant\n"
    )


def call_text(expression: str) -> str:
    """Return a call of the calculator in the model's format."""
    return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def answered(prompt: str, call: str, result: str) -> str:
    """Return the text that the model reads after its call."""
    response = f"<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>"
    return f"{prompt}{call}<|im_end|>\n{response}\n<|im_start|>assistant\n"


def _miswritten(expression: str, rng: random.Random) -> str:
    """Return a wrong call: half of them have another expression, half are not JSON."""
    if rng.random() < 0.5:
        return call_text(expression).replace('"}}', '"}')
    at = rng.randrange(len(expression))
    wrong = str(rng.randrange(10)) if expression[at].isdigit() else rng.choice("+-*")
    return call_text(expression[:at] + wrong + expression[at + 1 :])
