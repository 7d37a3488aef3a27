"""A group's games in one `gymnasium.vector` environment, for games that are faster when stepped together.

Members step in lockstep: each waits until all members that still play have chosen an action. A member leaves when its
game ends or is closed. The games begin once, with the seeds of their members.

`SyncVectorEnv` and `AsyncVectorEnv` (`vectorization_mode: async`) are supported. The latter's processes come from a
fork server, because a RolloutWorker has threads, and do not use shared memory, which would corrupt texts. They are
killed if one of them died or hangs. A game's own vector environment (`vector_entry_point`) is not supported: it takes
one seed for all games, so they could not begin alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from asyncrl.api import Environment, StepResult
from asyncrl.data.picture_parts import Content
from asyncrl.plugins.envs.gymnasium_env import DRAWN, GameText

Call = Callable[..., Awaitable[Any]]
"""Calls a plain function with its arguments, off the event loop."""


class VectorGames:
    """The games of one group, stepped together once every member that still plays has chosen. For one event loop.

    Args:
        call: calls the environment's functions off the event loop.
        size: number of games.
        others: as for `asyncrl.plugins.envs.gymnasium_env.GymnasiumEnv`; `kwargs` are those of `gymnasium.make_vec`.
    """

    def __init__(
        self,
        call: Call,
        size: int,
        *,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        observe: str | None = None,
        act: str | None = None,
        actions: Sequence[str] = (),
        invalid_reward: float = 0.0,
    ) -> None:
        self._call, self._size, self.invalid_reward = call, size, invalid_reward
        self._games = TextVector(size, id, kwargs, GameText(observe, act, actions))
        self._broken = False
        self._playing = set(range(size))
        self._pending: dict[int, tuple[Any, asyncio.Future[Any]]] = {}
        self._members = 0

    def member(self) -> Environment:
        """Return the environment of the next member; there are `size` of them."""
        if self._members == self._size:
            raise RuntimeError(
                f"a group of {self._size} has no environment more; make_env is called once for each member"
            )
        self._members += 1
        return _Member(self, self._members - 1)

    async def reset(self, member: int, seed: int | None) -> tuple[Content, Mapping[str, Any]]:
        """Begin the member's game once all members have called this."""
        if self._games.has_begun:
            raise RuntimeError("a game in a vector is played once: reset is called again")
        return await self._together(member, seed)  # type: ignore[no-any-return]

    async def step(self, member: int, answer: Any) -> StepResult:
        """Apply the member's action once all members have chosen theirs, and return its result."""
        if member not in self._playing:
            raise RuntimeError("the game has ended")
        try:
            action = self._games.action(answer)
        except ValueError as error:
            await self.leave(member)
            return "", self.invalid_reward, True, False, {"invalid_action": str(error)}
        result: StepResult = await self._together(member, action)
        if result[2] or result[3]:
            await self.leave(member)
        return result

    async def leave(self, member: int) -> None:
        """Remove the member; the vector is closed after the last one."""
        if member not in self._playing:
            return
        self._playing.discard(member)
        if self._playing:
            await self._advance()
        elif self._games.has_begun:
            await self._call(self._games.end, self._broken)

    async def _together(self, member: int, what: Any) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[member] = what, future
        await self._advance()
        return await future

    async def _advance(self) -> None:
        """Step the games if all members that still play have chosen an action."""
        if not self._pending or self._pending.keys() != self._playing:
            return
        answer, self._pending = self._pending, {}
        given = {member: what for member, (what, _) in answer.items()}
        try:
            results = await self._call(self._games.step if self._games.has_begun else self._games.begin, given)
        except BaseException as error:
            self._broken = True
            cancelled = not isinstance(error, Exception)  # the cancelled member was stepping for all members
            reason = RuntimeError("another game of the vector was cancelled in its step") if cancelled else error
            for _, future in answer.values():
                if not future.done():
                    future.set_exception(reason)
                    if cancelled:
                        future.exception()  # the cancelled member does not read it
            if cancelled:
                raise
            return
        for member, (_, future) in answer.items():
            if not future.done():
                future.set_result(results[member])


class TextVector:
    """Games of one `gymnasium.vector` environment, with observations and actions as texts. Its calls block.

    Args:
        size: number of games.
        id: name of the environment.
        kwargs: those of `gymnasium.make_vec`.
        text: converts observations and actions.
    """

    def __init__(self, size: int, id: str, kwargs: Mapping[str, Any] | None, text: GameText) -> None:
        self._size, self._id, self._text = size, id, text
        self._kwargs: dict[str, Any] = {"vectorization_mode": "sync", **(kwargs or {})}
        if self._kwargs["vectorization_mode"] == "async":
            own = self._kwargs.get("vector_kwargs") or {}
            self._kwargs["vector_kwargs"] = {"shared_memory": False, "context": "forkserver", **own}
        self._vector: Any = None

    @property
    def has_begun(self) -> bool:
        """True if the games were made."""
        return self._vector is not None

    def action(self, answer: Any) -> Any:
        """Convert the policy's text to an action of one game.

        Raises:
            ValueError: it is not one.
        """
        return self._text.action(answer, _Single(self._vector))

    def begin(self, seeds: Mapping[int, int | None]) -> list[tuple[Content, dict[str, Any]]]:
        """Make the games and begin them. Return the first observation and infos of each.

        Args:
            seeds: by number of the game.

        Raises:
            ValueError: the games cannot be played so; the message names the setting.
        """
        vector: Any = gymnasium.make_vec(self._id, num_envs=self._size, **self._kwargs)
        if vector.metadata.get("autoreset_mode") == AutoresetMode.DISABLED:
            raise ValueError(
                "env.args.kwargs: with autoreset_mode=Disabled a group ends with its first game; leave it out"
            )
        self._text.check(_Single(vector))
        self._vector = vector
        if isinstance(vector, AsyncVectorEnv) and vector.shared_memory and _has_text(vector.single_observation_space):
            raise ValueError(
                "env.args.kwargs.vector_kwargs.shared_memory=true: texts do not come through shared memory as they "
                "are; leave it out"
            )
        own: list[int | None] | None = [seeds.get(member) for member in range(self._size)]
        if self._kwargs["vectorization_mode"] not in ("sync", "async"):
            if set(seeds.values()) != {None}:
                raise ValueError(
                    f"env.args.kwargs.vectorization_mode={self._kwargs['vectorization_mode']!s}: it takes one seed for "
                    "all games, and the rows give each game its own; use sync or async, or rows without a seed"
                )
            own = None
        observations, infos = vector.reset(seed=own)
        return [(text, _own(infos, member)) for member, text in enumerate(self._words(observations))]

    def step(self, given: Mapping[int, Any]) -> list[StepResult]:
        """Step all games once.

        Args:
            given: by number of the game, the action; games that have ended have none.
        """
        vector, space = self._vector, self._vector.single_action_space
        idle = next(iter(given.values()))  # a dummy action for ended games, whose results are not read
        actions = [given.get(member, idle) for member in range(self._size)]
        buffer: Any = create_empty_array(space, self._size)
        joined = concatenate(space, actions, buffer)
        observations, rewards, terminated, truncated, infos = vector.step(joined)
        return [
            (text, float(rewards[member]), bool(terminated[member]), bool(truncated[member]), _own(infos, member))
            for member, text in enumerate(self._words(observations))
        ]

    def end(self, broken: bool) -> None:
        """Close the games.

        Args:
            broken: a step failed, so their processes may be gone or hang, and are killed.
        """
        vector = self._vector
        if broken and isinstance(vector, AsyncVectorEnv):  # its own `close` would wait for dead processes
            for process in vector.processes:
                process.kill()
            for process in vector.processes:
                process.join()
            vector.closed = True
        else:
            vector.close()

    def _words(self, observations: Any) -> list[Content]:
        vector, single = self._vector, _Single(self._vector)
        rendered = vector.render() if vector.render_mode in DRAWN else [None] * self._size
        each = zip(iterate(vector.observation_space, observations), rendered, strict=True)
        return [self._text.observation(observation, single, picture) for observation, picture in each]


def _has_text(space: Any) -> bool:
    if isinstance(space, spaces.Text):
        return True
    parts = space.spaces if isinstance(space, spaces.Tuple | spaces.Dict) else ()
    return any(map(_has_text, parts.values() if isinstance(parts, Mapping) else parts))


def _own(infos: Mapping[str, Any], member: int) -> dict[str, Any]:
    """Return a member's part of a vector's infos, which are arrays with a mask of the members that have an entry."""
    return {
        name: values[member]
        for name, values in infos.items()
        if not name.startswith("_") and (f"_{name}" not in infos or infos[f"_{name}"][member])
    }


class _Single:
    """One game of a vector, for its conversion to text."""

    def __init__(self, vector: Any) -> None:
        self.observation_space, self.action_space = vector.single_observation_space, vector.single_action_space
        self.render_mode: str | None = vector.render_mode


class _Member(Environment):
    def __init__(self, games: VectorGames, member: int) -> None:
        self._games, self._member = games, member

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Content, Mapping[str, Any]]:
        return await self._games.reset(self._member, seed)

    async def step(self, action: Any) -> StepResult:
        return await self._games.step(self._member, action)

    async def close(self) -> None:
        await self._games.leave(self._member)
