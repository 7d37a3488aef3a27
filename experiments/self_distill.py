"""Self-distillation for `self_distill.yaml` (OPSD, 2601.18734): the teacher is the policy itself, shown the solution.

The base has learnt the demo's task with and without a hint. After a hint, the sum and a `#` before the problem, it is
careful; without one it forgets carries. The agent answers without the hint and has the policy score the answer once
more after it; the policy is then trained towards what it says with the hint. No reward is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.api import Environment, GenerationClient, GenerationRequest, Prompt, Sample, Tokenizer
from asyncrl.plugins.agents.single_turn import SingleTurnAgent
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset


def hint(row: Mapping[str, Any]) -> str:
    """What the teacher is shown before the prompt."""
    return f"{row['answer']}#"


class HintedDemonstrations(ArithmeticDataset):
    """Demonstrations for the base: every other row has a hint and is right, the others forget carries."""

    def row(self, index: int) -> dict[str, Any]:
        """The demo's row, with the hint in the prompt where it has one."""
        row = super().row(index)
        return row if index % 2 else {**row, "prompt": hint(row) + row["prompt"]}

    def demonstration(self, row: Mapping[str, Any]) -> str:
        """The right answer after a hint, else the demo's."""
        shown, _, problem = row["prompt"].rpartition("#")
        careful = ArithmeticDataset(split=self.split, seed=self.seed, num_rows=self.num_rows)
        return (careful if shown else super()).demonstration({**row, "prompt": problem})


class HintedSelf(SingleTurnAgent):
    """Answers the prompt; the column `token/hinted` has the policy's log-probabilities of the answer after the hint."""

    def __init__(self, *, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer=tokenizer)
        self._encode = tokenizer.encode

    async def run(self, prompt: Prompt, env: Environment, client: GenerationClient) -> Sample:
        """One answer, scored again after the hint."""
        sample = await super().run(prompt, env, client)
        shown = self._encode(hint(prompt.data))
        request = GenerationRequest(
            f"{prompt.prompt_id}/{prompt.member}/hinted",
            (*shown, *sample.tokens.tolist()),
            1,
            prompt.sampling,
            score_from=len(shown) + len(prompt.input_ids),
        )
        hinted_T = np.zeros(len(sample.tokens), np.float32)
        hinted_T[len(prompt.input_ids) :] = (await client.generate(request)).scores
        return replace(sample, token_columns={"hinted": hinted_T})
