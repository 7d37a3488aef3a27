"""One prompt's group through a user's agent and environments, and what the group is worth afterwards."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from asyncrl.algorithms.group_view import FilterDecision, GroupView, rewards_of_turns
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
from asyncrl.api.seeds import seed_from
from asyncrl.api.trajectory import compared_episodes, named_columns, role_of
from asyncrl.comm.drop_reasons import LOST_EPISODES
from asyncrl.plugins.chat.client import check_prompt_pictures
from asyncrl.rollout.user_code_pool.errors import named_failure

_log = logging.getLogger(__name__)

Filter = Callable[[GroupView], FilterDecision]
Shaping = Callable[[GroupView], "np.ndarray[tuple[int], np.dtype[np.float64]]"]


class CountingClient(ChatClient, Protocol):
    """The client of an episode, which counts what it did, by name, and is closed with it."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The counts so far."""
        ...

    def close(self) -> None:
        """The episode is over."""
        ...


MakeClient = Callable[[GenerationClient, Prompt], CountingClient]
"""The client of an episode: of the policy, and of the prompt as the member receives it."""


@dataclass(slots=True)
class _EpisodePolicy:
    """The policy as one episode asks it: a seed that was used is not used again, which would draw the same numbers."""

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


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Retries of episodes that fail.

    Attributes:
        number: how often an episode is played in all, before it is given up.
        least: episodes without which a group is worth nothing, once some were given up.
        limit_s: what plays longer than this after the group began is given up; None: no limit.
    """

    number: int = 1
    least: int = 1
    limit_s: float | None = None


_CONTEXT_LIMITS = {
    "chat/limit_context_length": "generation.context_length",
    "chat/limit_max_total_tokens": "generation.max_total_tokens",
}
"""Settings that bound a conversation's tokens, by the metric of an episode's client that counts their meeting."""


@dataclass(slots=True)
class Group:
    """The policy as a group asks it, and as its episodes do; see `asyncrl.api.GroupClient`.

    Args:
        agent: named where no other code of users is known to have failed.
    """

    policy: GenerationClient
    make_client: MakeClient
    agent: str
    tries: RetryLimits
    clients: list[CountingClient] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    """Episodes that were given up, by what failed and how."""
    last_failure: Exception | None = None
    """Error of the last episode that was lost."""
    _clients_of: dict[int, CountingClient] = field(default_factory=dict)
    """The newest client of each member."""
    _ends_at: float | None = None
    _failures: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.tries.limit_s is not None:
            self._ends_at = time.monotonic() + self.tries.limit_s

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return await self.policy.generate(request)

    def episode(self, prompt: Prompt) -> ChatClient:
        """A new client for one episode of the group."""
        client = self.make_client(_EpisodePolicy(self.policy), prompt)
        self.clients.append(client)
        self._clients_of[prompt.member] = client
        return client

    def try_again(self, prompt: Prompt, error: Exception) -> Prompt | None:
        """As of `GroupClient`; when the rollout's time is over nothing is tried again."""
        self._failures[prompt.member] += 1
        failures, name = self._failures[prompt.member], named_failure(error, self.agent)
        if setting := self._full_context(prompt.member):  # what is raised then is the error of an agent's framework
            name += f" after its context was full ({setting})"
            error.add_note(
                f"{setting} left no room for an answer: raise it, or let the agent end when an answer is empty"
            )
        again = failures < self.tries.number and not isinstance(error, EpisodeTimeout)
        _log.warning(
            "episode %d of prompt %s failed, %s: %s",
            *(prompt.member, prompt.prompt_id, "to be tried again" if again else "given up", name),
            exc_info=error,
        )
        if again:
            return prompt.again(failures)
        self.lost[name] += 1
        self.last_failure = error
        return None

    def _full_context(self, member: int) -> str:
        """Return the setting that ended the conversation of `member`'s newest episode; empty if none did."""
        client = self._clients_of.get(member)
        counts = client.metrics if client else {}
        return next((setting for metric, setting in _CONTEXT_LIMITS.items() if counts.get(metric)), "")

    def seconds_left(self) -> float | None:
        """As of `GroupClient`."""
        return None if self._ends_at is None else self._ends_at - time.monotonic()

    def metrics(self) -> dict[str, float]:
        """Return the sums of what the episodes' clients counted, and the number of lost episodes."""
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
) -> tuple[Sequence[Sample], dict[str, float]]:
    """Run `agent` on `prompt`, its episodes at the same time, each with an environment and a client of its own.

    One that fails costs itself: it is tried again alone, with a random stream of its own, then given up and counted
    (`LOST_EPISODES`), and the group is the others. Statistics over those that remain are unbiased as long as what fails
    does not depend on the answers; where it does, a reward's `failure_reward` keeps the answer. An agent that plays its
    group at once fails as one.

    Returns:
        The group, any number of samples, each with its episode, none where the agent rejects the prompt; and what the
        episodes' clients counted.

    Raises:
        EpisodeTimeout: fewer than `tries.least` episodes had ended within the limit.
        EpisodeError: the agent broke its contract, or something that it awaits was cancelled.
        Exception: whatever the agent, an environment or the policy raised; of a group the first, where it was played at
            once, and the last where too few of its episodes are left.
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
            for sample in samples if prompt.pictures else ():
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
        if task is None or task.cancelling():  # it is this rollout that was cancelled
            raise
        raise cancelled_within(f"agent {name}", prompt) from error


async def _close(environments: Sequence[Environment]) -> None:
    """Close all of them, then raise what the first failing one raised."""
    closed = await asyncio.gather(*(env.close() for env in environments), return_exceptions=True)
    for outcome in closed:
        if isinstance(outcome, BaseException):
            raise outcome


def _first_cause(group: ExceptionGroup[Exception]) -> Exception:
    first = group.exceptions[0]
    return _first_cause(first) if isinstance(first, ExceptionGroup) else first


def metrics_of(samples: Sequence[Sample]) -> dict[str, float]:
    """`agent/<name>` and `reward/<part>`: means over those samples that have them; and of each role the mean reward of
    its samples, `reward/role/<role>`.
    """
    roles = {role_of(sample.group) for sample in samples} - {""}
    by_role = {role: [sample.total_reward for sample in samples if role_of(sample.group) == role] for role in roles}
    named = (
        ("agent", named_columns([sample.metrics for sample in samples])),
        ("reward", named_columns([sample.reward_parts for sample in samples])),
    )
    means = {f"{kind}/{name}": float(np.nanmean(column)) for kind, columns in named for name, column in columns.items()}
    return means | {f"reward/role/{role}": float(np.mean(rewards)) for role, rewards in by_role.items()}


def compared(samples: Sequence[Sample]) -> list[list[int]]:
    """The positions of the samples of each comparison group, in order of first appearance."""
    by_name: dict[str, list[int]] = {}
    for position, sample in enumerate(samples):
        by_name.setdefault(sample.group, []).append(position)
    return list(by_name.values())


def view_of(samples: Sequence[Sample]) -> tuple[GroupView, list[int]]:
    """Build the view of one comparison group for filters and shaping: its episodes, and for each sample the position
    of its episode.
    """
    view, position = GroupView.of_samples(
        [sample.total_reward for sample in samples],
        [sample.generated_length for sample in samples],
        [sample.truncated for sample in samples],
        compared_episodes([sample.episode for sample in samples], [sample.group for sample in samples]),
        [rewards_of_turns(sample.reward, sample.token_rewards, sample.loss_mask) for sample in samples],
        named_columns([numbers_of(sample) for sample in samples]),
    )
    return view, position.tolist()


def judge(samples: Sequence[Sample], filters: Sequence[Filter]) -> FilterDecision:
    """A keeping verdict if `filters` keep one of the comparison groups; else the first one's rejecting verdict."""
    verdicts = [_judge_group([samples[at] for at in positions], filters) for positions in compared(samples)]
    return next((verdict for verdict in verdicts if verdict.keep), verdicts[0])


def _judge_group(samples: Sequence[Sample], filters: Sequence[Filter]) -> FilterDecision:
    """The first rejecting verdict of `filters`, or a keeping one."""
    view, _ = view_of(samples)
    return next((verdict for accept in filters if not (verdict := accept(view)).keep), FilterDecision(True))


def shape(samples: Sequence[Sample], shapings: Sequence[Shaping]) -> tuple[Sample, ...]:
    """The samples with their rewards put through `shapings`, in order, each comparison group by itself: what an episode
    gains or loses there, each of its samples does.
    """
    shaped = list(samples)
    for positions in compared(samples):
        group = _shape_group([samples[at] for at in positions], shapings)
        for at, sample in zip(positions, group, strict=True):
            shaped[at] = sample
    return tuple(shaped)


def _shape_group(samples: Sequence[Sample], shapings: Sequence[Shaping]) -> Sequence[Sample]:
    for reshape in shapings:
        view, positions = view_of(samples)
        rewards = reshape(view)
        if len(rewards) != len(view.rewards_S):
            raise ValueError(f"a shaping gave {len(rewards)} rewards for {len(view.rewards_S)} episodes; give one each")
        alone = len(samples) == len(rewards)
        samples = [
            replace(sample, reward=_shaped(sample, float(rewards[at]), float(view.rewards_S[at]), alone=alone))
            for sample, at in zip(samples, positions, strict=True)
        ]
    return samples


def _shaped(sample: Sample, reward: float, before: float, *, alone: bool) -> float:
    """The sample's reward where its episode's becomes `reward`; exactly that where it is all of the episode's."""
    if alone and sample.token_rewards is None:
        return reward
    return sample.reward + (reward - before)
