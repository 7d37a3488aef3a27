"""The rewards of a run: run each in its place, handle failures, and add them up by weight.

The environment calls rewards of answers (`Rewards.__call__`). Rewards of whole episodes and of groups are added once
the agent has returned its samples (`Rewards.score`, in `rewards_of_groups`). Each reward is reported by name, before
its weight is applied.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from functools import partial
from typing import Any, NoReturn, TypeAlias

from asyncrl.api import GroupClient, Prompt, RunIn, Sample
from asyncrl.api.picture import Picture
from asyncrl.api.reward import ROW_CHECK, is_verdict, note_reward_part
from asyncrl.config.setting import ConfigError
from asyncrl.plugins.settings import ROW_METRICS, NamedRewardConfig, RewardConfig
from asyncrl.rollout.user_code_pool.call_records import Activity, Code, UserCodeError, current_meter, plain_number
from asyncrl.rollout.user_code_pool.runner import (
    UserCodeRunner,
    built,
    is_async,
    is_built_in,
    loaded,
    run_in_of,
    target_in,
)

NO_REWARD = "returned an invalid reward"
SOURCE = "source"
"""The column of a row that names its source; a mixture of datasets fills it in."""
SCORE = "score"
Embedder: TypeAlias = "Callable[[Sequence[Sequence[Picture]]], Awaitable[list[tuple[float, ...]]]]"
"""Embeds the frames of N episodes: `[N, D]`."""

_log = logging.getLogger(__name__)


class RewardScope(StrEnum):
    """Argument of a reward, by the name of its first parameter; any other name means an answer's row."""

    answer = auto()
    episode = auto()
    group = auto()


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One of the rewards that are added up. `name` is empty if there is only one."""

    name: str
    weight: float
    sees: RewardScope
    code: Code
    function: Callable[..., Any]
    failure_reward: float | None
    verdict: bool = False
    """True if it is 1 for a right answer and 0 for a wrong one."""
    sources: frozenset[str] = frozenset()
    """The sources whose rows it scores; empty for all."""
    check_row: Callable[[Mapping[str, Any]], object] | None = None
    """Raises ValueError for a row that no answer can be right for; None: it cannot tell."""

    def scores(self, source: object) -> bool:
        """True if it scores rows of `source`."""
        return not self.sources or source in self.sources


def load_rewards(single: RewardConfig, several: Sequence[NamedRewardConfig]) -> tuple[RewardPart, ...]:
    """Load the rewards of the setting `rewards` or, if that is empty, of `reward`.

    Raises:
        ConfigError: a path does not name a callable, its module fails, or it cannot run where `run_in` says.
    """
    if not several:
        return (_load("reward", "", 1.0, single),)
    named = enumerate(several)
    return tuple(_load(f"rewards[{number}]", part.name, part.weight, part) for number, part in named)


def _load(group: str, name: str, weight: float, config: RewardConfig) -> RewardPart:
    found = loaded(group, config)
    is_class = inspect.isclass(found)
    if is_class and not inspect.isfunction(getattr(found, "__call__", None)):  # noqa: B004
        raise ConfigError(f"{group}.path={config.path!r}: its instances cannot be called; give the class a __call__")
    called = found.__call__ if is_class else found
    run_in = run_in_of(group, config, found, called)
    if run_in == RunIn.auto and not is_async(called):
        run_in = RunIn.thread
    is_made = is_class and (run_in != RunIn.process or is_built_in(found))  # in a process: to check the arguments
    function = built(group, config, object) if is_made else partial(found, **config.args)
    sees = _sees(called)
    target = target_in(run_in, config.path, config.args)
    code = Code(f"reward {config.path}", Activity.reward, config.timeout_s, run_in, target, sees)
    verdict = is_verdict(found) or is_verdict(function) if config.verdict is None else config.verdict
    sources = frozenset(config.sources) if isinstance(config, NamedRewardConfig) else frozenset()
    check = None if is_class and not is_made else getattr(function if is_made else found, ROW_CHECK, None)
    return RewardPart(name, weight, sees, code, function, config.failure_reward, verdict, sources, check)


def _sees(function: Callable[..., Any]) -> RewardScope:
    try:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
    except (TypeError, ValueError):  # a builtin may have none
        return RewardScope.answer
    return (
        RewardScope(names[0]) if names and names[0] in (RewardScope.episode, RewardScope.group) else RewardScope.answer
    )


Added: TypeAlias = "tuple[float, dict[str, float]]"
"""Weighted sum of rewards for a sample, and each reward's value by name, before its weight."""


def summed(values: Sequence[Added | None]) -> Added:
    applied = [each for each in values if each is not None]
    return sum(value for value, _ in applied), {name: number for _, named in applied for name, number in named.items()}


class Rewards:
    """The rewards of a run, each called in its thread, process or event loop; environments call it as their reward."""

    def __init__(self, parts: Sequence[RewardPart], runner: UserCodeRunner) -> None:
        self._parts, self._by_source = tuple(parts), any(part.sources for part in parts)
        self._of_answers, self._of_episodes, self._of_groups = (
            tuple(part for part in parts if part.sees == scope) for scope in RewardScope
        )
        self._runner = runner
        self.embedder: Embedder | None = None
        """Embeds the frames of a group's episodes before its rewards are called; None: frames are not embedded."""

    def __call__(self, data: Mapping[str, Any], completion: str) -> Any:
        """Return the reward of an answer for an environment: an awaitable on an event loop, a number in a thread."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._answer_blocking(data, completion)
        return _ToAwait(self.answer(data, completion))

    async def answer(self, data: Mapping[str, Any], completion: str) -> float:
        """Return the weighted sum of the rewards of an answer; 0 without rewards of this form.

        Raises:
            UserCodeError: a reward without a `failure_reward` failed.
        """
        parts = self._for(self._of_answers, data)
        if len(parts) == 1:  # the usual case; a task per answer would cost more than a cheap reward
            return self._of_answer(parts, [await self._one(parts[0], data, completion)], data)
        found = await asyncio.gather(*(self._one(part, data, completion) for part in parts))
        return self._of_answer(parts, found, data)

    def _answer_blocking(self, data: Mapping[str, Any], completion: str) -> float:
        """Like `answer`, for a caller in a thread: the rewards run one after the other."""
        parts = self._for(self._of_answers, data)
        found: list[Added | None] = []
        for part in parts:
            try:
                found.append(given(part, self._runner.call_blocking(part.code, part.function, data, completion)))
            except UserCodeError as error:
                found.append(stand_in(part, error))
        return self._of_answer(parts, found, data)

    def _of_answer(self, parts: Sequence[RewardPart], found: Sequence[Added | None], data: Mapping[str, Any]) -> float:
        """Return the sum of the rewards that apply to an answer.

        Raises:
            UserCodeError: none of the run's rewards applies.
        """
        others = (*self._of_episodes, *self._of_groups)
        if parts and all(each is None for each in found) and not self._for(others, data):
            error = UserCodeError(
                parts[0].code.label,
                "returned None, which leaves a row to other rewards, and there are none; return a number",
                how=NO_REWARD,
            )
            return stand_in(parts[0], error)[0]
        return summed(found)[0]

    @property
    def are_verdicts(self) -> bool:
        """True if every reward of answers is a verdict."""
        return all(part.verdict for part in self._of_answers)

    def check_row(self, data: Mapping[str, Any]) -> None:
        """Check that an answer to the row can be right, as far as the rewards tell (`asyncrl.api.reward.row_check`).

        Raises:
            ValueError: it cannot; the message names the reward.
        """
        for part in self._parts:
            if part.check_row is not None and part.scores(data.get(SOURCE)):
                try:
                    part.check_row(data)
                except ValueError as error:
                    raise ValueError(f"{part.code.label}: {error}") from None

    @property
    def of_groups(self) -> bool:
        """True if a reward compares the answers of a group."""
        return bool(self._of_groups)

    async def score(self, prompt: Prompt, samples: Sequence[Sample], client: GroupClient) -> Sequence[Sample]:
        """Return the agent's samples, whose answers are scored (`RewardsOfGroups` scores episodes and groups too)."""
        return samples

    def _for(self, parts: tuple[RewardPart, ...], data: Mapping[str, Any]) -> tuple[RewardPart, ...]:
        """Return the rewards among `parts` that score rows of this row's source.

        Raises:
            UserCodeError: no reward of the run scores this source.
        """
        if not self._by_source:
            return parts
        source = data.get(SOURCE)
        if not any(part.scores(source) for part in self._parts):
            raise UserCodeError(
                "rewards", f"has none for rows of {SOURCE} {source!r}; name it in the sources of one", how=NO_REWARD
            )
        return tuple(part for part in parts if part.scores(source))

    async def _one(self, part: RewardPart, *args: Any) -> Added | None:
        try:
            return given(part, await self._runner.call(part.code, part.function, *args))
        except UserCodeError as error:
            return stand_in(part, error)


def given(part: RewardPart, value: object) -> Added | None:
    """Check the result of `part`, report it, and return it with its weight; None if it does not apply to the row.

    The result is a number, a mapping with the key `SCORE` and further numbers, or None.

    Raises:
        UserCodeError: it is neither, or a verdict other than 0 and 1.
    """
    if value is None:
        return None
    number, extras = (value.get(SCORE), _extras(part, value)) if isinstance(value, Mapping) else (value, {})
    number = plain_number(number)
    if number is None or not math.isfinite(number):
        raise UserCodeError(
            part.code.label,
            f"returned {value!r:.80}; a reward is a finite number, {{'{SCORE}': number, ...}}, or None where it "
            "does not apply",
            how=NO_REWARD,
        )
    if part.verdict:
        if number not in (0.0, 1.0):
            raise UserCodeError(
                part.code.label,
                f"is declared a verdict and returned {number:g}; return 0 or 1, or set its verdict to false",
                how=NO_REWARD,
            )
        current_meter().verdicts[part.name] = number == 1.0
    return _weighted(part, number, extras)


def _extras(part: RewardPart, value: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers besides the score, by the name of their metric; other values are left out."""
    named: dict[str, float] = {}
    for key, own in value.items():
        each = plain_number(own)
        if key == SCORE or each is None:
            continue
        name = f"{part.name}.{key}" if part.name else str(key)
        if name in ROW_METRICS or not math.isfinite(each):
            why = "is no finite number" if name not in ROW_METRICS else f"would hide the metric reward/{name}"
            raise UserCodeError(part.code.label, f"returned {key!r}: {each!r:.40}, which {why}", how=NO_REWARD)
        named[name] = float(each)
    return named


def _weighted(part: RewardPart, number: float, extras: Mapping[str, float]) -> Added:
    named = {part.name: number, **extras} if part.name else dict(extras)
    for name, each in named.items():
        current_meter().rewards[name].append(each)
        note_reward_part(name, each)
    return part.weight * number, named


def stand_in(part: RewardPart, error: UserCodeError) -> Added:
    """Return the `failure_reward` of a failed `part`; without one raise the error, which fails the rollout."""
    if part.failure_reward is None:
        raise error
    _log.info("%s; the answer is given failure_reward=%g", error, part.failure_reward)
    current_meter().failures += 1
    if part.verdict:
        current_meter().verdicts[part.name] = False
    return _weighted(part, part.failure_reward, {})


class _ToAwait:
    """An awaitable that raises a clear error if it is used as a number."""

    def __init__(self, coroutine: Any) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, None, float]:
        value: Generator[Any, None, float] = self._coroutine.__await__()
        return value

    def __float__(self) -> NoReturn:
        self._coroutine.close()
        raise TypeError("in asynchronous code a reward is awaited: `value = await self._reward(data, text)`")
