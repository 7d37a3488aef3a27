"""An environment of `verifiers` 0.2 as its users write them; nothing in it knows asyncrl. Copy this file."""

from __future__ import annotations

import random
from typing import Any

import verifiers as vf
from datasets import Dataset


def text_of(completion: Any) -> str:
    return "".join(str(message["content"] or "") for message in completion)


def right(completion: Any, answer: str, **kwargs: Any) -> float:
    """1 for the sum, else a little for even digits."""
    text = text_of(completion)
    return 1.0 if answer in text else sum(char in "02468" for char in text) / (4 * max(len(text), 1))


def length(completion: Any, **kwargs: Any) -> float:
    return float(len(text_of(completion)))


def sums(rows: int, seed: int) -> Dataset:
    draw = random.Random(seed)
    pairs = [(draw.randrange(10, 100), draw.randrange(10, 100)) for _ in range(rows)]
    return Dataset.from_list([{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs])


def load_environment(rows: int = 1000) -> vf.Environment:
    rubric = vf.Rubric(funcs=[right, length], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(dataset=sums(rows, 0), eval_dataset=sums(64, 1), rubric=rubric)
