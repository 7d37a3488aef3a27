"""Load the agent of a run, and decide where it runs."""

from __future__ import annotations

import inspect

from asyncrl.api import Agent, RunIn, ToolSchema
from asyncrl.api.agent import agent_of
from asyncrl.api.reward import marked_run_in
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError, PluginConfig
from asyncrl.plugins.datasets.prompt_format import PromptFormat
from asyncrl.plugins.tools.toolbox import Toolbox
from asyncrl.rollout.user_code.loaded import built, loaded
from asyncrl.rollout.user_code.tools import RunTools
from asyncrl.rollout.user_code_pool.messages import CodeTarget
from asyncrl.rollout.user_code_pool.off_event_loop import AgentProcess, is_built_in
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner, is_async


def load_agent(plugin: PluginConfig, prompts: PromptFormat, tools: Toolbox) -> Agent:
    """Load the agent that the settings name: a class, or a function that plays one episode."""
    found = loaded("agent", plugin)
    if inspect.isclass(found):
        offered: dict[str, object] = {"tokenizer": prompts.tokenizer}
        may_take: dict[str, object] = {"chat": prompts.chat is not None, "tools": tools}
        parameters = inspect.signature(found).parameters
        offered |= {name: value for name, value in may_take.items() if name in parameters}
        agent: Agent = built("agent", plugin, Agent, **offered)
        return agent
    try:
        return agent_of(found, plugin.args, tokenizer=prompts.tokenizer, chat=prompts.chat is not None, tools=tools)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"agent.path={plugin.path!r}, agent.args={plugin.args}: {error}") from error


def plays_at_once(agent: Agent) -> bool:
    """True if a user's agent handles a whole group at once."""
    form = type(agent).form()
    return form in ("roll_out", "run_group") and not is_built_in(getattr(type(agent), form))


def agent_process(config: ExperimentConfig, *, chat: bool) -> AgentProcess | None:
    """Return the arguments to build the agent in a process; None if it does not run in a process.

    Args:
        chat: whether prompts are conversations.

    Raises:
        TypeError: it cannot run in a process.
    """
    plugin = config.agent
    found = loaded("agent", plugin)
    run = getattr(found, "run", found)
    place = plugin.run_in if plugin.run_in != RunIn.auto else marked_run_in(found)
    if place == RunIn.thread and is_async(run):
        raise TypeError("agent.run_in=thread: it is `async def`, which runs on an event loop; leave it at auto")
    if place != RunIn.process:
        return None
    if "tools" in inspect.signature(found).parameters:
        raise TypeError("agent.run_in=process: it takes `tools`, which are the worker's; use agent.run_in=thread")
    if config.moe.replay_routing:
        raise TypeError(
            "agent.run_in=process: moe.replay_routing=true needs the experts of its tokens, which do not travel to a "
            "process; use agent.run_in=thread"
        )
    limit_s = config.rollout.rollout_timeout_s
    return AgentProcess(CodeTarget(plugin.path, dict(plugin.args)), str(config.model.path), chat, limit_s)


def offers_tools(config: ExperimentConfig) -> bool:
    """True if there are tools in the settings and the agent offers them to the model from its first call on.

    Raises:
        ConfigError: `agent.path` names nothing that can be called.
    """
    if not config.tools and not config.mcp:
        return False
    return "tools" in inspect.signature(loaded("agent", config.agent)).parameters


def offered_tools(config: ExperimentConfig) -> tuple[ToolSchema, ...]:
    """Return the schemas of the settings' `tools` in the agent's first call; MCP servers are not asked for theirs.

    Raises:
        ConfigError: as of `RunTools`.
    """
    if not offers_tools(config):
        return ()
    return RunTools(config.tools, (), UserCodeRunner(config.rollout.user_code)).toolbox.schemas
