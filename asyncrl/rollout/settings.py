"""Settings of the RolloutWorkers: sampling, rollouts, evaluation, and the servers that embed episodes' frames."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, Final, Optional

from asyncrl.chat.settings import ChatConfig
from asyncrl.config.setting import ChoiceConfig, PluginConfig, setting

ONLINE_AGENT: Final = "asyncrl.rollout.online.agent:OnlineAgent"
"""The agent whose sessions are opened by programs outside the run. A run with another agent loads nothing of it."""


@dataclass
class EncoderConfig(PluginConfig):
    """Servers that embed the frames of training episodes for rewards of groups (`Episode.embedding`)."""

    path: str = setting(
        "asyncrl.plugins.rewards.video_encoder:VJEPA2Encoder",
        "function or class whose calls take N clips, lists of pictures, and return [N, D]; args are the class's",
    )
    servers: int = setting(
        0, "number of EncoderServers; 0: none, and a reward embeds in its own process", minimum=0, maximum=64
    )
    gpus: int = setting(0, "GPUs of each server, besides those of training and generation; 0: CPU", minimum=0)
    frames: int = setting(
        64, "frames of an episode that are embedded together, evenly chosen", unit="frames", minimum=1, maximum=1024
    )
    end: bool = setting(False, "embed only an episode's last frame, repeated; false: frames of the whole episode")
    batch: int = setting(32, "most clips in one call of the encoder; more need more memory", unit="clips", minimum=1)
    cached: int = setting(4096, "most embeddings that a server keeps, the recently used ones", minimum=1)
    timeout_s: float = setting(
        120.0, "limit for a group's embeddings, a server's restart included", unit="s", minimum=1.0
    )


# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.
# ruff: noqa: UP045


@dataclass
class SamplingConfig:
    """Sampling of answers during training."""

    max_new_tokens: int = setting(
        112, "longest answer in training; a longer one is cut off there", unit="tokens", minimum=1
    )
    max_new_tokens_from: dict[int, int] = setting(
        help="schedule of max_new_tokens: by policy version, the limit for rollouts that begin at that version or "
        "later, for example {0: 2048, 100: 4096}. No entry may exceed max_new_tokens, which applies before the first",
        factory=dict,
    )
    temperature: float = setting(
        1.0,
        "divides the logits: higher values give more varied answers. 0 (greedy) is refused, because all answers of a "
        "group would be equal",
        minimum=0.0,
    )
    top_p: float = setting(
        1.0,
        "nucleus sampling: keep the most likely tokens whose probabilities add up to this; 1: all",
        minimum=1e-6,
        maximum=1.0,
    )
    top_k: int = setting(-1, "number of most likely tokens to sample from; -1: all", minimum=-1)
    min_p: float = setting(
        0.0,
        "least probability of a token to sample from, as a fraction of the most likely token's; 0: all",
        minimum=0.0,
        maximum=1.0,
    )
    allowed_token_ids: str = setting(
        "",
        "the only tokens that an answer may have, such as action tokens: ids and ranges, `31744-31999,2`; empty: all. "
        "Log-probabilities of servers and training are then those of the distribution over these tokens",
    )
    stop: list[str] = setting(
        help="texts that end an answer; the answer keeps its tokens up to the one that completes such a text",
        factory=list,
    )

    def max_new_tokens_at(self, version: int) -> int:
        """Return the longest answer of a rollout that begins at `version`."""
        reached = max((at for at in self.max_new_tokens_from if at <= version), default=None)
        return self.max_new_tokens if reached is None else self.max_new_tokens_from[reached]


@dataclass
class UserCodeConfig:
    """Agents, environments and rewards off the worker's event loop; limits are per RolloutWorker."""

    threads: int = setting(
        256,
        "plain functions of environments, rewards and tools that run at the same time; further calls wait",
        unit="calls",
        minimum=1,
    )
    processes: int = setting(
        0,
        "processes for rewards and tools with run_in=process, started when they are needed; further calls wait. "
        "0: one per core, at least 2. Agents and environments have processes of their own (agent.processes, "
        "env.processes)",
        unit="processes",
        minimum=0,
    )
    process_memory_mb: int = setting(
        4096,
        "memory limit of a process of user code and all that it starts; beyond it the process is killed and its call "
        "fails",
        unit="MB",
        minimum=64,
    )
    process_children: int = setting(
        32,
        "processes that a process of user code may start; with more it is killed and its call fails",
        unit="processes",
        minimum=0,
    )
    process_max_calls: int = setting(
        1000,
        "calls of rewards and tools after which their process is replaced, which frees what they leaked",
        unit="calls",
        minimum=1,
    )
    slow_call_s: float = setting(
        5.0, "calls of user code that take this long are named in the log", unit="s", minimum=0.001
    )


class Pacing(StrEnum):
    """Start time of rollouts that the staleness bound admits."""

    eager = auto()
    """At once."""
    deadline = auto()
    """Just in time for their expected train step."""


class OfferedTools(StrEnum):
    """Tools that a call offers to the policy, by which a rule applies to it."""

    any = auto()
    """All calls."""
    none = auto()
    """Calls that offer none."""
    some = auto()
    """Calls that offer tools."""


@dataclass
class ConversationConfig:
    """A rule for side conversations at the endpoint: which calls it is for, by all that it names, and what becomes of
    them; docs/endpoint.md.
    """

    model: str = setting("", "the model that a call names, exactly or as a glob (`claude-haiku-*`); empty: any")
    header: str = setting("", "header that a call has; empty: none is needed")
    value: str = setting("*", "value of `header`, exactly or as a glob")
    tools: OfferedTools = setting(OfferedTools.any, "calls that offer the policy tools (some), none, or either (any)")
    group: str = setting("", "comparison group of their samples, below that of the address; empty: that of the address")
    trained: bool = setting(True, "false: the answers are not trained, and counted as chat/untrained_calls")


@dataclass
class EndpointConfig:
    """The policy as OpenAI's and Anthropic's APIs, which each RolloutWorker serves to its agents; docs/endpoint.md."""

    host: str = setting(
        "127.0.0.1",
        "address that it listens on, without TLS; use another than the loopback only if agents run on other machines "
        "or in containers",
    )
    advertise: str = setting(
        "",
        "host name or address in the URLs that agents get, if they reach it by another than rollout.endpoint.host: "
        "host.docker.internal, a pod's address; empty: the address that it listens on",
    )
    port: int = setting(
        0, "port that it listens on, one RolloutWorker on each host; 0: any free one", minimum=0, maximum=65535
    )
    max_body_mb: int = setting(32, "largest request body; larger ones are refused", unit="MB", minimum=1)
    conversations: list[ConversationConfig] = setting(
        help="rules for calls beside the main conversation (titles, summaries, sub-agents), by model, header or tools: "
        "a comparison group of their own (group), or no training (trained: false). The first for a call decides",
        factory=list,
    )


@dataclass
class RolloutConfig:
    """RolloutWorkers: agents, environments, rewards."""

    workers: int = setting(1, "number of RolloutWorkers; more of them run more user code in parallel", minimum=1)
    max_concurrent: int = setting(
        128,
        "rollouts that one worker runs at the same time; max_head_offpolicyness limits all workers together",
        unit="rollouts",
        minimum=1,
    )
    new_tokens_per_chunk: int = setting(
        0,
        "tokens of an answer that one request asks for; the next one continues it. 0: the whole answer",
        unit="tokens",
        minimum=0,
    )
    request_timeout_s: float = setting(
        120.0,
        "longest silence of a server, which computes nothing, after which another one is asked; an answer may take "
        "longer",
        unit="s",
        minimum=1.0,
    )
    pacing: Pacing = setting(
        Pacing.eager,
        "start of the rollouts that max_head_offpolicyness allows: at once (eager), or just before they are expected "
        "to be needed (deadline), which makes them younger in training; the times of rollouts, steps and waits are "
        "measured",
    )
    rollout_timeout_s: float = setting(
        600.0,
        "time limit of one rollout's agent, in training and evaluation: episodes that still run then are lost, and the "
        "rollout is dropped if too few are left. Time in which servers decode its answers does not count, nor does "
        "that of environments, rewards and tools, which have limits of their own",
        unit="s",
        minimum=1.0,
    )
    filters: list[ChoiceConfig] = setting(
        help="group filters, in order; a group that one rejects is not trained, and is counted by its reason",
        factory=list,
    )
    filter_tries: int = setting(
        3,
        "attempts at a prompt that a filter returns (`return_prompt`), each with other random numbers and after the "
        "rest of the epoch. After the last one it is dropped for good, counted as `filter: <its reason>_exhausted`",
        minimum=1,
    )
    shaping: list[ChoiceConfig] = setting(
        help="functions that change a group's rewards before training, in order; not in evaluations", factory=list
    )
    columns: list[str] = setting(
        help="your own numbers that graph functions, losses, advantages and filters read: row/<field>, "
        "agent/<name>, reward/<name> or token/<name>; each but token/ is a metric too, its mean, and each is kept "
        "with samples; docs/algorithms.md",
        factory=list,
    )
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    user_code: UserCodeConfig = field(default_factory=UserCodeConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    rehearse: bool = setting(
        True,
        "before any process starts, play the first row with made-up answers: mistakes in agent, environment, rewards, "
        "tools and filters are found within seconds; false: only check that they can be called as the settings say",
    )
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)


@dataclass
class EvalSamplingConfig:
    """Sampling of answers in an evaluation; in a set, null means: as in `eval.sampling`."""

    temperature: Optional[float] = setting(None, "0 (as null) is greedy and needs n_samples=1", minimum=0.0)
    top_p: Optional[float] = setting(
        None, "probability mass to sample from; null: as rollout.sampling", minimum=1e-6, maximum=1.0
    )
    max_new_tokens: Optional[int] = setting(None, "longest answer; null: as rollout.sampling", unit="tokens", minimum=1)


@dataclass
class EvalSetConfig:
    """One of several evaluation sets; a null setting has the value of `eval`."""

    name: str = setting("", "name of the set in metrics: eval/<name>/accuracy")
    path: str = setting("", "as dataset.path")
    args: dict[str, Any] = setting(help="as dataset.args", factory=dict)
    fields: dict[str, str] = setting(help="as dataset.fields", factory=dict)
    interval: Optional[int] = setting(None, "as eval.interval", unit="steps", minimum=0)
    size: Optional[int] = setting(None, "as eval.size", unit="prompts", minimum=1)
    n_samples: Optional[int] = setting(None, "as eval.n_samples", unit="samples", minimum=1)
    agent: dict[str, Any] = setting(help="as eval.agent, and overrides it", factory=dict)
    env: dict[str, Any] = setting(help="as eval.env, and overrides it", factory=dict)
    reward: dict[str, Any] = setting(help="as eval.reward, and overrides it", factory=dict)
    sampling: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)


@dataclass
class EvalConfig:
    """Evaluation on the running servers, outside the staleness count; docs/evaluation.md."""

    interval: int = setting(
        5,
        "train steps between evaluations; the first and last version are evaluated too. 0: never",
        unit="steps",
        minimum=0,
    )
    name: str = setting("held_out", "name of the set in metrics: eval/<name>/accuracy")
    path: Optional[str] = setting(None, "evaluation dataset, as dataset.path; null: dataset.path with split=held_out")
    args: dict[str, Any] = setting(
        help="keyword arguments of the dataset; added to dataset.args if eval.path is null", factory=dict
    )
    fields: Optional[dict[str, str]] = setting(None, "as dataset.fields, of eval.path; null: those of dataset")
    size: int = setting(256, "most prompts of an evaluation, from the set's start", unit="prompts", minimum=1)
    n_samples: int = setting(1, "answers to each prompt; more than one give pass@k", unit="samples", minimum=1)
    agent: dict[str, Any] = setting(
        help="settings of agent that differ in evaluations; with a path the group replaces that of training",
        factory=dict,
    )
    env: dict[str, Any] = setting(help="as eval.agent, for env", factory=dict)
    reward: dict[str, Any] = setting(
        help="as eval.agent, for reward; with a path it replaces rewards too", factory=dict
    )
    sets: list[EvalSetConfig] = setting(
        help="several sets, which replace name, path, args and fields. Each gives these, and may give its own "
        "interval, size, n_samples, sampling, agent, env and reward",
        factory=list,
    )
    sampling: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
