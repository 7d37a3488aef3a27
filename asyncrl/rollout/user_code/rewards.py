"""The rewards of a run: run each in its place, handle failures, and add them up by weight.

The environment calls rewards of answers (`Rewards.__call__`). Rewards of whole episodes and of groups are added once
the agent has returned its samples (`Rewards.score`). Each reward is reported by name, before its weight is applied.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from functools import partial
from itertools import groupby
from typing import Any, NoReturn, TypeAlias

from asyncrl.api import Episode, GroupClient, Prompt, RunIn, Sample, Tokenizer, answer_text
from asyncrl.api.agent import play_with_retries
from asyncrl.api.picture import Picture
from asyncrl.api.reward import ROW_CHECK, is_verdict
from asyncrl.config.setting import ConfigError
from asyncrl.plugins.settings import ROW_METRICS, NamedRewardConfig, RewardConfig
from asyncrl.rollout.user_code_pool.call_records import Activity, Code, UserCodeError, current_meter, plain_number
from asyncrl.rollout.user_code_pool.runner import (
    UserCodeRunner,
    built,
    is_async,
    is_built_in,
    loaded,
    place_of,
    target_in,
)

_NO_REWARD = "returned an invalid reward"
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
    place = place_of(group, config, found, called)
    if place == RunIn.auto and not is_async(called):
        place = RunIn.thread
    is_made = is_class and (place != RunIn.process or is_built_in(found))  # in a process: to check the arguments
    function = built(group, config, object) if is_made else partial(found, **config.args)
    sees = _sees(called)
    target = target_in(place, config.path, config.args)
    code = Code(f"reward {config.path}", Activity.reward, config.timeout_s, place, target, sees)
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


def _summed(given: Sequence[Added | None]) -> Added:
    applied = [each for each in given if each is not None]
    return sum(value for value, _ in applied), {name: number for _, named in applied for name, number in named.items()}


class Rewards:
    """The rewards of a run, each called in its thread, process or event loop; environments call it as their reward.

    Args:
        tokenizer: decodes samples, for rewards of episodes and groups.
    """

    def __init__(self, parts: Sequence[RewardPart], runner: UserCodeRunner, tokenizer: Tokenizer) -> None:
        self._parts, self._by_source = tuple(parts), any(part.sources for part in parts)
        self._of_answers, self._of_episodes, self._of_groups = (
            tuple(part for part in parts if part.sees == scope) for scope in RewardScope
        )
        self._runner, self._tokenizer = runner, tokenizer
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
        given = await asyncio.gather(*(self._one(part, data, completion) for part in parts))
        return self._of_answer(parts, given, data)

    def _answer_blocking(self, data: Mapping[str, Any], completion: str) -> float:
        """Like `answer`, for a caller in a thread: the rewards run one after the other."""
        parts = self._for(self._of_answers, data)
        given: list[Added | None] = []
        for part in parts:
            try:
                given.append(_given(part, self._runner.call_blocking(part.code, part.function, data, completion)))
            except UserCodeError as error:
                given.append(_stand_in(part, error))
        return self._of_answer(parts, given, data)

    def _of_answer(self, parts: Sequence[RewardPart], given: Sequence[Added | None], data: Mapping[str, Any]) -> float:
        """Return the sum of the rewards that apply to an answer.

        Raises:
            UserCodeError: none of the run's rewards applies.
        """
        others = (*self._of_episodes, *self._of_groups)
        if parts and all(each is None for each in given) and not self._for(others, data):
            error = UserCodeError(
                parts[0].code.label,
                "returned None, which leaves a row to other rewards, and there are none; return a number",
                how=_NO_REWARD,
            )
            return _stand_in(parts[0], error)[0]
        return _summed(given)[0]

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
        """Return the agent's samples with the rewards of episodes and groups; each sample of an episode is scored.

        If an episode's rewards fail, the episode is scored again, and is lost after its last attempt. If a group's
        rewards fail, the group fails.

        Raises:
            UserCodeError: as for `answer`, of a reward of groups.
        """
        if not samples or not (self._of_episodes or self._of_groups):
            return samples
        seen = [episode_of(prompt, sample, self._tokenizer) for sample in samples]
        by_episode: defaultdict[int, list[int]] = defaultdict(list)
        for at, sample in enumerate(samples):
            by_episode[sample.episode].append(at)

        async def score(member: int) -> Sequence[tuple[int, Added]]:
            async def play(_: Prompt) -> Sequence[tuple[int, Added]]:
                added = await asyncio.gather(*(self._of_episode(seen[at]) for at in by_episode[member]))
                return list(zip(by_episode[member], added, strict=True))

            return await play_with_retries(prompt.of_member(member), play, client, limited=False)

        async with asyncio.TaskGroup() as tasks:
            scoring = [tasks.create_task(score(member)) for member in by_episode]
        own = dict(scored for task in scoring for scored in task.result())
        kept = sorted(own)
        of_group = await self._of_the_group([seen[at] for at in kept])
        return [_with(_with(samples[at], own[at]), added) for at, added in zip(kept, of_group, strict=True)]

    async def _of_episode(self, episode: Episode) -> Added:
        parts = self._for(self._of_episodes, episode.data)
        return _summed(await asyncio.gather(*(self._one(part, episode) for part in parts)))

    async def _of_the_group(self, group: Sequence[Episode]) -> list[Added]:
        """Return the sum of the rewards of groups for each sample, `[S]`."""
        parts = self._for(self._of_groups, group[0].data) if group else ()
        if parts and self.embedder is not None and len({each.episode for each in group}) > 1:
            group = await with_embeddings(group, self.embedder)
        by_part = await asyncio.gather(*(self._of_group(part, group) for part in parts))
        return [_summed([values[number] for values in by_part]) for number in range(len(group))]

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
                "rewards", f"has none for rows of {SOURCE} {source!r}; name it in the sources of one", how=_NO_REWARD
            )
        return tuple(part for part in parts if part.scores(source))

    async def _one(self, part: RewardPart, *args: Any) -> Added | None:
        try:
            return _given(part, await self._runner.call(part.code, part.function, *args))
        except UserCodeError as error:
            return _stand_in(part, error)

    async def _of_group(self, part: RewardPart, group: Sequence[Episode]) -> list[Added | None]:
        try:
            values = await self._runner.call(part.code, part.function, list(group))
            try:
                values = list(values)
            except TypeError:
                message = f"returned {values!r:.80} for a group; return a list"
                raise UserCodeError(part.code.label, message, how=_NO_REWARD) from None
            if len(values) != len(group):
                message = f"returned {len(values)} rewards for a group of {len(group)} samples; return one for each"
                raise UserCodeError(part.code.label, message, how=_NO_REWARD)
            return [_given(part, value) for value in values]
        except UserCodeError as error:
            return [_stand_in(part, error) for _ in group]


async def with_embeddings(group: Sequence[Episode], embedder: Embedder) -> list[Episode]:
    """Return the samples of `group` with the embeddings of their episodes; an episode without frames has none.

    Raises:
        UserCodeError: the frames could not be embedded.
    """
    frames: dict[int, list[Picture]] = {}
    for sample in group:
        if sample.frames:
            frames.setdefault(sample.episode, []).extend(sample.frames)
    vectors = dict(zip(frames, await embedder(list(frames.values())), strict=True)) if frames else {}
    return [replace(sample, embedding=vectors.get(sample.episode, ())) for sample in group]


def _with(sample: Sample, added: Added) -> Sample:
    more, parts = added
    return replace(sample, reward=sample.reward + more, reward_parts={**sample.reward_parts, **parts})


def _given(part: RewardPart, value: object) -> Added | None:
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
            how=_NO_REWARD,
        )
    if part.verdict:
        if number not in (0.0, 1.0):
            raise UserCodeError(
                part.code.label,
                f"is declared a verdict and returned {number:g}; return 0 or 1, or set its verdict to false",
                how=_NO_REWARD,
            )
        current_meter().add_verdict(part.name, number == 1.0)
    return _weighted(part, number, extras)


def _extras(part: RewardPart, value: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers besides the score, by the name of their metric; other values are left out."""
    named: dict[str, float] = {}
    for key, given in value.items():
        each = plain_number(given)
        if key == SCORE or each is None:
            continue
        name = f"{part.name}.{key}" if part.name else str(key)
        if name in ROW_METRICS or not math.isfinite(each):
            why = "is no finite number" if name not in ROW_METRICS else f"would hide the metric reward/{name}"
            raise UserCodeError(part.code.label, f"returned {key!r}: {each!r:.40}, which {why}", how=_NO_REWARD)
        named[name] = float(each)
    return named


def _weighted(part: RewardPart, number: float, extras: Mapping[str, float]) -> Added:
    named = {part.name: number, **extras} if part.name else dict(extras)
    for name, each in named.items():
        current_meter().add_reward(name, each)
    return part.weight * number, named


def _stand_in(part: RewardPart, error: UserCodeError) -> Added:
    """Return the `failure_reward` of a failed `part`; without one raise the error, which fails the rollout."""
    if part.failure_reward is None:
        raise error
    _log.info("%s; the answer is given failure_reward=%g", error, part.failure_reward)
    current_meter().add_failure()
    if part.verdict:
        current_meter().add_verdict(part.name, False)
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


def episode_of(prompt: Prompt, sample: Sample, tokenizer: Tokenizer) -> Episode:
    """Convert `sample` to the form that rewards receive."""
    mask = sample.loss_mask.astype(bool).tolist()
    tokens = sample.tokens.tolist()
    first = mask.index(True) if any(mask) else len(mask)
    stretches = groupby(range(first, len(tokens)), key=mask.__getitem__)
    turns = [(places[0], places[-1] + 1) for generated, stretch in stretches if generated for places in [[*stretch]]]
    return Episode(
        data=prompt.data,
        prompt=tokenizer.decode(tokens[:first]),
        turns=tuple(answer_text(tokenizer, tokens[:begin], tokens[begin:end]) for begin, end in turns),
        response=tokenizer.decode(tokens[first:]),
        generated_tokens=sample.generated_length,
        truncated=sample.truncated,
        reward=float(sample.total_reward),
        episode=sample.episode,
        version=int(sample.versions.max()),
        metrics=sample.metrics,
        frames=sample.frames,
    )
