"""The agent of a run, and its place. Built-in agents do not block and run on the worker's event loop; for others see
`hosted` and `in_processes`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncrl.api import Agent, ChatClient, Environment, Outcome, Prompt, RunIn
from asyncrl.api.agent import agent_of, taken_by
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError, PluginConfig
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.plugins.settings import AgentConfig
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner, built, is_async, is_built_in, loaded, place_of

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
    elif not plain and is_built_in(agent):
        return agent
    else:
        from asyncrl.rollout.user_code.hosted import in_thread, on_users_loop

        played = partial(in_thread, agent, form, runner) if plain else partial(on_users_loop, agent, runner)
        form = form if plain else "roll_out"
    adapted: Agent = type(name, (Agent,), {form: staticmethod(played)})()  # messages show the name of the agent's class
    return adapted
