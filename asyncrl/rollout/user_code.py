"""The user's parts of a run, built as the config names them: dataset, tokenizer, agent, environment, reward."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from asyncrl.api import Agent, Environment, GenerationClient, Prompt, RunIn, SamplingParams, ToolSchema
from asyncrl.api.agent import agent_of
from asyncrl.api.reward import marked_run_in
from asyncrl.config.context import context_length
from asyncrl.config.evaluation_sets import EvaluationSet, evaluation_sets
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.import_paths import PluginError, load_plugin
from asyncrl.config.setting import ConfigError, PluginConfig
from asyncrl.inference.openai.endpoint import Endpoint
from asyncrl.inference.settings import GenerationBackend
from asyncrl.plugins.chat.client import ChatPolicy
from asyncrl.plugins.chat.parsers import choose, parser
from asyncrl.plugins.chat.request import Limits
from asyncrl.plugins.chat.template import ChatFormat
from asyncrl.plugins.datasets import Dataset, load_dataset
from asyncrl.plugins.datasets.mixture import Mixture
from asyncrl.plugins.datasets.prompts import PromptFormat, load_chat_template, make_prompt
from asyncrl.plugins.datasets.queue.order import PromptRef
from asyncrl.plugins.datasets.readers import is_data_path
from asyncrl.plugins.datasets.settings import AUTO
from asyncrl.plugins.datasets.tokenizers import load_tokenizer
from asyncrl.plugins.envs.settings import GYMNASIUM, GYMNASIUM_ENV, EnvConfig
from asyncrl.plugins.tools.toolbox import Toolbox
from asyncrl.rollout.generation.served import ServedEpisodeClient
from asyncrl.rollout.offload.adapters import AgentProcess, OffloadedEnvironment, adapted_agent, is_built_in
from asyncrl.rollout.offload.child.environment import ProcessEnvironment
from asyncrl.rollout.offload.messages import Target
from asyncrl.rollout.offload.meter import Activity
from asyncrl.rollout.offload.offloader import Code, EpisodeProcesses, Offloader, is_async
from asyncrl.rollout.offload.places import GroupPlaces, Places
from asyncrl.rollout.scoring import AnswerReward, Rewards, load_rewards, scored_agent
from asyncrl.rollout.tools import RunTools, check_format


class Plugins:
    """Everything a RolloutWorker takes from the user.

    Args:
        training: whether it trains, and needs the training set.

    Raises:
        ConfigError: a path names nothing or something of another kind, a module fails while it is imported, or a
            constructor refuses its arguments. The message begins with the setting.
    """

    def __init__(self, config: ExperimentConfig, *, training: bool = True) -> None:
        assert config.model.path is not None, "the launcher resolves model.path before it starts a worker"
        self._config = config
        sampling = config.rollout.sampling
        self._sampling = SamplingParams(**asdict(sampling) | {"stop": tuple(sampling.stop)})
        self._format = load_prompt_format(config)
        self.tokenizer = self._format.tokenizer
        self.chat_format = load_chat_format(config, self._format)
        model_config = json.loads((Path(config.model.path) / "config.json").read_text())
        self.chat_policy = chat_policy(config, model_config)
        self.vocab_size: int | None = model_config.get("vocab_size")
        self._train_set = load_train_set(config) if training else None
        self.eval_sets = {
            each.name: (each, load_eval_set(config, each)) for each in evaluation_sets(config) if each.interval
        }
        """By name, the sets that are evaluated."""
        self.offloader = Offloader(
            config.rollout.user_code,
            *(EpisodeProcesses(each.processes, each.process_max_episodes) for each in (config.env, config.agent)),
        )
        """Runs the user's code; to be entered in the worker's event loop."""
        served = config.rollout.endpoint
        self.endpoint = Endpoint(served.host, max_body_bytes=served.max_body_mb << 20)
        """The policy over HTTP, for agents that ask for it; to be closed in the worker's event loop."""
        rewards = Rewards(load_rewards(config.reward, config.rewards), self.offloader)
        self._reward = AnswerReward(rewards)
        self._env = environment_of(config.env)
        found = _loaded("env", self._env)
        self._off_the_loop = not is_built_in(found) or not is_async(getattr(found, "step", found))
        self._env_in_process = _env_place(config.env, found) == RunIn.process
        check_format(config, self._format.chat.source_with_tools if self._format.chat else None)
        self.tools = RunTools(config.tools, config.mcp, self.offloader)
        """Tools of agents; entered in the worker's event loop, after the offloader."""
        agent = _agent(config.agent, self._format, self.tools.toolbox)
        self._at_once, self._env_places = _plays_at_once(agent), Places(config.env.processes)
        if self._env_in_process and self._at_once and config.env.processes < config.group_size:
            raise ConfigError(
                f"env.processes={config.env.processes}: agent.path={config.agent.path!r} plays its group at once and "
                f"may open all its environments, group_size={config.group_size} of them; have env.processes at least "
                "that"
            )
        self.agent = self._adapted(agent, rewards)

    @property
    def train_set(self) -> Dataset:
        """The prompts to train on."""
        assert self._train_set is not None, "who trains nothing has no training set"
        return self._train_set

    def _adapted(self, agent: Agent, rewards: Rewards) -> Agent:
        try:
            return scored_agent(adapted_agent(agent, self.offloader, self._agent_process()), rewards, self.tokenizer)
        except TypeError as error:
            raise ConfigError(f"agent.path={self._config.agent.path!r}: {error}") from error

    def _agent_process(self) -> AgentProcess | None:
        """Return how the agent is made in a process; None if it does not run in one.

        Raises:
            TypeError: it cannot run where it is to.
        """
        config = self._config.agent
        found = _loaded("agent", config)
        run = getattr(found, "run", found)
        place = config.run_in if config.run_in != RunIn.auto else marked_run_in(found)
        if place == RunIn.thread and is_async(run):
            raise TypeError("agent.run_in=thread: it is `async def`, which runs on an event loop; leave it at auto")
        if place != RunIn.process:
            return None
        if "tools" in inspect.signature(found).parameters:
            raise TypeError("agent.run_in=process: it takes `tools`, which are the worker's; use agent.run_in=thread")
        limit_s, chat = self._config.rollout.rollout_timeout_s, self._format.chat is not None
        return AgentProcess(Target(config.path, dict(config.args)), str(self._config.model.path), chat, limit_s)

    def make_envs(self, size: int) -> Callable[[], Environment]:
        """Makes the environments of one group of `size` episodes, one for each call, and those of later tries."""
        config = self._config.env
        if self._env_in_process and self._at_once:
            return functools.partial(self.make_env, GroupPlaces(self._env_places, size))
        if not config.vectorized:
            return self.make_env
        from asyncrl.plugins.envs.gymnasium_vector import VectorGames  # gymnasium is an extra

        code = Code(f"env {config.path}.step", Activity.env, config.timeout_s, RunIn.thread)
        call = functools.partial(self.offloader.call, code)

        def games(size: int) -> VectorGames:
            return VectorGames(call, size, **self._env.args)

        together, made = games(size), itertools.count()
        return lambda: (together if next(made) < size else games(1)).member()  # who tries again plays alone

    def make_env(self, places: GroupPlaces | None = None) -> Environment:
        """A new environment, for one episode. One whose methods block is made when it is first used, where it runs.

        Args:
            places: of a group that is played at once, where environments have processes.
        """
        config = self._config.env
        if self._env_in_process:
            target, label = Target(self._env.path, self._env.args), f"env {config.path}"
            return ProcessEnvironment(target, self._reward, label, config.timeout_s, self.offloader, places)
        make = functools.partial(_built, "env", self._env, Environment, reward=self._reward)
        if self._off_the_loop:
            return OffloadedEnvironment(make, f"env {config.path}", config.timeout_s, self.offloader)
        made: Environment = make()
        return made

    def episode_client(self, policy: GenerationClient, prompt: Prompt) -> ServedEpisodeClient:
        """A new client for the episode of `prompt`, which is one member's."""
        return ServedEpisodeClient(
            policy, prompt, prompt.member, self.chat_format, self.chat_policy, endpoint=self.endpoint
        )

    def train_prompt(self, ref: PromptRef) -> Prompt:
        """The training prompt at `ref`.

        Raises:
            BadPrompt: its row makes none, or one longer than `dataset.max_prompt_tokens` that is not to be cut.
        """
        return self._prompt(ref, self.train_set, self._config.group_size, self._sampling)

    def eval_prompt(self, name: str, row: int, member: int) -> Prompt:
        """Row `row` of the evaluation set `name`, for one answer, the `member`-th.

        Raises:
            BadPrompt: as of `train_prompt`.
        """
        each, rows = self.eval_sets[name]
        sampling = replace(
            self._sampling, temperature=each.temperature, top_p=each.top_p, max_new_tokens=each.max_new_tokens
        )
        ref = PromptRef(f"eval-{name}-{row}-{member}", row, row, attempt=member)
        return self._prompt(ref, rows, 1, sampling)

    @functools.cached_property
    def _first_prompts(self) -> PromptFormat:
        """Return the format in which a row is rendered for its agent's first call."""
        offered = self.tools.toolbox.schemas if offers_tools(self._config) else ()
        return replace(self._format, tools=offered)

    def _prompt(self, ref: PromptRef, dataset: Dataset, group_size: int, sampling: SamplingParams) -> Prompt:
        return make_prompt(
            ref, dataset, self._first_prompts, group_size=group_size, sampling=sampling, run_seed=self._config.seed
        )


def offers_tools(config: ExperimentConfig) -> bool:
    """True if there are tools in the settings and the agent offers them to the model from its first call on.

    Raises:
        ConfigError: `agent.path` names nothing that can be called.
    """
    if not config.tools and not config.mcp:
        return False
    return "tools" in inspect.signature(_loaded("agent", config.agent)).parameters


def offered_tools(config: ExperimentConfig) -> tuple[ToolSchema, ...]:
    """Return the schemas of the settings' `tools` in the agent's first call; MCP servers are not asked for theirs.

    Raises:
        ConfigError: as of `RunTools`.
    """
    if not offers_tools(config):
        return ()
    return RunTools(config.tools, (), Offloader(config.rollout.user_code)).toolbox.schemas


def load_prompt_format(config: ExperimentConfig) -> PromptFormat:
    """Build the prompt format from the tokenizer in `model.path` and the settings of `dataset`; without tools.

    Raises:
        ConfigError: the chat template cannot be read, or a setting of it is given where there is none.
    """
    folder, data = Path(str(config.model.path)).expanduser(), config.dataset
    return PromptFormat(load_tokenizer(folder), load_chat_template(folder, data), data.max_prompt_tokens, data.overlong)


def load_chat_format(config: ExperimentConfig, prompts: PromptFormat) -> ChatFormat | None:
    """Build the format of conversations in messages; None if there is no chat template."""
    if prompts.chat is None:
        return None
    name = config.rollout.chat.parser
    return ChatFormat(
        prompts, choose(prompts.chat.source_with_tools, prompts.tokenizer) if name == AUTO else parser(name)
    )


def chat_policy(config: ExperimentConfig, model_config: Mapping[str, Any]) -> ChatPolicy:
    """Build the rules of conversations; `model_config` is the content of the model's `config.json`."""
    chat, generation = config.rollout.chat, config.generation
    context, setting = context_length(config, model_config), "generation.context_length"
    if generation.backend == GenerationBackend.embedded and generation.max_total_tokens < context:
        context, setting = generation.max_total_tokens, "generation.max_total_tokens"
    limits = Limits(chat.max_turns, context, chat.max_tool_s, setting)
    return ChatPolicy(limits, chat.reasoning, chat.drift)


def load_train_set(config: ExperimentConfig) -> Dataset:
    """The prompts to train on.

    Raises:
        ConfigError: they cannot be loaded.
    """
    data, seed = config.dataset, config.seed
    if not data.sources:
        return _load_set("dataset", data.path, data.args, data.fields, "train", seed)
    sources = [
        _load_set(f"dataset.sources[{number}]", source.path, source.args, source.fields, "train", seed)
        for number, source in enumerate(data.sources)
    ]
    names = [source.name or source.path for source in data.sources]
    try:
        return Mixture(sources, [source.weight for source in data.sources], names)
    except ValueError as error:
        raise ConfigError(f"dataset.sources: {error}") from None


def load_eval_set(config: ExperimentConfig, each: EvaluationSet) -> Dataset:
    """The prompts of an evaluation set: of its `path`, or those that the training set holds out.

    Raises:
        ConfigError: they cannot be loaded, or there are several sources, of which nothing is held out.
    """
    data = config.dataset
    if each.path is not None:
        return _load_set(each.group, each.path, each.args, each.fields, "held_out", config.seed)
    if data.sources:
        raise ConfigError("eval.path=null: of dataset.sources nothing is held out; give evaluation a set of its own")
    return _load_set("dataset", data.path, {**data.args, **each.args}, data.fields, "held_out", config.seed)


def _load_set(
    group: str, path: str, args: Mapping[str, Any], fields: Mapping[str, str], split: str, seed: int
) -> Dataset:
    if fields and is_data_path(path):
        args = {**args, "fields": dict(fields)}
    try:
        return load_dataset(path, args, split, seed)
    except PluginError as error:
        raise ConfigError(f"{group}.path={error}") from error


def _loaded(group: str, plugin: PluginConfig) -> Any:
    """The class or function of the setting `<group>.path`."""
    try:
        found = load_plugin(plugin.path)
    except PluginError as error:
        raise ConfigError(f"{group}.path={error}") from error
    if not callable(found):
        raise ConfigError(f"{group}.path={plugin.path!r}: it is a {type(found).__name__}; name a class or function")
    return found


def environment_of(config: PluginConfig) -> PluginConfig:
    """The class and its arguments that `env.path` names, which may be a game of gymnasium's."""
    if not config.path.startswith(GYMNASIUM):
        return config
    return PluginConfig(GYMNASIUM_ENV, {"id": config.path.removeprefix(GYMNASIUM), **config.args})


def _env_place(config: EnvConfig, found: Any) -> RunIn:
    """Return where the environment runs: as the setting says, or as its class or function is marked.

    Raises:
        ConfigError: it cannot run there.
    """
    wanted = config.run_in if config.run_in != RunIn.auto else marked_run_in(found)
    if wanted == RunIn.thread and is_async(getattr(found, "step", found)):
        raise ConfigError(
            f"env.run_in=thread: {config.path!r} has an `async def step`, which runs on an event loop; leave it at auto"
        )
    return wanted


def _plays_at_once(agent: Agent) -> bool:
    """True if a user's agent handles a whole group at once."""
    form = type(agent).form()
    return form in ("roll_out", "run_group") and not is_built_in(getattr(type(agent), form))


def _agent(plugin: PluginConfig, prompts: PromptFormat, tools: Toolbox) -> Agent:
    """The agent of the settings: a class of agents, or a function, which is one episode."""
    found = _loaded("agent", plugin)
    if inspect.isclass(found):
        offered: dict[str, object] = {"tokenizer": prompts.tokenizer}
        may_take: dict[str, object] = {"chat": prompts.chat is not None, "tools": tools}
        parameters = inspect.signature(found).parameters
        offered |= {name: value for name, value in may_take.items() if name in parameters}
        agent: Agent = _built("agent", plugin, Agent, **offered)
        return agent
    try:
        return agent_of(found, plugin.args, tokenizer=prompts.tokenizer, chat=prompts.chat is not None, tools=tools)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"agent.path={plugin.path!r}, agent.args={plugin.args}: {error}") from error


def _built(group: str, plugin: PluginConfig, base: type, **supplied: object) -> Any:
    """An instance of `base`, as `<group>.path` and `<group>.args` say."""
    try:
        made = _loaded(group, plugin)(**supplied, **plugin.args)
    except ConfigError:
        raise
    except Exception as error:  # a user's constructor may raise anything
        given = f"{group}.path={plugin.path!r}, {group}.args={plugin.args}"
        raise ConfigError(f"{given}: {type(error).__name__}: {error}") from error
    if not isinstance(made, base):
        kind = type(made).__name__
        raise ConfigError(f"{group}.path={plugin.path!r} made a {kind}; it needs to be an asyncrl.api.{base.__name__}")
    return made
