"""Evaluate a share of a named set with the user's agent on the running servers, outside the staleness count.

Each answer is a separate episode, also if a prompt gets several (`n_samples`): it has its own reward and verdict, and
rewards that compare a group see a group of one. A failed episode is retried. One that fails `ATTEMPTS` times, or that
takes longer than `rollout.rollout_timeout_s`, ends the evaluation, because a mean over the other answers would be
another measurement.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.api import EpisodeTimeout, GenerationRequest, GenerationResult, Prompt, Sample
from asyncrl.data.prompt_format import InvalidPrompt
from asyncrl.rollout.episode import Answer, metrics_of
from asyncrl.rollout.messages import EvaluatedAnswer, EvaluationResult
from asyncrl.rollout.rollout_client import RolloutClient
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code_pool.call_records import metered

if TYPE_CHECKING:  # optional, see `asyncrl.runtime.plan`
    from asyncrl.rollout.kept_answers import KeptAnswers

_log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Attempts per episode, as in training."""

_OF_THE_RUN = "rollout/"
"""Prefix of metrics that are left out: times depend on the machine, which also trains, rather than on the policy."""


@dataclass(frozen=True, slots=True)
class _EvaluatedPolicy:
    """The policy at `version` or newer, for agents."""

    client: RolloutClient
    version: int

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return await self.client.generate(request, min_version=self.version)


class Evaluator:
    """Evaluates this worker's share of each set: rows `index`, `index + workers`, ... below the set's size.

    Args:
        keep: takes the answers of each evaluation; None: they are not kept.
    """

    def __init__(
        self,
        components: UserComponents,
        client: RolloutClient,
        *,
        index: int,
        workers: int,
        max_concurrent: int,
        keep: KeptAnswers | None = None,
    ) -> None:
        self._components, self._client = components, client
        self._index, self._workers = index, workers
        self._slots, self._keep = asyncio.Semaphore(max_concurrent), keep
        self._running: asyncio.Task[EvaluationResult] | None = None

    async def evaluate(self, name: str, version: int) -> EvaluationResult:
        """Evaluate this worker's share of the set `name` under policy `version` or newer.

        An evaluation that still runs is cancelled first: the MasterWorker waits for one at a time.

        Raises:
            Exception: an episode failed in its last attempt, with the error of the agent, environment, reward or
                server.
        """
        self.cancel()
        self._running = asyncio.create_task(self._evaluate(name, version))
        return await self._running

    def cancel(self) -> None:
        """End a running evaluation: the run stops, and nothing waits for its result."""
        if self._running is not None:
            self._running.cancel()

    async def _evaluate(self, name: str, version: int) -> EvaluationResult:
        each, rows = self._components.prompts.eval_sets[name]
        policy = _EvaluatedPolicy(self._client, version)
        share = range(self._index, min(each.size, len(rows)), self._workers)
        prompts = {row: self._prompts(name, row, each.n_samples) for row in share}
        try:
            async with asyncio.TaskGroup() as tasks:
                episodes = {
                    row: [tasks.create_task(self._episode(name, prompt, policy)) for prompt in group]
                    for row, group in prompts.items()
                }
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        ended = {row: [episode.result() for episode in group] for row, group in episodes.items()}
        kept = {row: group for row, group in ended.items() if group and all(each.samples for each in group)}
        if self._keep is not None:
            await self._keep.keep(name, version, kept)
        versions = [v for group in kept.values() for each in group for v in _versions(each.samples)]
        return EvaluationResult(
            tuple(_answer(row, each) for row, group in kept.items() for each in group),
            left_out=len(ended) - len(kept),
            min_version=min(versions, default=version),
            max_version=max(versions, default=version),
        )

    def _prompts(self, name: str, row: int, n_samples: int) -> list[Prompt]:
        """Return the prompt of `row`, once for each answer; empty if the row has no valid prompt, which the start
        reported.
        """
        try:
            return [self._components.prompts.evaluation(name, row, member) for member in range(n_samples)]
        except InvalidPrompt as error:
            _log.info("%s is left out of the evaluation: %s", name, error)
            return []

    async def _episode(self, name: str, prompt: Prompt, policy: _EvaluatedPolicy) -> Answer:
        async with self._slots:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    with metered() as meter:
                        samples, counted = await self._components.play_to_evaluate(name, prompt, policy)
                    return Answer(samples, meter.verdict, _of_policy(metrics_of(samples) | counted | meter.metrics()))
                except Exception as error:
                    if attempt == ATTEMPTS or isinstance(error, EpisodeTimeout):
                        raise
                    _log.warning("the episode of %s failed, to be tried again", prompt.prompt_id, exc_info=error)
        raise AssertionError("the last attempt returns or raises")


def _of_policy(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(_OF_THE_RUN)}


def _answer(row: int, ended: Answer) -> EvaluatedAnswer:
    """Return one episode's outcome. Of several samples, which are branches, the last one has its end and reward; side
    conversations, which are compared apart, come after it.
    """
    last = ([sample for sample in ended.samples if not sample.group] or ended.samples)[-1]
    tokens = sum(sample.generated_length for sample in ended.samples)
    return EvaluatedAnswer(row, float(last.total_reward), ended.right, tokens, last.truncated, dict(ended.metrics))


def _versions(samples: Sequence[Sample]) -> set[int]:
    """Return the versions that generated the tokens of `samples`."""
    return {int(version) for one in samples for version in one.versions[one.loss_mask.astype(bool)]}
