"""Rewards as plain functions: their signatures, and where they run.

A reward is named by import path in `reward.path` (or in a list, `rewards`). The name of its first parameter decides
what it receives:

| signature                              | called                                | returns                    |
|----------------------------------------|---------------------------------------|----------------------------|
| `score(data, completion) -> float`     | by the environment, for each answer   | the reward of the answer   |
| `score(episode) -> float`              | once a sample is complete             | its reward                 |
| `score(group) -> Sequence[float]`      | once the whole group is complete      | a reward for each sample   |

Both `def` and `async def` work. So does a class: `args` go to its constructor, and the instance is called.

Mark a reward that is 1 for a right answer and 0 for a wrong one with `@verdict`. Evaluations then report accuracy and
pass@k in addition to the mean.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from numbers import Real
from typing import Any, Protocol, TypeVar

from asyncrl.api.picture import Picture

_T = TypeVar("_T", bound=Callable[..., Any])
_MARK = "__asyncrl_run_in__"
_VERDICT = "__asyncrl_verdict__"
ROW_CHECK = "check_row"
"""Attribute of a reward with the check of its rows; see `row_check`."""


class RunIn(StrEnum):
    """Place where a user's function runs, off the event loop or on it."""

    auto = "auto"
    """The place of the function's mark (`run_in`). Without a mark, `async def` runs on the event loop for user code,
    and `def` in a thread.
    """
    loop = "loop"
    """On the calling event loop; only for functions that always take less than a millisecond."""
    thread = "thread"
    """For code that waits, or computes in a library that releases the GIL. It cannot be killed."""
    process = "process"
    """For code that computes in Python, or may hang, crash or use too much memory: only its process is killed."""


class RewardFunction(Protocol):
    """Any callable with this signature; name it in `reward.path`. RolloutWorkers call it, training ranks never do.

    The reward that an environment receives has this signature too: it is the weighted sum of all rewards of this form.
    An environment with `async def step` awaits it. One with a plain `step`, which runs in a thread, gets the number.
    """

    def __call__(self, data: Mapping[str, Any], completion: str) -> float | Awaitable[float]:
        """Return the reward of the answer text `completion` to dataset row `data`, a finite number."""
        ...


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished sample for rewards: plain data, so that another process can score it.

    Attributes:
        data: the dataset's row.
        prompt: text of the tokens before the first generated one.
        turns: text of each run of generated tokens; one entry for a single turn.
        response: text of everything after the prompt, including text from the environment and from tools.
        generated_tokens: number of tokens that the policy generated.
        truncated: the answer was cut off by a length limit.
        reward: the sample's reward so far, before rewards of whole episodes and groups.
        episode: number of the episode in its group; an agent's episode may give several samples.
        version: newest policy version of a generated token; -1 if there is none.
        metrics: the agent's own numbers, `Sample.metrics`.
        frames: pictures of the episode in order, `Sample.frames`.
        embedding: `[D]`, of the frames of its episode, from an EncoderServer (`rollout.encoder`); empty without one
            and in evaluations.
    """

    data: Mapping[str, Any]
    prompt: str
    turns: tuple[str, ...]
    response: str
    generated_tokens: int
    truncated: bool
    reward: float
    episode: int = 0
    version: int = -1
    metrics: Mapping[str, float] = field(default_factory=dict)
    frames: tuple[Picture, ...] = ()
    embedding: tuple[float, ...] = ()

    @property
    def completion(self) -> str:
        """Text of the last turn: the answer."""
        return self.turns[-1] if self.turns else ""


class EpisodeReward(Protocol):
    """A reward of a whole sample: it receives all turns, the length and `truncated`."""

    def __call__(self, episode: Episode) -> float | Awaitable[float]:
        """Return the reward of `episode`; it is added to the reward of the environment."""
        ...


class GroupReward(Protocol):
    """A reward that compares a prompt's samples with each other."""

    def __call__(self, group: Sequence[Episode]) -> Sequence[float] | Awaitable[Sequence[float]]:
        """Return a reward for each sample of `group`, in the same order."""
        ...


class RewardParts:
    """Values of named rewards for the answers of one episode."""

    def __init__(self) -> None:
        self._given: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, name: str, value: float) -> None:
        """Record `value` of the reward `name` for an answer, before the weight is applied."""
        self._given[name].append(value)

    def means(self) -> dict[str, float]:
        """Return each reward's mean over the answers, as in `Sample.reward_parts`."""
        return {name: sum(values) / len(values) for name, values in self._given.items()}


_parts: ContextVar[RewardParts | None] = ContextVar("asyncrl_reward_parts", default=None)


@contextlib.contextmanager
def reward_parts() -> Iterator[RewardParts]:
    """Collect the parts of all rewards computed within the block, including tasks and threads that it starts."""
    parts = RewardParts()
    token = _parts.set(parts)
    try:
        yield parts
    finally:
        _parts.reset(token)


def note_reward_part(name: str, value: float) -> None:
    """Record `value` of a named reward, if a `reward_parts` block is active."""
    if (parts := _parts.get()) is not None:
        parts.add(name, value)


async def scored(reward: RewardFunction, data: Mapping[str, Any], completion: str) -> float:
    """Return the value of `reward`, awaited if necessary; for environments."""
    value = reward(data, completion)
    return float(await value if inspect.isawaitable(value) else value)


def run_in(where: RunIn | str) -> Callable[[_T], _T]:
    """Mark a reward function or class: `@run_in("process")`. The reward's setting `run_in` overrides the mark.

    Raises:
        ValueError: `where` is not a member of `RunIn`.
    """
    chosen = RunIn(where)

    def mark(function: _T) -> _T:
        setattr(function, _MARK, chosen)
        return function

    return mark


def marked_run_in(function: object) -> RunIn:
    """Return the mark of `function`; `auto` if it has none."""
    chosen = getattr(function, _MARK, RunIn.auto)
    return RunIn(chosen)


def verdict(reward: _T) -> _T:
    """Mark a reward as a verdict: it returns 1 for a right answer and 0 for a wrong one, and nothing else.

    Use `@verdict` on a function or a class, or `verdict(self)` in a constructor to mark one instance. The reward's
    setting `verdict` overrides the mark. Returned values are checked.
    """
    setattr(reward, _VERDICT, True)
    return reward


def row_check(check: Callable[[Mapping[str, Any]], object]) -> Callable[[_T], _T]:
    """Mark a reward with a function that raises ValueError for a row that no answer can be right for.

    It is called with rows of the dataset before a run starts, and the rows that it refuses are reported. A class of
    rewards may have a method `check_row` instead.
    """

    def mark(function: _T) -> _T:
        setattr(function, ROW_CHECK, check)
        return function

    return mark


def is_verdict(reward: object) -> bool:
    """True if `reward` is marked as a verdict."""
    return getattr(reward, _VERDICT, False) is True


def right_answers(data: Mapping[str, Any]) -> list[str]:
    """Return `data["answer"]` as a list of texts; it may be a text, a number or a list of these.

    Raises:
        ValueError: the row has no answer, or one that nothing can agree with, such as NaN or a mapping; otherwise every
            completion would silently be wrong.
    """
    answer = data.get("answer")
    answers = list(answer) if isinstance(answer, list | tuple) else [answer]
    if not answers or any(each is None for each in answers):
        wrong = f"answer is {answer!r}" if "answer" in data else f"fields are {', '.join(data)}, with no answer"
        raise ValueError(f"the row's {wrong}: give each row one, or name its column in dataset.fields.answer")
    for each in answers:
        if not isinstance(each, str | Real | Decimal) or not (isinstance(each, str) or math.isfinite(each)):
            raise ValueError(
                f"the row's answer is {each!r:.60}, of the type {type(each).__name__}, which no text agrees with: give "
                "a text, a finite number or a list of these, or name another column in dataset.fields.answer"
            )
    return [str(each) for each in answers]
