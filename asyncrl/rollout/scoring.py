"""The rewards of a run: each by name and weight, summed; where each runs and what becomes of one that fails.

A reward of answers is called by the environment, through `AnswerReward`. Rewards of whole episodes and of groups are
added once the agent has returned its samples (`ScoredAgent`). Each is reported by its name before it is weighted.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from functools import partial
from itertools import groupby
from typing import Any, NoReturn

from asyncrl.api import Agent, Environment, Episode, GroupClient, Prompt, RunIn, Sample, Tokenizer
from asyncrl.api.reward import RewardParts, is_verdict, marked_run_in
from asyncrl.config.import_paths import PluginError, load_plugin
from asyncrl.config.setting import ConfigError
from asyncrl.rollout.offload.adapters import is_built_in
from asyncrl.rollout.offload.errors import UserCodeError
from asyncrl.rollout.offload.messages import Target
from asyncrl.rollout.offload.meter import Activity, current_meter
from asyncrl.rollout.offload.offloader import Code, Offloader, is_async
from asyncrl.rollout.settings import NamedRewardConfig, RewardConfig

_log = logging.getLogger(__name__)


class Sees(StrEnum):
    """What a reward is given, by the name of its first parameter; any other name is an answer's row."""

    answer = auto()
    episode = auto()
    group = auto()


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One of the rewards that are summed. `name` is empty where there is one alone, which needs none."""

    name: str
    weight: float
    sees: Sees
    code: Code
    function: Callable[..., Any]
    failure_reward: float | None
    verdict: bool = False
    """It is 1 for a right answer and 0 for a wrong one."""


def load_rewards(single: RewardConfig, several: Sequence[NamedRewardConfig]) -> tuple[RewardPart, ...]:
    """The rewards of the settings `reward` or, where there are any, `rewards`.

    Raises:
        ConfigError: a path names nothing that can be called, its module fails, or it cannot run where it is set to.
    """
    if not several:
        return (_load("reward", "", 1.0, single),)
    named = enumerate(several)
    return tuple(_load(f"rewards[{number}]", part.name, part.weight, part) for number, part in named)


def _load(group: str, name: str, weight: float, config: RewardConfig) -> RewardPart:
    try:
        found: Any = load_plugin(config.path)
    except PluginError as error:
        raise ConfigError(f"{group}.path={error}") from error
    if not callable(found):
        raise ConfigError(f"{group}.path={config.path!r}: it is a {type(found).__name__}; name a class or function")
    if inspect.isclass(found) and not inspect.isfunction(getattr(found, "__call__", None)):  # noqa: B004
        raise ConfigError(f"{group}.path={config.path!r}: its instances cannot be called; give the class a __call__")
    called = found.__call__ if inspect.isclass(found) else found
    place = _place(group, config, called, marked_run_in(found))
    function: Callable[..., Any] = found
    if inspect.isclass(found) and (place != RunIn.process or is_built_in(found)):
        try:
            instance: Any = found(**config.args)
            function = instance  # for one that runs in a process this was but the check of its arguments
        except Exception as error:  # a user's constructor may raise anything
            given = f"{group}.path={config.path!r}, {group}.args={config.args}"
            raise ConfigError(f"{given}: {type(error).__name__}: {error}") from error
    else:
        function = partial(found, **config.args)
    sees = _sees(called)
    code = Code(
        f"reward {config.path}", Activity.reward, config.timeout_s, place, Target(config.path, config.args), sees
    )
    marked = is_verdict(found) or is_verdict(function)
    verdict = marked if config.verdict is None else config.verdict
    return RewardPart(name, weight, sees, code, function, config.failure_reward, verdict)


def _place(group: str, config: RewardConfig, function: Callable[..., Any], marked: RunIn) -> RunIn:
    wanted = config.run_in if config.run_in != RunIn.auto else marked
    if not is_async(function):
        return RunIn.thread if wanted == RunIn.auto else wanted
    if wanted == RunIn.thread:
        raise ConfigError(
            f"{group}.run_in=thread: {config.path!r} is `async def`, which runs on an event loop; leave it at auto"
        )
    return wanted


def _sees(function: Callable[..., Any]) -> Sees:
    try:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
    except (TypeError, ValueError):  # a builtin may have none
        return Sees.answer
    return Sees(names[0]) if names and names[0] in (Sees.episode, Sees.group) else Sees.answer


class Rewards:
    """The parts, called where they belong."""

    def __init__(self, parts: Sequence[RewardPart], offloader: Offloader) -> None:
        by_sees = {sees: tuple(group) for sees, group in groupby(sorted(parts, key=_sees_of), key=_sees_of)}
        self._of_answers = by_sees.get(Sees.answer, ())
        self._of_episodes = by_sees.get(Sees.episode, ())
        self._of_groups = by_sees.get(Sees.group, ())
        self._offloader = offloader

    @property
    def after_the_rollout(self) -> bool:
        """Whether there are rewards of whole episodes or groups."""
        return bool(self._of_episodes or self._of_groups)

    async def answer(self, data: Mapping[str, Any], completion: str) -> float:
        """The weighted sum of the rewards of an answer; 0 where there are none of this form.

        Raises:
            UserCodeError: one of them failed, and no `failure_reward` stands in for it.
        """
        if len(self._of_answers) == 1:  # most runs, and a task for each answer would cost more than a cheap reward
            return await self._one(self._of_answers[0], data, completion)
        return sum(await asyncio.gather(*(self._one(part, data, completion) for part in self._of_answers)))

    def answer_blocking(self, data: Mapping[str, Any], completion: str) -> float:
        """As `answer`, for a thread: one after the other."""
        total = 0.0
        for part in self._of_answers:
            try:
                value = self._offloader.call_blocking(part.code, part.function, data, completion)
                total += _number(part, value)
            except UserCodeError as error:
                total += _stand_in(part, error)
        return total

    async def episodes(self, group: Sequence[Episode]) -> list[tuple[float, dict[str, float]]]:
        """`[S]`: what the rewards of episodes and groups add to each sample, and what each of them gave, by name.

        Raises:
            UserCodeError: as for `answer`.
        """
        totals, parts = [0.0] * len(group), [RewardParts() for _ in group]
        by_episode = await asyncio.gather(
            *(self._one(part, episode) for part in self._of_episodes for episode in group)
        )
        by_group = await asyncio.gather(*(self._of_group(part, group) for part in self._of_groups))
        own = [by_episode[first : first + len(group)] for first in range(0, len(by_episode), len(group))]
        for part, values in zip((*self._of_episodes, *self._of_groups), (*own, *by_group), strict=True):
            for number, value in enumerate(values):
                totals[number] += value
                if part.name and part.weight:
                    parts[number].add(part.name, value / part.weight)
        return [(total, each.means()) for total, each in zip(totals, parts, strict=True)]

    async def _one(self, part: RewardPart, *args: Any) -> float:
        try:
            return _number(part, await self._offloader.call(part.code, part.function, *args))
        except UserCodeError as error:
            return _stand_in(part, error)

    async def _of_group(self, part: RewardPart, group: Sequence[Episode]) -> list[float]:
        try:
            values = await self._offloader.call(part.code, part.function, list(group))
            try:
                values = list(values)
            except TypeError:
                raise UserCodeError(part.code.label, f"returned {values!r:.80} for a group; return a list") from None
            if len(values) != len(group):
                message = f"returned {len(values)} rewards for a group of {len(group)} samples; return one for each"
                raise UserCodeError(part.code.label, message)
            return [_number(part, value) for value in values]
        except UserCodeError as error:
            return [_stand_in(part, error) for _ in group]


def _sees_of(part: RewardPart) -> Sees:
    return part.sees


def _number(part: RewardPart, value: object) -> float:
    """`value` weighted, once it is reported."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserCodeError(part.code.label, f"returned {value!r:.80}; a reward is a finite number")
    if part.verdict:
        if number not in (0.0, 1.0):
            raise UserCodeError(
                part.code.label,
                f"is declared a verdict and returned {number:g}; return 0 or 1, or set its verdict to false",
            )
        current_meter().add_verdict(part.name, number == 1.0)
    return _weighted(part, number)


def _weighted(part: RewardPart, number: float) -> float:
    if part.name:
        current_meter().add_reward(part.name, number)
    return part.weight * number


def _stand_in(part: RewardPart, error: UserCodeError) -> float:
    """`failure_reward` in place of what `part` did not give; without one the failure is the rollout's."""
    if part.failure_reward is None:
        raise error
    _log.info("%s; the answer is given failure_reward=%g", error, part.failure_reward)
    current_meter().add_failure()
    if part.verdict:
        current_meter().add_verdict(part.name, False)
    return _weighted(part, part.failure_reward)


class AnswerReward:
    """What an environment gets as its reward: awaited where there is an event loop, a number in a plain function."""

    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards

    def __call__(self, data: Mapping[str, Any], completion: str) -> Any:
        """The reward of answer text `completion` to dataset row `data`; see the class."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._rewards.answer_blocking(data, completion)
        return _ToAwait(self._rewards.answer(data, completion))


class _ToAwait:
    """An awaitable that says so where it is taken for a number."""

    def __init__(self, coroutine: Any) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, None, float]:
        value: Generator[Any, None, float] = self._coroutine.__await__()
        return value

    def __float__(self) -> NoReturn:
        self._coroutine.close()
        raise TypeError("in asynchronous code a reward is awaited: `value = await self._reward(data, text)`")


class ScoredAgent(Agent):
    """`agent`, whose samples then get the rewards of episodes and groups."""

    def __init__(self, agent: Agent, rewards: Rewards, tokenizer: Tokenizer) -> None:
        self._agent, self._rewards, self._tokenizer = agent, rewards, tokenizer

    async def roll_out(
        self, prompt: Prompt, make_env: Callable[[], Environment], client: GroupClient
    ) -> Sequence[Sample]:
        """The agent's samples with these rewards added; each conversation of an episode is seen by itself."""
        samples = await self._agent.roll_out(prompt, make_env, client)
        if not samples:
            return samples
        added = await self._rewards.episodes([episode_of(prompt, sample, self._tokenizer) for sample in samples])
        return [
            replace(sample, reward=sample.reward + more, reward_parts={**sample.reward_parts, **parts})
            for sample, (more, parts) in zip(samples, added, strict=True)
        ]


def scored_agent(agent: Agent, rewards: Rewards, tokenizer: Tokenizer) -> Agent:
    """`agent` itself where no reward sees more than answers."""
    if not rewards.after_the_rollout:
        return agent
    named: type[ScoredAgent] = type(type(agent).__name__, (ScoredAgent,), {})  # as messages about it should name it
    return named(agent, rewards, tokenizer)


def episode_of(prompt: Prompt, sample: Sample, tokenizer: Tokenizer) -> Episode:
    """`sample` as rewards see it."""
    mask = sample.loss_mask.astype(bool).tolist()
    tokens = sample.tokens.tolist()
    first = mask.index(True) if any(mask) else len(mask)
    stretches = groupby(range(first, len(tokens)), key=mask.__getitem__)
    turns = [[tokens[position] for position in stretch] for generated, stretch in stretches if generated]
    return Episode(
        data=prompt.data,
        prompt=tokenizer.decode(tokens[:first]),
        turns=tuple(tokenizer.decode(turn) for turn in turns),
        response=tokenizer.decode(tokens[first:]),
        generated_tokens=sample.generated_length,
        truncated=sample.truncated,
        reward=float(sample.total_reward),
    )
