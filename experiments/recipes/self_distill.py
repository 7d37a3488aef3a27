"""Self-distillation for `self_distill.yaml` (OPSD, 2601.18734): the teacher is an older self, shown the solution.

The base has learnt the demo's task with and without a hint. After a hint, the sum and a `#` before the problem, it is
careful; without one it forgets carries. The agent answers without the hint and has the teacher score the answer once
more after it; the policy is then trained towards what the teacher says with the hint. No reward is used. The teacher is
the initial model: the policy itself as it is now, `teacher=""`, drifts away together with what it teaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.api import ChatClient, Environment, GenerationRequest, Prompt, Sample, Tokenizer
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
    """Answers the prompt; the column `token/hinted` has the teacher's log-probabilities of the answer after the hint.

    Args:
        tokenizer: the run's tokenizer.
        teacher: one of `policies`; empty: the policy itself.
    """

    def __init__(self, *, tokenizer: Tokenizer, teacher: str = "") -> None:
        super().__init__(tokenizer=tokenizer)
        self._encode, self._teacher = tokenizer.encode, teacher

    async def run(self, prompt: Prompt, env: Environment, client: ChatClient) -> Sample:
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
        teacher = client.policy(self._teacher) if self._teacher else client
        hinted_T[len(prompt.input_ids) :] = (await teacher.generate(request)).scores
        return replace(sample, token_columns={"hinted": hinted_T})
