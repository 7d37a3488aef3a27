"""Tasks for `smollm2_sentence.yaml` and `smollm2_sums.yaml`, which a small chat model learns on two CPU cores.

    Sentences       user        Write one short sentence about the sea that uses the word "quiet".
                    assistant   The sea is quiet at night.

    WordProblems    user        Mia has 12 apples. She buys 9 more and gives 4 away. How many apples does she have now?
                    assistant   12 + 9 = 21. 21 - 4 = 17. The answer is 17.

Rows are computed, not stored. Words and numbers of the held-out split occur in no row of training.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any
from zlib import crc32

from asyncrl.api import verdict
from asyncrl.plugins.datasets.arithmetic import ComputedRows, Split

SUBJECTS = (
    *("the sea", "a dog", "the moon", "a river", "an old house", "the winter", "a garden", "a train", "the market"),
    *("a teacher", "the rain", "a mountain", "the night", "a bird", "a small town", "the morning", "a friend"),
    *("a library", "the forest", "a kitchen", "the wind", "a bridge", "a child", "a painter", "the summer", "a farm"),
)
WORDS = (
    *("quiet", "warm", "yellow", "slowly", "never", "bright", "heavy", "again", "alone", "gentle"),
    *("strange", "deep", "early", "golden", "empty", "happy", "narrow", "always", "broken", "simple"),
    *("distant", "fresh", "hidden", "soft", "lonely", "quick", "silver", "tired", "wild", "young"),
    *("before", "clean", "famous", "green", "honest", "loud", "open", "proud", "round", "sharp"),
    *("sudden", "together", "useful", "white", "whole", "wooden", "angry", "calm", "careful", "dark"),
    *("elegant", "free", "great", "hungry", "large", "modern", "noisy", "perfect", "rare", "safe"),
)
HELD_OUT_SHARE = 6
"""One word, and one problem, in six is held out."""


def _split_of(key: str) -> Split:
    return "held_out" if crc32(key.encode()) % HELD_OUT_SHARE == 0 else "train"


class Sentences(ComputedRows):
    """A subject, and a word that the sentence has to use; see `ComputedRows` for the arguments."""

    def row(self, index: int) -> dict[str, Any]:
        """`prompt` and `word`."""
        rng = self.rng(index)
        word = rng.choice([word for word in WORDS if _split_of(word) == self.split])
        return {
            "prompt": f'Write one short sentence about {rng.choice(SUBJECTS)} that uses the word "{word}".',
            "word": word,
        }


@verdict
def one_short_sentence(data: Mapping[str, Any], completion: str) -> float:
    """1 for one ended sentence of five to twelve words that has the row's `word`, else 0.

    Two ways round the task earn nothing, since a model learns them otherwise: a sentence about the word ('The moon uses
    the word "narrow".') and one that says a word of four letters or more twice ("A white train has a white train.").
    """
    text = completion.strip()
    words = re.findall(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", text.lower())
    ended = len(re.findall(r"[.!?]", text)) == 1 and text[-1] in ".!?"
    telling = [word for word in words if len(word) >= 4]
    ways_round = "word" in words or '"' in text or len(set(telling)) < len(telling)
    return float(ended and "\n" not in text and 5 <= len(words) <= 12 and data["word"] in words and not ways_round)


_PEOPLE = (("Mia", "She"), ("Tom", "He"), ("Ana", "She"), ("Sam", "He"), ("Lea", "She"), ("Max", "He"), ("Zoe", "She"))
_THINGS = ("apples", "books", "coins", "stamps", "shells", "marbles", "cards", "pencils", "eggs", "balloons", "stones")


class WordProblems(ComputedRows):
    """Two steps of addition, subtraction or multiplication, in words.

    Args:
        careless: probability that a step of `demonstration` is off by one, two or ten. A model that has learnt from
            such demonstrations is often right and often not, so that RL has something to select.
    """

    def __init__(self, *, careless: float = 0.0, **rows: Any) -> None:
        super().__init__(**rows)
        self._careless = careless

    def row(self, index: int) -> dict[str, Any]:
        """`prompt`, `answer` (digits) and `steps`, the sums in order: [left, sign, right]."""
        rng = self.rng(index)
        while True:
            has, gets, gives = rng.randint(5, 20), rng.randint(2, 10), rng.randint(2, 10)
            form = rng.randrange(3)
            if form == 2:
                has, gets = rng.randint(2, 6), rng.randint(2, 9)
            first = has * gets if form == 2 else has + gets
            if first > gives and _split_of(f"{has},{gets},{gives}") == self.split:
                break
        (name, she), thing = rng.choice(_PEOPLE), rng.choice(_THINGS)
        begun, change = {
            0: (f"{name} has {has} {thing}. {she} buys {gets} more", f"and gives {gives} away"),
            1: (f"{name} has {has} {thing} and finds {gets} more", f"Then {she.lower()} loses {gives} of them"),
            2: (f"{name} has {has} boxes of {gets} {thing} each", f"{she} sells {gives} {thing}"),
        }[form]
        story = f"{begun} {change}." if form == 0 else f"{begun}. {change}."
        return {
            "prompt": f"{story} How many {thing} does {name} have now?",
            "answer": str(first - gives),
            "steps": [[has, "*" if form == 2 else "+", gets], [first, "-", gives]],
        }

    def demonstration(self, row: Mapping[str, Any]) -> str:
        """Return the answer that supervised training imitates, step by step."""
        rng, steps, value = random.Random(row["prompt"]), [], None
        for left, sign, right in row["steps"]:
            left = left if value is None else value
            value = {"+": left + right, "-": left - right, "*": left * right}[sign]
            if rng.random() < self._careless:
                value = max(0, value + rng.choice((-10, -2, -1, 1, 2, 10)))
            steps.append(f"{left} {sign} {right} = {value}.")
        return " ".join((*steps, f"The answer is {value}."))
