"""The code that plays a run's episodes: its agent and its environments, and where they run.

- Built-in ones do not block and run on the worker's event loop, unchanged.
- Plain methods of the user's run in threads, and others on the users' event loop (`hosted`).
- What may hang, crash or need too much memory has a process for its episode (`in_processes`).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncrl.api import Agent, ChatClient, Environment, Outcome, Prompt, RewardFunction, RunIn
from asyncrl.api.agent import agent_of, taken_by
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError, PluginConfig
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.plugins.settings import GYMNASIUM, GYMNASIUM_ENV, AgentConfig, EnvConfig
from asyncrl.rollout.user_code_pool.call_records import Activity, Code
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner, built, is_async, is_built_in, loaded, run_in_of

if TYPE_CHECKING:
    from asyncrl.plugins.tools.toolbox import Toolbox

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
    return run_in_of("agent", plugin, found, getattr(found, "run", found))


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
    elif not plain and is_built_in(agent):
        return agent
    else:
        from asyncrl.rollout.user_code.hosted import in_thread, on_users_loop

        played = partial(in_thread, agent, form, runner) if plain else partial(on_users_loop, agent, runner)
        form = form if plain else "roll_out"
    adapted: Agent = type(name, (Agent,), {form: staticmethod(played)})()  # messages show the name of the agent's class
    return adapted


class Environments:
    """Environments by group.

    Args:
        config: the settings `env`.
        reward: passed to environments with this parameter.
        at_once: True if the agent plays a whole group at once.

    Raises:
        ConfigError: `env` does not name an environment, or one that cannot run where `run_in` says.
    """

    def __init__(self, config: EnvConfig, reward: RewardFunction, runner: UserCodeRunner, at_once: bool) -> None:
        self._config, self._reward, self._runner, self._at_once = config, reward, runner, at_once
        self._env: PluginConfig = config
        if config.path.startswith(GYMNASIUM):  # the id of a registered environment
            self._env = PluginConfig(GYMNASIUM_ENV, {"id": config.path.removeprefix(GYMNASIUM), **config.args})
        found = loaded("env", self._env)
        step = getattr(found, "step", found)
        self._off_the_loop = not is_built_in(found) or not is_async(step)
        self.run_in = run_in_of("env", config, found, step)

    def check_group(self, agent: str, group_size: int) -> None:
        """Check that a group of this size can have its environments.

        Raises:
            ConfigError: it cannot.
        """

    def of_group(self, size: int) -> Callable[[], Environment]:
        """Return a function that makes the environments of one group of `size` episodes, one per call, retries
        included.
        """
        config = self._config
        if not config.vectorized:
            return self.one
        from asyncrl.plugins.envs.gymnasium_vector import VectorGames  # gymnasium is an extra

        code = Code(f"env {config.path}.step", Activity.env, config.timeout_s, RunIn.thread)
        call = partial(self._runner.call, code)

        def games(size: int) -> VectorGames:
            return VectorGames(call, size, **self._env.args)

        together, made = games(size), itertools.count()
        return lambda: (together if next(made) < size else games(1)).member()  # a retried episode plays alone

    def one(self) -> Environment:
        """Make an environment for one episode. If its methods block, it is constructed on first use, where it runs."""
        config = self._config
        make = partial(built, "env", self._env, Environment, reward=self._reward)
        if self._off_the_loop:
            from asyncrl.rollout.user_code.hosted import HostedEnvironment

            return HostedEnvironment(make, f"env {config.path}", config.timeout_s, self._runner)
        made: Environment = make()
        return made
