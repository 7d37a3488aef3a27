"""The agent of a run: its place (the users' event loop, a thread, or a process), its conversations with the policy.

The agent's client and, in a thread, its environment stay on the worker's event loop, where the endpoint of other
people's programs uses the same client (`ServedEpisodeClient`). `_Crossing` carries calls there. Built-in agents do not
block and run on that loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from asyncrl.api import (
    Agent,
    ChatClient,
    Environment,
    GenerationClient,
    GroupClient,
    Outcome,
    Prompt,
    RunIn,
    Sample,
    ToolSchema,
)
from asyncrl.api.agent import agent_of
from asyncrl.chat.conversation import ChatLimits
from asyncrl.chat.episode_client import ChatPolicy, EpisodeClient
from asyncrl.chat.parsers import parser, readers, why_unread
from asyncrl.chat.template import ChatFormat
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory import context_length
from asyncrl.config.setting import ConfigError, PluginConfig
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.settings import AUTO
from asyncrl.plugins.tools.toolbox import Toolbox
from asyncrl.rollout.user_code.environments import HostedEnvironment
from asyncrl.rollout.user_code.tools import RunTools
from asyncrl.rollout.user_code_pool.agent_protocol import answer, outcome_of, taken_by
from asyncrl.rollout.user_code_pool.child import MAKE, USE, ChildCall, CodeTarget
from asyncrl.rollout.user_code_pool.process_pool import START_LIMIT_S
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner, built, is_async, is_built_in, loaded, place_of

if TYPE_CHECKING:
    from asyncrl.inference.openai.endpoint import Endpoint, Session


class Conversations:
    """Clients of episodes.

    Attributes:
        format: format of conversations in messages; None if there is no chat template.
    """

    def __init__(self, config: ExperimentConfig, prompts: PromptFormat, model_config: Mapping[str, Any]) -> None:
        self.format = load_chat_format(config, prompts)
        self._policy = chat_policy(config, model_config)
        self._served = config.rollout.endpoint
        self._endpoint: Endpoint | None = None

    @property
    def endpoint(self) -> Endpoint:
        """The policy over HTTP, made for the first agent that asks for it."""
        if self._endpoint is None:
            from asyncrl.inference.openai.endpoint import Endpoint  # most agents do not ask for it

            self._endpoint = Endpoint(self._served.host, max_body_bytes=self._served.max_body_mb << 20)
        return self._endpoint

    async def close(self) -> None:
        """Close the endpoint if there is one, in the worker's event loop."""
        if self._endpoint is not None:
            await self._endpoint.close()

    def client(self, policy: GenerationClient, prompt: Prompt) -> ServedEpisodeClient:
        """Return a new client for the episode of `prompt`, which is one member's."""
        return ServedEpisodeClient(policy, prompt, self.format, self._policy, endpoint=lambda: self.endpoint)


def load_chat_format(config: ExperimentConfig, prompts: PromptFormat) -> ChatFormat | None:
    """Build the format of conversations in messages; None if there is no chat template."""
    if prompts.chat is None:
        return None
    name = config.rollout.chat.parser
    if name == AUTO:
        name = next(iter(readers(prompts.chat)), "none")
    unread = None if config.rollout.chat.parser == "none" else why_unread(prompts.chat, name.removesuffix("none"))
    return ChatFormat(prompts, parser(name), unread=unread)


def chat_policy(config: ExperimentConfig, model_config: Mapping[str, Any]) -> ChatPolicy:
    """Build the rules of conversations; `model_config` is the content of the model's `config.json`."""
    chat, generation = config.rollout.chat, config.generation
    context, setting = context_length(config, model_config), "generation.context_length"
    if (limit := generation.cache_limit) is not None and limit < context:
        context, setting = limit, "generation.max_total_tokens"
    limits = ChatLimits(chat.max_turns, context, chat.max_tool_s, setting)
    named = tuple(policy.name for policy in config.policies)
    return ChatPolicy(limits, chat.reasoning, chat.drift, named, config.trained_policies)


class ServedEpisodeClient(EpisodeClient):
    """An `EpisodeClient` with an address for clients of OpenAI's or Anthropic's API.

    Args:
        endpoint: returns what serves the episode's session. The other arguments are those of `EpisodeClient`.
    """

    def __init__(
        self,
        policy: GenerationClient,
        prompt: Prompt,
        chat: ChatFormat | None,
        rules: ChatPolicy | None = None,
        *,
        endpoint: Callable[[], Endpoint],
    ) -> None:
        super().__init__(policy, prompt, chat, rules)
        self._endpoint = endpoint
        self._is_over = False

    def _start(self, group: str) -> None:
        super()._start(group)
        self._opening = asyncio.Lock()
        self._session: Session | None = None

    async def endpoint(self, group: str = "", *, apart: bool = False) -> Session:
        """Return the policy's address in this episode for clients of OpenAI's or Anthropic's API.

        Calls there are recorded as if `chat` were called. The address is closed when the episode is over. Each
        comparison group has its own address: `endpoint("judge")` is that of `conversation("judge")`.

        Args:
            group: the comparison group.
            apart: record calls with a header `X-Session-ID` as calls of `conversation(<its value>)`, for frameworks
                that run several agents at one address.

        Raises:
            RuntimeError: the episode is over.
            ValueError: `group` cannot be a name.
        """
        if group and group != self._group:
            return await self.conversation(group).endpoint(apart=apart)
        async with self._opening:
            if self._is_over:
                raise RuntimeError("the endpoint was asked for after the rollout had ended")
            if self._session is None:
                self._session = await self._endpoint().open(self, self._prompt.sampling)
            if apart:
                self._session.conversation = self.endpoint
            return self._session

    def samples(self, reward: float = 0.0) -> list[Sample]:
        """See `EpisodeClient`.

        Raises:
            Exception: the policy failed. The agent received an HTTP error and may have treated it as its own failure,
                so the episode must not be trained.
        """
        if self._session is not None and self._session.calls.failure is not None:
            raise self._session.calls.failure
        return super().samples(reward)

    def close(self) -> None:
        """Close the sessions of all clients of the episode."""
        clients: list[ServedEpisodeClient] = [self, *self._clients.values()]
        for client in clients:
            client._is_over = True
            if client._session is not None:
                client._session.close()


_CLIENTS = ("episode", "conversation", "policy")
"""Methods of a client that return another client."""


Play = Callable[[Prompt, Environment, ChatClient], Awaitable[Outcome]]
"""Plays one episode."""


def load_agent(plugin: PluginConfig, prompts: PromptFormat, tools: Toolbox) -> Agent:
    """Load the agent that the settings name: a class, or a function that plays one episode."""
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


def play_in_process(config: ExperimentConfig, runner: UserCodeRunner, *, chat: bool) -> Play | None:
    """Return the function that has the agent play in a process; None if it does not run in a process.

    Args:
        chat: whether prompts are conversations.

    Raises:
        TypeError: it cannot run in a process.
        ConfigError: it cannot run in a thread, as the settings say.
    """
    plugin = config.agent
    found = loaded("agent", plugin)
    if place_of("agent", plugin, found, getattr(found, "run", found)) != RunIn.process:
        return None
    if "tools" in inspect.signature(found).parameters:
        raise TypeError("agent.run_in=process: it takes `tools`, which are the worker's; use agent.run_in=thread")
    if config.moe.replay_routing:
        raise TypeError(
            "agent.run_in=process: moe.replay_routing=true needs the experts of its tokens, which do not travel to a "
            "process; use agent.run_in=thread"
        )
    made = ChildCall(CodeTarget(plugin.path, dict(plugin.args)), MAKE, [str(config.model.path), chat])
    return partial(_in_process, made, config.rollout.rollout_timeout_s, runner)


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


async def _in_process(
    make: ChildCall, timeout_s: float, runner: UserCodeRunner, prompt: Prompt, env: Environment, client: ChatClient
) -> Outcome:
    """Play an episode in a process, which calls `client` and `env` over its pipe."""
    label, answers = f"agent {make.target.path}", partial(answer, env, client)
    async with runner.agent_processes.leased(label) as process:
        await process.ask(label, make, START_LIMIT_S, answers)
        use = ChildCall(make.target, USE, ["run", [prompt], {}])
        raw = await process.ask(label, use, timeout_s, answers)
    return outcome_of(raw)


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
