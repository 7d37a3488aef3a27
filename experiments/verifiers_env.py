"""An environment of `verifiers` 0.2 as its users write them; nothing in it knows asyncrl. Copy this file."""

from __future__ import annotations

import random
from typing import Any

import verifiers as vf
from datasets import Dataset


class Carry(vf.MultiTurnEnv):
    """Sums; who is wrong is told so once and tries again."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": ";" + state["prompt"][-1]["content"]}]

    @vf.stop
    async def solved(self, state: Any, **kwargs: Any) -> bool:
        return bool(state["trajectory"]) and state["answer"] in said(state["trajectory"][-1]["completion"])


def said(completion: Any) -> str:
    return "".join(str(message["content"] or "") for message in completion)


def right(completion: Any, answer: str, **kwargs: Any) -> float:
    """1 for the sum; less, the longer it takes to say something else."""
    text = said(completion)
    return 1.0 if answer in text else sum(char in "02468" for char in text) / (4 * max(len(text), 1))


def turns(completion: Any, **kwargs: Any) -> float:
    return float(sum(message["role"] == "assistant" for message in completion))


def load_environment(rows: int = 1000, max_turns: int = 2) -> vf.Environment:
    draw = random.Random(0)
    sums = [(draw.randrange(10, 100), draw.randrange(10, 100)) for _ in range(rows)]
    table = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    rubric = vf.Rubric(funcs=[right, turns], weights=[1.0, 0.0])
    return Carry(dataset=Dataset.from_list(table), rubric=rubric, max_turns=max_turns)
