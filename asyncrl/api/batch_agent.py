"""Agents that play the groups of several prompts in one call."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncrl.api.agent import Agent, Environment, EpisodeError, GroupClient
from asyncrl.api.generation import Prompt
from asyncrl.api.trajectory import Sample

BatchOutcome: TypeAlias = "Awaitable[Sequence[Sequence[Sample]]] | AsyncIterator[tuple[int, Sequence[Sample]]]"


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """One group of a batch: the arguments of `Agent.run_group`."""

    prompt: Prompt
    make_env: Callable[[], Environment]
    client: GroupClient


class BatchAgent(Agent):
    """Subclass and implement `run_batch`: the groups of up to `batch_size` prompts in one call.

    Prompts are admitted one by one, as with every agent, so the staleness bound holds for each. `run_batch` is called
    once `batch_size` prompts are admitted, or `batch_wait_s` seconds after the first; both are attributes of the class
    or the object. A RolloutWorker has at most `rollout.max_concurrent` prompts at a time. Calls may overlap.
    """

    batch_size: int = 8
    batch_wait_s: float = 1.0

    def __init_subclass__(cls, **more: Any) -> None:
        """Give the subclass its own `run_group` in the subclass's module, which decides where it runs."""
        super().__init_subclass__(**more)
        if "run_batch" in vars(cls) and "run_group" not in vars(cls):

            @functools.wraps(BatchAgent.run_group)
            async def run_group(self: BatchAgent, *args: Any) -> Sequence[Sample]:
                return await self._in_batch(BatchGroup(*args))

            run_group.__module__ = cls.__module__
            cls.run_group = run_group  # type: ignore[method-assign,assignment]

    def run_batch(self, groups: Sequence[BatchGroup]) -> BatchOutcome:
        """Play `groups`: a coroutine or an asynchronous generator.

        Returns:
            The samples of each group, as in `Agent.run_group`, in the order of `groups`. A generator yields
            `(index, samples)` as each group completes; such a group is trained without waiting for the others.
        """
        raise NotImplementedError(f"agent {type(self).__name__} implements no `run_batch`")

    async def run_group(
        self, prompt: Prompt, make_env: Callable[[], Environment], client: GroupClient
    ) -> Sequence[Sample]:
        """Play one group, in a batch with others."""
        return await self._in_batch(BatchGroup(prompt, make_env, client))

    async def _in_batch(self, group: BatchGroup) -> Sequence[Sample]:
        batch: _Batch | None = vars(self).get("_open")
        if batch is None:
            batch = _Batch()
            self._open: _Batch | None = batch
            batch.timer = asyncio.get_running_loop().call_later(self.batch_wait_s, self._begin, batch)
        found = batch.join(group)
        if len(batch.members) >= self.batch_size:
            self._begin(batch)
        try:
            return await found
        finally:
            batch.leave(group)

    def _begin(self, batch: _Batch) -> None:
        if self._open is batch:
            self._open = None
        batch.begin(self)


class _Batch:
    """The groups of one call, and the futures of their samples."""

    def __init__(self) -> None:
        self.members: list[tuple[BatchGroup, asyncio.Future[Sequence[Sample]]]] = []
        self.timer: asyncio.TimerHandle | None = None
        self._playing: asyncio.Task[None] | None = None

    def join(self, group: BatchGroup) -> asyncio.Future[Sequence[Sample]]:
        found: asyncio.Future[Sequence[Sample]] = asyncio.get_running_loop().create_future()
        self.members.append((group, found))
        return found

    def leave(self, group: BatchGroup) -> None:
        """Remove a group whose caller no longer waits. The call is cancelled once no caller waits."""
        if self._playing is None:
            self.members = [member for member in self.members if member[0] is not group]
        elif all(found.done() for _, found in self.members):
            self._playing.cancel()

    def begin(self, agent: BatchAgent) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.members and self._playing is None:
            self._playing = asyncio.get_running_loop().create_task(self._play(agent))

    async def _play(self, agent: BatchAgent) -> None:
        name = f"agent {type(agent).__name__}"
        try:
            outcome: Any = agent.run_batch([group for group, _ in self.members])
            if hasattr(outcome, "__aiter__"):
                async for index, samples in outcome:
                    self._tell(index, samples)
            else:
                results = await outcome
                if len(results) != len(self.members):
                    raise EpisodeError(
                        f"{name}: run_batch returned {len(results)} results for {len(self.members)} groups"
                    )
                for index, samples in enumerate(results):
                    self._tell(index, samples)
            for group, found in self.members:
                if not found.done():
                    found.set_exception(
                        EpisodeError(f"{name}: run_batch returned no samples for prompt {group.prompt.prompt_id}")
                    )
        except BaseException as error:  # every caller receives the error, SystemExit included
            failure = error if isinstance(error, Exception) else EpisodeError(f"{name}: run_batch ended by {error!r}")
            for _, found in self.members:
                if not found.done():
                    found.set_exception(failure)
            if isinstance(error, asyncio.CancelledError):
                raise

    def _tell(self, index: int, samples: Sequence[Sample]) -> None:
        found = self.members[index][1]
        if not found.done():  # else its caller no longer waits, or the group was reported twice
            found.set_result(samples)
