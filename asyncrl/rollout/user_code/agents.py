"""The agent of a run, and its place: the users' event loop, or a thread.

The agent's client and, in a thread, its environment stay on the worker's event loop. `_Crossing` carries calls there.
Built-in agents do not block and run on that loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from asyncrl.api import Agent, ChatClient, Environment, GroupClient, Outcome, Prompt, RunIn, Sample
from asyncrl.api.agent import agent_of, taken_by
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError, PluginConfig
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.plugins.settings import AgentConfig
from asyncrl.rollout.user_code.environments import HostedEnvironment
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner, built, is_async, is_built_in, loaded, place_of

if TYPE_CHECKING:
    from asyncrl.plugins.tools.toolbox import Toolbox

_CLIENTS = ("episode", "conversation", "policy")
"""Methods of a client that return another client."""


Play = Callable[[Prompt, Environment, ChatClient], Awaitable[Outcome]]
"""Plays one episode."""


def load_agent(plugin: PluginConfig, prompts: PromptFormat, tools: Toolbox | None) -> Agent:
    """Load the agent that the settings name: a class, or a function that plays one episode. `tools` are those of the
    run; None if the agent does not take them.
    """
    found = loaded("agent", plugin)
    offered: dict[str, object] = {"tokenizer": prompts.tokenizer, "chat": prompts.chat is not None, "tools": tools}
    if inspect.isclass(found):
        agent: Agent = built("agent", plugin, Agent, **taken_by(found, offered))
        return agent
    try:
        return agent_of(found, plugin.args, **offered)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"agent.path={plugin.path!r}, agent.args={plugin.args}: {error}") from error


def plays_at_once(agent: Agent) -> bool:
    """True if a user's agent handles a whole group at once."""
    form = type(agent).form()
    return form in ("roll_out", "run_group") and not is_built_in(getattr(type(agent), form))


def place_of_agent(plugin: AgentConfig) -> RunIn:
    """Return where the agent's `run` runs.

    Raises:
        ConfigError: it cannot run in a thread, as the settings say.
    """
    found = loaded("agent", plugin)
    return place_of("agent", plugin, found, getattr(found, "run", found))


def takes_tools(plugin: PluginConfig) -> bool:
    """True if the agent takes the run's tools, and so offers them to the model from its first call on.

    Raises:
        ConfigError: `agent.path` names nothing that can be called.
    """
    return "tools" in inspect.signature(loaded("agent", plugin)).parameters


def offers_tools(config: ExperimentConfig) -> bool:
    """True if there are tools in the settings and the agent takes them. Raises as `takes_tools`."""
    return bool(config.tools or config.mcp) and takes_tools(config.agent)


def adapted_agent(agent: Agent, runner: UserCodeRunner, in_process: Play | None = None) -> Agent:
    """Return `agent` as an asynchronous agent that runs in its place; if given, `in_process` plays its episodes.

    Raises:
        TypeError: its `collect_trajectory` is a plain function, although its queues need an event loop; or it must run
            in processes and is not a plain `run`.
    """
    name, form = type(agent).__name__, type(agent).form()
    plain = not is_async(getattr(agent, form))
    played: Any
    if in_process is not None:
        if form != "run" or not plain:
            raise TypeError(
                f"agent.run_in=process: agent {name} is not a plain `def run(prompt, env, client)`; move code that "
                f"computes or may crash into an environment, a tool or a reward with run_in=process, and keep "
                f"agent.run_in=auto, as the agent mostly waits for the policy"
            )
        played = in_process
    elif plain and form == "collect_trajectory":
        raise TypeError(
            f"agent {name}: `collect_trajectory` is a plain `def`, and its queues are awaited; write `async def "
            "collect_trajectory`, or a plain `run`, which calls client.generate(...)"
        )
    elif plain:
        played = partial(_in_thread, agent, form, runner)
    elif is_built_in(agent):
        return agent
    else:
        form, played = "roll_out", partial(_on_users_loop, agent, runner)
    adapted: Agent = type(name, (Agent,), {form: staticmethod(played)})()  # messages show the name of the agent's class
    return adapted


async def _on_users_loop(
    agent: Agent, runner: UserCodeRunner, prompt: Prompt, make_env: Callable[[], Environment], client: GroupClient
) -> Sequence[Sample]:
    policy: Any = _Crossing(client, runner.at_home)
    samples: Sequence[Sample] = await runner.users.run(agent.roll_out(prompt, make_env, policy))
    return samples


async def _in_thread(agent: Agent, form: str, runner: UserCodeRunner, prompt: Prompt, env: Any, client: object) -> Any:
    """Play in a thread: an episode (`form` is `run`), or a group (`run_group`) for which `env` makes environments."""
    wait = _ThreadWaits(runner)
    world = _Crossing(env, wait) if form == "run" else lambda: _Crossing(env(), wait)
    try:
        return await runner.in_thread(partial(getattr(agent, form), prompt, world, _Crossing(client, wait)))
    finally:
        wait.end()


class _Crossing:
    """A client or an environment of the worker's event loop, for an agent elsewhere.

    Args:
        cross: runs a coroutine on the worker's loop. Returns an awaitable to an agent on the users' loop, and the
            result to one in a thread, which waits for it.
    """

    def __init__(self, inner: object, cross: Callable[[CoroutineType[Any, Any, Any]], Any]) -> None:
        self._inner, self._cross = inner, cross

    def __getattr__(self, name: str) -> Any:
        if isinstance(self._inner, HostedEnvironment) and name in ("reset", "step"):
            return partial(self._inner.call_blocking, name)
        found = getattr(self._inner, name)
        if name in _CLIENTS and not isinstance(self._inner, Environment):
            return lambda *args, **kwargs: _Crossing(found(*args, **kwargs), self._cross)
        if not is_async(found):
            return found
        return lambda *args, **kwargs: self._cross(found(*args, **kwargs))


class _ThreadWaits:
    """The waits of a rollout's thread for the worker's loop. `end` ends them, and all later ones."""

    def __init__(self, runner: UserCodeRunner) -> None:
        self._runner, self._running, self._ended = runner, set[Future[Any]](), False

    def __call__(self, work: CoroutineType[Any, Any, Any]) -> Any:
        """Return the result of `work`.

        Raises:
            RuntimeError: the rollout has ended.
        """
        if self._ended:
            work.close()
            raise RuntimeError(f"{work.__qualname__} was called after the rollout had ended")
        wait = self._runner.from_thread(work)
        self._running.add(wait)
        if self._ended:  # meanwhile
            wait.cancel()
        try:
            return wait.result()
        finally:
            self._running.discard(wait)

    def end(self) -> None:
        """End the rollout: callers that wait get an error."""
        self._ended = True
        for wait in tuple(self._running):
            wait.cancel()
