"""Settings of the RolloutWorkers: sampling, rollouts, evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, Optional

from asyncrl.config.setting import ChoiceConfig, setting
from asyncrl.inference.encoder.settings import EncoderConfig
from asyncrl.plugins.chat.settings import ChatConfig

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.
# ruff: noqa: UP045


@dataclass
class SamplingConfig:
    """Sampling of answers during training."""

    max_new_tokens: int = setting(112, "longest answer", unit="tokens", minimum=1)
    max_new_tokens_from: dict[int, int] = setting(
        help="a course of that limit: by policy version, the longest answer of rollouts that begin at it or later, for "
        "example {0: 2048, 100: 4096}; none above max_new_tokens, which holds before the first and if there are none",
        factory=dict,
    )
    temperature: float = setting(1.0, "0 is greedy and gives groups without variance", minimum=0.0)
    top_p: float = setting(1.0, "nucleus mass kept", minimum=1e-6, maximum=1.0)
    top_k: int = setting(-1, "most likely tokens kept; -1: all", minimum=-1)
    min_p: float = setting(0.0, "least probability kept, relative to the most likely token", minimum=0.0, maximum=1.0)
    allowed_token_ids: str = setting(
        "",
        "the only tokens that an answer may have, such as action tokens: ids and ranges, `31744-31999,2`; empty: all. "
        "Log-probabilities of servers and training are then of the distribution over these tokens",
    )
    stop: list[str] = setting(
        help="texts that end an answer; it keeps its tokens up to and with the one that completes such a text",
        factory=list,
    )

    def max_new_tokens_at(self, version: int) -> int:
        """Return the longest answer of a rollout that begins at `version`."""
        reached = max((at for at in self.max_new_tokens_from if at <= version), default=None)
        return self.max_new_tokens if reached is None else self.max_new_tokens_from[reached]


@dataclass
class UserCodeConfig:
    """Agents, environments and rewards off the worker's event loop; limits are per RolloutWorker."""

    threads: int = setting(256, "plain functions that run at the same time", unit="calls", minimum=1)
    processes: int = setting(
        0,
        "processes for what is marked or set to run in one, started as they are needed; 0: one per core, at least 2",
        unit="processes",
        minimum=0,
    )
    process_memory_mb: int = setting(4096, "memory of such a process and all that it starts", unit="MB", minimum=64)
    process_children: int = setting(32, "processes that such a process may start", unit="processes", minimum=0)
    process_max_calls: int = setting(1000, "calls after which it is renewed", unit="calls", minimum=1)
    slow_call_s: float = setting(5.0, "calls that take so long are named in the log", unit="s", minimum=0.001)


class Pacing(StrEnum):
    """Start time of rollouts that the staleness bound admits."""

    eager = auto()
    """At once."""
    deadline = auto()
    """Just in time for their expected train step."""


@dataclass
class EndpointConfig:
    """The policy as OpenAI's and Anthropic's APIs, which each RolloutWorker serves to its agents; docs/endpoint.md."""

    host: str = setting(
        "127.0.0.1",
        "interface it listens on, without TLS; another than the loopback's only where agents run on other machines",
    )
    max_body_mb: int = setting(32, "largest request", unit="MB", minimum=1)


@dataclass
class RolloutConfig:
    """RolloutWorkers: agents, environments, rewards."""

    workers: int = setting(1, "number of RolloutWorkers", minimum=1)
    max_concurrent: int = setting(128, "rollouts one worker runs at the same time", unit="rollouts", minimum=1)
    new_tokens_per_chunk: int = setting(
        0, "ask for so many tokens at a time; 0: the whole answer", unit="tokens", minimum=0
    )
    request_timeout_s: float = setting(
        120.0,
        "longest silence of a server; an answer that takes longer than half of it is continued in another request, "
        "from the tokens that it has",
        unit="s",
        minimum=1.0,
    )
    pacing: Pacing = setting(
        Pacing.eager,
        "when a rollout starts that max_head_offpolicyness allows: at once (eager), or when it is expected to be "
        "needed, as learned from how long rollouts, steps and waits take (deadline), so that it is young in training",
    )
    rollout_timeout_s: float = setting(
        600.0,
        "limit of one rollout: episodes that still play then are lost; it is dropped where too few are left",
        unit="s",
        minimum=1.0,
    )
    filters: list[ChoiceConfig] = setting(
        help="group filters, in order; a rejected group is counted by reason", factory=list
    )
    filter_tries: int = setting(
        3,
        "how often a prompt is tried that a filter returns (`return_prompt`), each time with other random numbers and "
        "after the rest of the epoch; then it is dropped for good, counted as `<the filter's reason>_exhausted`",
        minimum=1,
    )
    shaping: list[ChoiceConfig] = setting(help="reward shaping functions, in order", factory=list)
    columns: list[str] = setting(
        help="numbers of one's own that graph functions, losses, advantages and filters read: row/<field>, "
        "agent/<name>, reward/<name> or token/<name>; docs/algorithms.md",
        factory=list,
    )
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    user_code: UserCodeConfig = field(default_factory=UserCodeConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    rehearse: bool = setting(
        True,
        "before anything starts, play the first row with made-up answers, to find mistakes in agent, environment, "
        "rewards, tools and filters within seconds",
    )
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)


@dataclass
class EvalSamplingConfig:
    """Sampling of answers in an evaluation; in a set, null means: as in `eval.sampling`."""

    temperature: Optional[float] = setting(None, "0 is greedy, for n_samples=1; null: 0", minimum=0.0)
    top_p: Optional[float] = setting(None, "nucleus mass kept; null: as rollout.sampling", minimum=1e-6, maximum=1.0)
    max_new_tokens: Optional[int] = setting(None, "longest answer; null: as rollout.sampling", unit="tokens", minimum=1)


@dataclass
class EvalSetConfig:
    """One of several evaluation sets; what is null is as in `eval`."""

    name: str = setting("", "name of the set in metrics: eval/<name>/accuracy")
    path: str = setting("", "as dataset.path")
    args: dict[str, Any] = setting(help="as dataset.args", factory=dict)
    fields: dict[str, str] = setting(help="as dataset.fields", factory=dict)
    interval: Optional[int] = setting(None, "as eval.interval", unit="steps")
    size: Optional[int] = setting(None, "as eval.size", unit="prompts")
    n_samples: Optional[int] = setting(None, "as eval.n_samples", unit="samples")
    agent: dict[str, Any] = setting(help="as eval.agent, over which it goes", factory=dict)
    env: dict[str, Any] = setting(help="as eval.env, over which it goes", factory=dict)
    reward: dict[str, Any] = setting(help="as eval.reward, over which it goes", factory=dict)
    sampling: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)


@dataclass
class EvalConfig:
    """Evaluation on the running servers, outside the staleness count; docs/evaluation.md."""

    interval: int = setting(5, "train steps between evaluations; 0: never", unit="steps", minimum=0)
    name: str = setting("held_out", "name of the set in metrics: eval/<name>/accuracy")
    path: Optional[str] = setting(None, "dataset; null: dataset.path with split=held_out")
    args: dict[str, Any] = setting(
        help="keyword arguments of the dataset; added to dataset.args where eval.path is null", factory=dict
    )
    fields: Optional[dict[str, str]] = setting(None, "as dataset.fields, of eval.path; null: those of dataset")
    size: int = setting(256, "prompts evaluated, from the set's start", unit="prompts", minimum=1)
    n_samples: int = setting(1, "answers to each prompt; more than one give pass@k", unit="samples", minimum=1)
    timeout_s: float = setting(300.0, "limit of one evaluation of one set", unit="s", minimum=1.0)
    agent: dict[str, Any] = setting(
        help="settings of agent that differ in evaluations; with a path the group replaces that of training",
        factory=dict,
    )
    env: dict[str, Any] = setting(help="likewise of env", factory=dict)
    reward: dict[str, Any] = setting(help="likewise of reward; with a path, also in place of rewards", factory=dict)
    sets: list[EvalSetConfig] = setting(
        help="several sets in place of name, path, args and fields; each with these, and with its own interval, size, "
        "n_samples, sampling, agent, env and reward where it gives them",
        factory=list,
    )
    sampling: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
