"""Rewards as plain functions, what they see, and where they run.

A reward is named by import path in `reward.path` (or in a list, `rewards`). What it sees is told by the name of its
first parameter:

| signature                              | called                                | returns                    |
|----------------------------------------|---------------------------------------|----------------------------|
| `score(data, completion) -> float`     | by the environment, for each answer   | the reward of the answer   |
| `score(episode) -> float`              | once a sample is complete             | its reward                 |
| `score(group) -> Sequence[float]`      | once the whole group is complete      | a reward for each sample   |

`def` and `async def` both do. A class does too: `args` go to its constructor, and its instances are called.

A reward that says whether an answer is right, 1 or 0 and nothing between, is a verdict and says so (`verdict`): then
evaluations report accuracy and pass@k besides the mean.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T", bound=Callable[..., Any])
_MARK = "__asyncrl_run_in__"
_VERDICT = "__asyncrl_verdict__"


class RunIn(StrEnum):
    """Place where a user's function runs, off the event loop or on it."""

    auto = "auto"
    """As the function is marked (`run_in`); without a mark, `async def` on the users' event loop and `def` in a
    thread.
    """
    loop = "loop"
    """On the event loop that calls it; only for functions that always take less than a millisecond."""
    thread = "thread"
    """For what waits, or computes in a library that lets go of the interpreter's lock. Not to be killed."""
    process = "process"
    """For what computes in Python, may hang, crash or want too much memory: it is killed, and nothing else is."""


class RewardFunction(Protocol):
    """Any callable with this signature; name it in `reward.path`. RolloutWorkers call it, training ranks never do.

    The reward that an environment is given has this signature too; it is the weighted sum of all rewards of this form.
    An environment with `async def step` awaits it, one with a plain `step`, which runs in a thread, gets the number.
    """

    def __call__(self, data: Mapping[str, Any], completion: str) -> float | Awaitable[float]:
        """The reward of answer text `completion` to dataset row `data`, a finite number."""
        ...


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished sample as rewards see it: plain data, so that it can be scored in another process.

    Attributes:
        data: the dataset's row.
        prompt: text of the tokens before the first generated one.
        turns: text of each stretch of generated tokens; one for a single turn.
        response: text of everything after the prompt, what environment and tools said included.
        generated_tokens: number of tokens that the policy wrote.
        truncated: the answer was cut off by a length limit.
        reward: what the sample has earned before rewards of whole episodes and groups.
    """

    data: Mapping[str, Any]
    prompt: str
    turns: tuple[str, ...]
    response: str
    generated_tokens: int
    truncated: bool
    reward: float

    @property
    def completion(self) -> str:
        """Text of the last turn: the answer."""
        return self.turns[-1] if self.turns else ""


class EpisodeReward(Protocol):
    """A reward that sees a whole sample: all turns, its length, whether it was cut off."""

    def __call__(self, episode: Episode) -> float | Awaitable[float]:
        """The reward of `episode`, added to what its environment gave."""
        ...


class GroupReward(Protocol):
    """A reward that compares a prompt's samples with each other."""

    def __call__(self, group: Sequence[Episode]) -> Sequence[float] | Awaitable[Sequence[float]]:
        """A reward for each sample of `group`, in its order."""
        ...


class RewardParts:
    """Values of named rewards for the answers of one episode."""

    def __init__(self) -> None:
        self._given: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, name: str, value: float) -> None:
        """The reward `name` gave an answer `value`, before its weight."""
        self._given[name].append(value)

    def means(self) -> dict[str, float]:
        """Return each reward's mean over the answers, as in `Sample.reward_parts`."""
        return {name: sum(values) / len(values) for name, values in self._given.items()}


_parts: ContextVar[RewardParts | None] = ContextVar("asyncrl_reward_parts", default=None)


@contextlib.contextmanager
def reward_parts() -> Iterator[RewardParts]:
    """The parts of what is rewarded within, in tasks and threads that it starts too."""
    parts = RewardParts()
    token = _parts.set(parts)
    try:
        yield parts
    finally:
        _parts.reset(token)


def note_reward_part(name: str, value: float) -> None:
    """A named reward gave `value`; it is kept where `reward_parts` asks for it."""
    if (parts := _parts.get()) is not None:
        parts.add(name, value)


async def scored(reward: RewardFunction, data: Mapping[str, Any], completion: str) -> float:
    """Return the value of `reward`, awaited if necessary; for environments."""
    value = reward(data, completion)
    return float(await value if inspect.isawaitable(value) else value)


def run_in(where: RunIn | str) -> Callable[[_T], _T]:
    """Mark a reward function or class: `@run_in("process")`. The setting `run_in` of the reward wins over the mark.

    Raises:
        ValueError: `where` is no member of `RunIn`.
    """
    place = RunIn(where)

    def mark(function: _T) -> _T:
        setattr(function, _MARK, place)
        return function

    return mark


def marked_run_in(function: object) -> RunIn:
    """Return the mark of `function`; `auto` if it has none."""
    place = getattr(function, _MARK, RunIn.auto)
    return RunIn(place)


def verdict(reward: _T) -> _T:
    """Mark a reward as a verdict on an answer: 1 where it is right, 0 where it is wrong, never anything else.

    `@verdict` stands above a function or a class; in a constructor `verdict(self)` marks the instance alone. The
    setting `verdict` of the reward wins over the mark. What a verdict returns is checked.
    """
    setattr(reward, _VERDICT, True)
    return reward


def is_verdict(reward: object) -> bool:
    """True if `reward` is marked as a verdict."""
    return getattr(reward, _VERDICT, False) is True
