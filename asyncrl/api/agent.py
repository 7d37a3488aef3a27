"""The agent, which turns a prompt into trajectories, and the environment that it acts in."""

from __future__ import annotations

import asyncio
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from numbers import Real
from typing import Any, Protocol, Self, TypeAlias, TypeVar

from asyncrl.api.chat import ChatClient
from asyncrl.api.generation import GenerationClient, GenerationRequest, GenerationResult, Prompt
from asyncrl.api.reward import reward_parts
from asyncrl.api.trajectory import Sample

StepResult = tuple[Any, float, bool, bool, Mapping[str, Any]]
"""(observation, reward, terminated, truncated, info), as in Gymnasium."""


class Environment(ABC):
    """Subclass, implement `reset` and `step`, and name the class in `env.path`. `env.args` go to the constructor.

    One instance serves one episode (with `Agent.collect_trajectory` one group). It is closed when the episode (or
    group) ends, for any result.

    The methods may be plain `def`s. Each call then runs in a thread, the calls of one instance one after another, and
    the reward that the constructor receives is a plain function. Use `def` for code that sleeps, computes or calls a
    service synchronously: `async def`s share one event loop with all your other asynchronous code. A call that takes
    longer than `env.timeout_s` fails its rollout.
    """

    @abstractmethod
    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Start an episode for the row in `options["data"]`; returns (observation, info).

        An agent that passes a seed passes the same seed to all members of a group, so they begin in the same state.
        """

    @abstractmethod
    async def step(self, action: Any) -> StepResult:
        """Apply the agent's action (for the built-in environments: the answer's text)."""

    async def close(self) -> None:
        """Release what `reset` acquired. The default holds nothing."""
        return None


_T = TypeVar("_T")

_LOOK_S = 0.05
"""Least time between two looks at the seconds left, which may stand still."""

Outcome: TypeAlias = "Sample | Sequence[Sample] | float | None"
"""Result of an episode: its samples, or a reward for everything that its client recorded; None rejects the episode."""

AGENT_METHODS = ("roll_out", "run_group", "run", "collect_trajectory")
"""Methods that make a class an agent. If a class has several, the first in this list is called. `roll_out` is for
agents around agents, and a class with `run_group` may have `run` for its subclasses.
"""


class EpisodeError(RuntimeError):
    """The user's agent broke its contract. The message names the agent and the error."""


class EpisodeTimeout(EpisodeError):
    """An episode, or an agent that plays its group at once, was still running when the rollout's time was over."""


class GroupClient(GenerationClient, Protocol):
    """The policy for code that rolls out a whole group, and the handling of its failed episodes."""

    def episode(self, prompt: Prompt) -> ChatClient:
        """Return the policy for one episode, which records its answers; `prompt` is from `Prompt.of_member`."""
        ...

    def try_again(self, prompt: Prompt, error: Exception) -> Prompt | None:
        """Return the prompt for the next attempt, with a new random stream; None if the episode has no attempts left
        and counts as lost.
        """
        ...

    def seconds_left(self) -> float | None:
        """Seconds left for this rollout; None if it has no limit. They pass only while no server, environment, reward
        or tool works for it: these have limits of their own.
        """
        ...


async def play_with_retries(
    prompt: Prompt,
    play: Callable[[Prompt], Awaitable[Sequence[_T]]],
    client: GroupClient,
    *,
    limited: bool = True,
) -> Sequence[_T]:
    """Play one episode, and retry it alone if it fails. Other episodes of the group are not affected.

    An attempt fails if it raises (SystemExit included), if it is cancelled from within, or if it is still running when
    the rollout's time is over.

    Args:
        play: runs one attempt with the prompt that it receives.
        client: decides whether a failed episode gets another attempt.
        limited: apply the rollout's time limit.

    Returns:
        Result of the first successful attempt; an empty sequence if the episode is lost.
    """
    own: Prompt | None = prompt
    while own is not None:
        failure: Exception
        try:
            async with _time_of(client if limited else None) as limit:
                return await play(own)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the rollout itself was cancelled
                raise
            failure = cancelled_within("the episode", prompt)
            failure.__cause__ = error
        except SystemExit as error:
            failure = EpisodeError(f"the episode of prompt {prompt.prompt_id} called sys.exit({error.code!r:.80})")
            failure.__cause__ = error
        except Exception as error:
            failure = timed_out(prompt) if limit.expired() else error
        own = client.try_again(own, failure)
    return ()


@asynccontextmanager
async def _time_of(client: GroupClient | None) -> AsyncIterator[asyncio.Timeout]:
    """Like `asyncio.timeout`, until the rollout has no seconds left; without `client` there is no limit."""
    loop, timer = asyncio.get_running_loop(), None
    async with asyncio.timeout(None) as limit:

        def look() -> None:
            nonlocal timer
            if client is None or (left_s := client.seconds_left()) is None:
                return
            if left_s <= 0:
                limit.reschedule(loop.time())
            else:  # meanwhile some of the time may not count
                timer = loop.call_later(max(left_s, _LOOK_S), look)

        look()
        try:
            yield limit
        finally:
            if timer is not None:
                timer.cancel()


def cancelled_within(what: str, prompt: Prompt) -> EpisodeError:
    """Build the error for an episode that was cancelled by its own code rather than by the rollout."""
    return EpisodeError(
        f"{what} was cancelled from within, on prompt {prompt.prompt_id}: a task or connection that the agent or its "
        "environment awaits was cancelled; catch asyncio.CancelledError there"
    )


def timed_out(prompt: Prompt) -> EpisodeTimeout:
    """Build the error for an episode that is still running when the rollout's time is over."""
    return EpisodeTimeout(f"prompt {prompt.prompt_id} was still running when rollout.rollout_timeout_s was over")


class Agent:
    """Subclass, implement `run`, and name the class in `agent.path`. `agent.args` go to the constructor.

    `run` plays one episode, one member of the group. `group_size` episodes run at the same time, each with its own
    environment and client. A function works in place of the class (`agent.path=my.py:run`). Either may be a plain
    `def`: it then runs in a thread and calls client and environment without `await`.

    To handle a whole group, implement `run_group` or `collect_trajectory` instead; only one of the three is needed. If
    a class and its bases implement several, the most derived one is called.

    The RolloutWorker passes the run's tokenizer as the keyword argument `tokenizer`. One instance serves all prompts of
    its worker, many at the same time: keep the state of an episode in local variables.

    Raises:
        TypeError: on construction, if the class implements none of these methods, or `collect_trajectory` and another.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        cls.form()
        return super().__new__(cls)

    @classmethod
    def form(cls) -> str:
        """Return the name in `AGENT_METHODS` that is called: from the class, or from its nearest base that has one.

        Raises:
            TypeError: there is none, or it is unclear which.
        """
        derived = [vars(base) for base in cls.__mro__[: cls.__mro__.index(Agent)]]
        forms = next((forms for own in derived if (forms := [form for form in AGENT_METHODS if form in own])), [])
        if not forms:
            raise TypeError(f"agent {cls.__name__} implements none of {', '.join(AGENT_METHODS[1:])}: implement `run`")
        if "collect_trajectory" in forms and len(forms) > 1 and AGENT_METHODS[0] not in forms:
            both = " and ".join(f"`{form}`" for form in forms)
            raise TypeError(f"agent {cls.__name__} implements {both}, of which only one would be called: keep one")
        return forms[0]

    async def run(self, prompt: Prompt, env: Environment, client: ChatClient) -> Outcome:
        """Roll out one episode, number `prompt.member` of the prompt's group.

        `await client.generate(request)` returns the policy's answer to token ids, `await client.chat(messages)` to
        messages; several calls may run at the same time. The RolloutWorker continues interrupted generations, so the
        agent always receives whole answers. Their tokens may be from several versions.

        Returns:
            The episode's samples, one or several; or its reward, a number. Each conversation that `client` recorded
            then becomes a sample with this reward. None or an empty sequence rejects the episode.
        """
        raise self._not_above("run")

    async def run_group(
        self, prompt: Prompt, make_env: Callable[[], Environment], client: GroupClient
    ) -> Sequence[Sample]:
        """Roll out one prompt's group; implement this in place of `run` to generate for the whole group at once.

        The caller closes the environments that `make_env` returned, for any result.

        Returns:
            The group's samples, each with its `episode` from 0 to `prompt.group_size` - 1. The number is not needed if
            there are exactly `prompt.group_size` samples. An empty sequence rejects the prompt.
        """
        raise self._not_above("run_group")

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[GenerationRequest],
        act_queue: asyncio.Queue[GenerationResult],
    ) -> Sequence[Sample]:
        """Roll out one prompt's group as `run_group` does, with one environment and with queues to the policy.

        Put a `GenerationRequest` on `obs_queue`; its `GenerationResult` arrives on `act_queue`. Several requests may be
        in flight. Their results arrive in order of completion and carry the request's id.
        """
        raise self._not_above("collect_trajectory")

    async def roll_out(
        self, prompt: Prompt, make_env: Callable[[], Environment], client: GroupClient
    ) -> Sequence[Sample]:
        """Play the prompt's group by the method that the agent implements. The RolloutWorker calls this.

        An episode of `run` that fails is played again alone (`play_with_retries`). The other methods play the group as
        one.

        Returns:
            Any number of samples, each with its episode; none if every episode was rejected or lost.

        Raises:
            EpisodeError: the agent returned something else, or played its group at once and took too long.
        """
        if self.form() == "run":

            async def play(own: Prompt) -> list[Sample]:
                return await self._episode(own, make_env(), client)

            async with asyncio.TaskGroup() as tasks:
                members = [
                    tasks.create_task(play_with_retries(prompt.of_member(member), play, client))
                    for member in range(prompt.group_size)
                ]
            return [sample for member in members for sample in member.result()]
        try:
            async with _time_of(client) as limit:
                if self.form() == "run_group":
                    return self._numbered(prompt, await self.run_group(prompt, make_env, client))
                return self._numbered(prompt, await self._with_queues(prompt, make_env(), client))
        except Exception as error:
            if limit.expired():
                raise timed_out(prompt) from error
            raise

    async def _episode(self, prompt: Prompt, env: Environment, client: GroupClient) -> list[Sample]:
        own = client.episode(prompt)
        try:
            with reward_parts() as parts:
                outcome: Any = await self.run(prompt, env, own)
        finally:
            await env.close()
        if isinstance(outcome, Real):
            samples = own.all_samples(float(outcome))
            if not samples:
                why = own.why_no_samples
                raise self._error(
                    prompt,
                    f"has no sample for the reward {outcome}: {why}"
                    if why
                    else f"returned the reward {outcome} without asking the policy; return None",
                )
        else:
            samples = [outcome] if isinstance(outcome, Sample) else outcome
        earned = parts.means()
        return [
            replace(sample, episode=prompt.member, reward_parts={**earned, **sample.reward_parts})
            for sample in self._checked(prompt, samples)
        ]

    async def _with_queues(self, prompt: Prompt, env: Environment, client: GenerationClient) -> Sequence[Sample]:
        obs_queue: asyncio.Queue[GenerationRequest] = asyncio.Queue()
        act_queue: asyncio.Queue[GenerationResult] = asyncio.Queue()

        async def answer(request: GenerationRequest) -> None:
            act_queue.put_nowait(await client.generate(request))

        async def answer_all() -> None:
            while True:
                tasks.create_task(answer(await obs_queue.get()))

        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(answer_all())
            samples = await self.collect_trajectory(prompt, env, obs_queue, act_queue)
            answering.cancel()
        return samples

    def _checked(self, prompt: Prompt, samples: Any) -> Sequence[Sample]:
        if samples is None:
            return ()
        if not isinstance(samples, Sequence) or not all(isinstance(sample, Sample) for sample in samples):
            raise self._error(
                prompt, f"returned {samples!r:.80}; return a Sample, several, or none to reject the prompt"
            )
        return samples

    def _numbered(self, prompt: Prompt, samples: Any) -> Sequence[Sample]:
        """Return the samples of a group with their episode numbers; an agent with one sample per episode may omit
        these.
        """
        samples, size = self._checked(prompt, samples), prompt.group_size
        episodes = {sample.episode for sample in samples}
        if size > 1 and episodes == {0} and len(samples) == size:
            return [replace(sample, episode=episode) for episode, sample in enumerate(samples)]
        if size > 1 and episodes == {0} and len(samples) > 1:
            raise self._error(
                prompt,
                f"returned {len(samples)} samples for a group of group_size={size} without their "
                f"episode numbers; set Sample.episode, from 0 to {size - 1}",
            )
        if strays := sorted(episode for episode in episodes if episode >= size):
            raise self._error(
                prompt, f"returned a sample of episode {strays[0]}; a group of {size} has episodes 0 to {size - 1}"
            )
        return list(samples)

    def _not_above(self, form: str) -> NotImplementedError:
        name = type(self).__name__
        return NotImplementedError(
            f"agent {name}: asyncrl.api.Agent has no `{form}` to call; {name} has `{self.form()}`"
        )

    def _error(self, prompt: Prompt, what: str) -> EpisodeError:
        return EpisodeError(f"agent {type(self).__name__} {what} (prompt {prompt.prompt_id})")


def agent_of(function: Callable[..., Any], args: Mapping[str, Any], **offered: object) -> Agent:
    """Return an agent whose `run` is `function(prompt, env, client, **args)`, asynchronous or not.

    Args:
        offered: keyword arguments that the function receives if it has parameters of these names.

    Raises:
        TypeError: the function does not accept these arguments.
    """
    parameters = inspect.signature(function).parameters
    wanted = {name: value for name, value in offered.items() if name in parameters and name not in args}
    try:
        inspect.signature(function).bind(None, None, None, **wanted, **args)
    except TypeError as error:
        raise TypeError(f"an episode is run(prompt, env, client): {error}") from None
    name = getattr(function, "__name__", type(function).__name__)
    bound = functools.partial(function, **wanted, **args)
    own = {"run": staticmethod(bound), "__module__": function.__module__, "__doc__": function.__doc__}
    made: Agent = type(name, (Agent,), own)()
    return made


def taken_by(agent: type, offered: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments that the constructor of an agent's class takes: `tokenizer`, and others if it names them."""
    named = inspect.signature(agent).parameters
    return {name: value for name, value in offered.items() if name == "tokenizer" or name in named}
