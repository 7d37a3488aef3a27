"""Run one prompt's group with the user's agent and environments, and score it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from asyncrl.api import (
    Agent,
    ChatClient,
    Environment,
    EpisodeTimeout,
    GenerationClient,
    GenerationRequest,
    GenerationResult,
    Prompt,
    Sample,
)
from asyncrl.api.agent import cancelled_within
from asyncrl.api.columns import numbers_of
from asyncrl.api.generation import seed_from
from asyncrl.api.trajectory import named_columns, role_of
from asyncrl.comm.ended_rollouts import LOST_EPISODES, DropReason
from asyncrl.rollout.user_code.rewards import Rewards
from asyncrl.rollout.user_code_pool.call_records import Meter, current_meter, named_failure
from asyncrl.trainer.settings import SOURCE_NUMBER

if TYPE_CHECKING:
    from asyncrl.chat.episode_client import EpisodeClient

_log = logging.getLogger(__name__)

MakeClient: TypeAlias = "Callable[[GenerationClient, Prompt], EpisodeClient]"
"""Make the client of an episode from the policy and the member's prompt."""
Played: TypeAlias = tuple[Sequence[Sample], dict[str, float]]
"""The samples of a prompt's group, and the counts of its episodes."""


@dataclass(slots=True)
class _EpisodePolicy:
    """The policy for one episode. No seed is used twice, because it would draw the same random numbers."""

    policy: GenerationClient
    uses: Counter[int] = field(default_factory=Counter)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        seed = request.sampling.seed
        if seed is not None:
            uses, self.uses[seed] = self.uses[seed], self.uses[seed] + 1
            if uses:
                own = replace(request.sampling, seed=seed_from("again", seed, uses))
                request = replace(request, sampling=own)
        return await self.policy.generate(request)


class RolloutDropped(Exception):  # no error
    """Ends a rollout that is dropped for `reason`, which is nobody's failure."""

    def __init__(self, reason: DropReason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Retries of episodes that fail.

    Attributes:
        number: attempts per episode, after which it is lost.
        least: least number of episodes of a group in which some were lost; with fewer the group fails.
        limit_s: time limit of all episodes from the start of the group (`Meter.own_s`); None for no limit.
    """

    number: int = 1
    least: int = 1
    limit_s: float | None = None


_CONTEXT_LIMITS = {
    "chat/limit_context_length": "generation.context_length",
    "chat/limit_max_total_tokens": "generation.max_total_tokens",
}
"""Settings that limit a conversation's tokens, by the metric that counts how often the limit was reached."""


@dataclass(slots=True)
class Group:
    """The policy for a group and for its episodes; see `asyncrl.api.GroupClient`.

    Args:
        agent: name of the agent, for failures in no other user code.
    """

    policy: GenerationClient
    make_client: MakeClient
    agent: str
    tries: RetryLimits
    clients: list[EpisodeClient] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    """Numbers of lost episodes, by the code that failed and how."""
    last_failure: Exception | None = None
    """Error of the last episode that was lost."""
    _clients_of: dict[int, EpisodeClient] = field(default_factory=dict)
    """The newest client of each member."""
    _ends_at: float | None = None
    _failures: Counter[int] = field(default_factory=Counter)
    _meter: Meter = field(default_factory=current_meter)

    def __post_init__(self) -> None:
        if self.tries.limit_s is not None:
            self._ends_at = self._meter.own_s + self.tries.limit_s

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return await self.policy.generate(request)

    def episode(self, prompt: Prompt) -> ChatClient:
        """Return a new client for one episode of the group."""
        client = self.make_client(_EpisodePolicy(self.policy), prompt)
        self.clients.append(client)
        self._clients_of[prompt.member] = client
        return client

    def try_again(self, prompt: Prompt, error: Exception) -> Prompt | None:
        """See `GroupClient`; nothing is retried once the rollout's time is over."""
        self._failures[prompt.member] += 1
        failures, name = self._failures[prompt.member], named_failure(error, self.agent)
        if setting := self._full_context(prompt.member):  # the error then comes from the agent's framework
            name += f" after its context was full ({setting})"
            error.add_note(
                f"{setting} left no room for an answer: raise it, or let the agent end when an answer is empty"
            )
        again = failures < self.tries.number and not isinstance(error, EpisodeTimeout)
        _log.warning(
            "episode %d of prompt %s failed, %s: %s",
            *(prompt.member, prompt.prompt_id, "to be tried again" if again else "lost", name),
            exc_info=error,
        )
        if again:
            return prompt.again(failures)
        self.lose(name, error)
        return None

    def lose(self, name: str, error: Exception) -> None:
        """Count an episode as lost under `name`; with too few others, the group fails with `error`."""
        self.lost[name] += 1
        self.last_failure = error

    def _full_context(self, member: int) -> str:
        """Return the setting that ended the conversation of `member`'s newest episode; empty if none did."""
        client = self._clients_of.get(member)
        counts = client.metrics if client else {}
        return next((setting for metric, setting in _CONTEXT_LIMITS.items() if counts.get(metric)), "")

    def seconds_left(self) -> float | None:
        """See `GroupClient`."""
        return None if self._ends_at is None else self._ends_at - self._meter.own_s

    def metrics(self) -> dict[str, float]:
        """Return the sums of the episodes' counts, and the number of lost episodes."""
        total: Counter[str] = Counter()
        for client in self.clients:
            total.update(client.metrics)
        return dict(total) | {f"{LOST_EPISODES}{name}": float(count) for name, count in self.lost.items()}


async def run_group(
    agent: Agent,
    make_env: Callable[[], Environment],
    prompt: Prompt,
    policy: GenerationClient,
    make_client: MakeClient,
    tries: RetryLimits = RetryLimits(),
    rewards: Rewards | None = None,
) -> Played:
    """Run `agent` on `prompt`, with its episodes at the same time, each with its own environment and client.

    A failed episode is retried alone, with a new random stream. After its last attempt it is lost and counted
    (`LOST_EPISODES`), and the group consists of the others. Statistics over the remaining episodes are unbiased if
    failures do not depend on the answers; if they do, a reward's `failure_reward` keeps the answer. An agent that plays
    its group at once fails as a whole.

    Returns:
        The group, any number of samples with their episodes, none if the agent rejects the prompt; and the counts of
        the episodes' clients.

    Raises:
        EpisodeTimeout: fewer than `tries.least` episodes had ended within the limit.
        EpisodeError: the agent broke its contract, or something that it awaits was cancelled.
        Exception: the error of the agent, an environment or the policy: the first one if the group is played at once,
            the last one if too few episodes are left.
    """
    environments: list[Environment] = []

    def make() -> Environment:
        environments.append(make_env())
        return environments[-1]

    name = type(agent).__name__
    group = Group(policy, make_client, name, tries)
    try:
        try:
            samples = await agent.roll_out(prompt, make, group)
            if rewards is not None:
                samples = await rewards.score(prompt, samples, group)
            if prompt.pictures:
                from asyncrl.data.picture_parts import check_prompt_pictures

                for sample in samples:
                    check_prompt_pictures(prompt, sample.tokens.tolist(), sample.pictures)
            if group.last_failure is not None and len({sample.episode for sample in samples}) < tries.least:
                raise group.last_failure
            return samples, group.metrics()
        finally:
            for client in group.clients:
                client.close()
            await _close(environments)
    except ExceptionGroup as errors:
        raise _first_cause(errors) from errors
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # the rollout itself was cancelled
            raise
        raise cancelled_within(f"agent {name}", prompt) from error


async def _close(environments: Sequence[Environment]) -> None:
    """Close all environments, then raise the first error."""
    closed = await asyncio.gather(*(env.close() for env in environments), return_exceptions=True)
    for outcome in closed:
        if isinstance(outcome, BaseException):
            raise outcome


def _first_cause(group: ExceptionGroup[Exception]) -> Exception:
    first = group.exceptions[0]
    return _first_cause(first) if isinstance(first, ExceptionGroup) else first


@dataclass(frozen=True, slots=True)
class Answer:
    """The samples of one episode (none if the agent rejects the prompt), its verdict, and its metrics."""

    samples: Sequence[Sample]
    right: bool | None
    metrics: Mapping[str, float]


def metrics_of(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of samples.

    `agent/<name>`, `row/<field>` and `reward/<part>` are means over the samples that have them, `reward/role/<role>`
    the mean reward of a role's samples.
    """
    roles = {role_of(sample.group) for sample in samples} - {""}
    by_role = {role: [sample.total_reward for sample in samples if role_of(sample.group) == role] for role in roles}
    named = named_columns([numbers_of(sample) for sample in samples])
    means = {name: float(np.nanmean(column)) for name, column in named.items() if name != SOURCE_NUMBER}
    return means | {f"reward/role/{role}": float(np.mean(rewards)) for role, rewards in by_role.items()}
