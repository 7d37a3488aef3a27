"""Held-out evaluation on the running servers: greedy, one sample per prompt, outside the staleness count."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from asyncrl.api import GenerationRequest, GenerationResult, Prompt
from asyncrl.datasets.prompts import OverlongPrompt
from asyncrl.rollout.episode import run_group
from asyncrl.rollout.generation_client import RolloutClient
from asyncrl.rollout.messages import EvaluationResult
from asyncrl.rollout.user_code import Plugins


@dataclass(frozen=True, slots=True)
class _EvaluatedPolicy:
    """The policy at `version` or newer, as agents ask it."""

    client: RolloutClient
    version: int

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return await self.client.generate(request, min_version=self.version)


class Evaluator:
    """Evaluates this worker's share of the set: rows `index`, `index + workers`, ... below `size`."""

    def __init__(self, plugins: Plugins, client: RolloutClient, *, index: int, workers: int, size: int) -> None:
        self._plugins = plugins
        self._client = client
        self._rows = range(index, min(size, len(plugins.eval_set or ())), workers)

    async def evaluate(self, version: int) -> EvaluationResult:
        """Rewards and lengths of the share under policy `version` or newer, and which versions it really was.

        Raises:
            Exception: whatever the agent, the environment or the servers raised.
        """
        policy, plugins = _EvaluatedPolicy(self._client, version), self._plugins
        prompts = [prompt for row in self._rows if (prompt := self._prompt(row)) is not None]
        groups = await asyncio.gather(
            *(
                run_group(plugins.agent, plugins.make_envs(prompt.group_size), prompt, policy, plugins.episode_client)
                for prompt in prompts
            )
        )
        samples = [sample for group, _ in groups for sample in group]
        versions = [int(v) for sample in samples for v in sample.versions[sample.loss_mask.astype(bool)]]
        return EvaluationResult(
            rewards=tuple(sample.reward for sample in samples),
            lengths=tuple(sample.generated_length for sample in samples),
            min_version=min(versions, default=version),
            max_version=max(versions, default=version),
        )

    def _prompt(self, row: int) -> Prompt | None:
        """The prompt of `row`; None where it makes none that is short enough, which was counted at the start."""
        try:
            return self._plugins.eval_prompt(row)
        except OverlongPrompt:
            return None
