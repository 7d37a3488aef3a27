"""A solver and a judge that learn together, for `solver_judge.yaml`: sums with every step written out.

The solver writes a sum out, `37+5+81=` and `37+5=42;42+81=123#123`, and is paid if the judge calls its result right.
The judge adds up by itself and calls a result right that is its own too. It is paid if its verdict is the truth.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asyncrl.api import ChatClient, Environment, GenerationRequest, Prompt, Sample, Tokenizer
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset, written_out


def result_of(answer: str) -> str:
    """Return the result at the end of an answer; empty if there is none."""
    result = answer.rpartition("#")[2] if "#" in answer else ""
    return result if result.isdecimal() else ""


class Claims(ArithmeticDataset):
    """Sums with a result that is right or, where there is something to carry and in half of these rows, careless."""

    def row(self, index: int) -> dict[str, Any]:
        """A row of sums with the result that the judge is asked about, as `claim`."""
        row = super().row(index)
        draw = random.Random(f"{self.seed}/{self.split}/claim/{index}")
        careless = result_of(written_out(self.numbers(index), forget=1.0, rng=draw))
        return row | {"claim": careless if draw.random() < 0.5 else row["answer"]}


async def play(prompt: Prompt, env: Environment, client: ChatClient, *, tokenizer: Tokenizer) -> list[Sample]:
    """One answer and the verdict on it. The metrics have the truth: `right`, and whether the judge `agrees` with it."""
    result, judge = await _result(client, prompt, tokenizer), client.policy("judge")
    right, verdict = result == prompt.data["answer"], await _verdict(judge, prompt, result, tokenizer)
    solved, judged = client.samples(float(verdict)), judge.samples(float(verdict == right))
    return [
        *(replace(sample, metrics={"right": float(right)}) for sample in solved),
        *(replace(sample, metrics={"agrees": float(verdict == right)}) for sample in judged),
    ]


async def judged(prompt: Prompt, env: Environment, client: ChatClient, *, tokenizer: Tokenizer) -> Sequence[Sample]:
    """For evaluations: the judge's verdict on the row's `claim`; its reward is 1 if that is the truth."""
    judge, claim = client.policy("judge"), prompt.data["claim"]
    verdict = await _verdict(judge, prompt, claim, tokenizer)
    return judge.samples(float(verdict == (claim == prompt.data["answer"])))


async def _verdict(judge: ChatClient, prompt: Prompt, result: str, tokenizer: Tokenizer) -> bool:
    return bool(result) and await _result(judge, prompt, tokenizer) == result


async def _result(client: ChatClient, prompt: Prompt, tokenizer: Tokenizer) -> str:
    """Return the result that `client` comes to."""
    name = f"{prompt.prompt_id}/{prompt.member}"
    answer = await client.generate(GenerationRequest(name, prompt.input_ids, 1, prompt.sampling))
    return result_of(tokenizer.decode(answer.completions[0].token_ids))
