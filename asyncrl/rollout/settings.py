"""Settings of the RolloutWorkers: data, sampling, rollouts, evaluation; and their checks."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from asyncrl.api.reward import RunIn
from asyncrl.config import plugin_forms, signatures
from asyncrl.config.setting import ChoiceConfig, PluginConfig, setting
from asyncrl.plugins.chat.settings import ChatConfig
from asyncrl.plugins.chat.stop_strings import check_stop_strings
from asyncrl.plugins.datasets.chat import AUTO, OFF
from asyncrl.plugins.datasets.prompts import Overlong
from asyncrl.plugins.datasets.readers import JSONL, PARQUET, is_data_path

if TYPE_CHECKING:
    from asyncrl.config.experiment import ExperimentConfig

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.
# ruff: noqa: UP045


@dataclass
class SourceConfig:
    """One of several datasets."""

    path: str = setting("", "as dataset.path")
    args: dict[str, Any] = setting(help="as dataset.args", factory=dict)
    fields: dict[str, str] = setting(help="as dataset.fields", factory=dict)
    weight: float = setting(1.0, "its share of the rows is weight / sum of all weights")
    name: str = setting("", "its rows say `source: <name>`; empty: its path")


@dataclass
class CurriculumConfig:
    """Prompts that are too easy or too hard are left out of some epochs; docs/data.md."""

    low: float = setting(
        0.0, "share of right answers from which a prompt is drawn in every epoch", minimum=0.0, maximum=1.0
    )
    high: float = setting(1.0, "share of right answers up to which it is", minimum=0.0, maximum=1.0)
    rest: int = setting(
        2, "epochs that a prompt outside is left out of; then it is measured again", unit="epochs", minimum=1
    )
    right_at: float = setting(1.0, "reward, before shaping, from which an answer counts as right")

    @property
    def is_on(self) -> bool:
        """Whether any prompt can be outside."""
        return self.low > 0.0 or self.high < 1.0


@dataclass
class DatasetConfig:
    """The prompts."""

    path: str = setting(
        "asyncrl.plugins.datasets.arithmetic:ArithmeticDataset",
        "dataset class by import path, a JSONL or Parquet file, a folder of them, a folder saved by `datasets`, or a "
        "name on the Hugging Face hub; docs/data.md",
        fixed=True,
    )
    args: dict[str, Any] = setting(help="keyword arguments of the dataset's constructor", factory=dict, fixed=True)
    fields: dict[str, str] = setting(
        help="columns of a file under another name, `{prompt: question, answer: solution}`; a column within a column "
        "with a dot",
        factory=dict,
        fixed=True,
    )
    sources: list[SourceConfig] = setting(
        help="several datasets in place of path, mixed by weight; each with path, args, fields, weight and name",
        factory=list,
        fixed=True,
    )
    max_prompt_tokens: int = setting(2048, "longest prompt, its chat template counted", unit="tokens", minimum=1)
    overlong: Overlong = setting(
        Overlong.filter,
        "what becomes of longer prompts: their rows are left out, their text is cut (left, right, middle), or the run "
        "is refused",
    )
    chat_template: str = setting(
        AUTO, "auto: the tokenizer's, where it has one; off: prompts are plain text; or a Jinja file"
    )
    chat_template_args: dict[str, Any] = setting(
        help="further variables of the chat template, as `{enable_thinking: false}`", factory=dict
    )
    system_prompt: str = setting("", "system message put before prompts that have none; empty: no such message")
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)


@dataclass
class SamplingConfig:
    """How answers are sampled during training."""

    max_new_tokens: int = setting(112, "longest answer", unit="tokens", minimum=1)
    temperature: float = setting(1.0, "0 is greedy and gives groups without variance", minimum=0.0)
    top_p: float = setting(1.0, "nucleus mass kept", minimum=1e-6, maximum=1.0)
    top_k: int = setting(-1, "most likely tokens kept; -1: all", minimum=-1)
    min_p: float = setting(0.0, "least probability kept, relative to the most likely token", minimum=0.0, maximum=1.0)
    stop: list[str] = setting(
        help="texts that end an answer; it keeps its tokens up to and with the one that completes such a text",
        factory=list,
    )


@dataclass
class AgentConfig(PluginConfig):
    """The agent."""

    path: str = setting(
        "asyncrl.plugins.agents.single_turn:SingleTurnAgent",
        "import path of a class or of a function run(prompt, env, client); docs/agents.md",
    )
    run_in: RunIn = setting(
        RunIn.auto,
        "thread, or process: each episode of a plain `def run` then has a process of its own, which is killed where it "
        "hangs or exceeds rollout.user_code.process_memory_mb or process_children; auto: as it is marked, else a "
        "thread for `def`, an event loop of your own for `async def`",
    )
    processes: int = setting(
        16,
        "with run_in=process, episodes that a RolloutWorker plays at the same time; others wait",
        unit="processes",
        minimum=1,
    )
    process_max_episodes: int = setting(
        100, "with run_in=process, episodes after which a process is renewed", unit="episodes", minimum=1
    )


@dataclass
class EnvConfig(PluginConfig):
    """The environment."""

    path: str = setting(
        "asyncrl.plugins.envs.single_turn:SingleTurnEnv",
        "import path of the class, `package.module:Name`, or `gymnasium:` and the name of a registered environment",
    )
    vectorized: bool = setting(
        False, "gymnasium only: the games of a group are one vector environment, stepped together"
    )
    timeout_s: float = setting(
        300.0, "limit of one call of your environment; beyond it its episode fails", unit="s", minimum=0.01
    )
    run_in: RunIn = setting(
        RunIn.auto,
        "thread, or process: each episode's environment then has a process of its own, which is killed where it "
        "hangs or exceeds rollout.user_code.process_memory_mb or process_children; auto: as the class is marked, else "
        "a thread for `def`, an event loop of your own for `async def`",
    )
    processes: int = setting(
        16,
        "with run_in=process, environments that a RolloutWorker has at the same time; other episodes wait at `reset`",
        unit="processes",
        minimum=1,
    )
    process_max_episodes: int = setting(
        100, "with run_in=process, episodes after which a process is renewed", unit="episodes", minimum=1
    )


@dataclass
class RewardConfig(PluginConfig):
    """The reward, where there is one alone."""

    path: str = setting(
        "asyncrl.plugins.rewards.arithmetic:arithmetic_reward",
        "function (data, completion), (episode) or (group), or a class whose instances are called so; docs/rewards.md",
    )
    run_in: RunIn = setting(RunIn.auto, "loop, thread or process; auto: as the function is marked, else a thread")
    timeout_s: float = setting(60.0, "limit of one call", unit="s", minimum=0.01)
    failure_reward: Optional[float] = setting(
        None, "what an answer is worth whose reward fails; null: its episode is tried again, then lost"
    )
    verdict: Optional[bool] = setting(
        None, "whether it is 1 for right answers and 0 for wrong ones: then there is accuracy; null: as it is marked"
    )


@dataclass
class NamedRewardConfig(RewardConfig):
    """One of several rewards."""

    path: str = setting("", "as reward.path")
    name: str = setting("", "its metric is reward/<name>, before the weight")
    weight: float = setting(1.0, "factor of its value in the sum")


@dataclass
class UserCodeConfig:
    """Agents, environments and rewards off the worker's event loop; limits are per RolloutWorker."""

    threads: int = setting(256, "plain functions that run at the same time", unit="calls", minimum=1)
    processes: int = setting(2, "processes for what is marked or set to run in one", unit="processes", minimum=1)
    process_memory_mb: int = setting(4096, "memory of such a process and all that it starts", unit="MB", minimum=64)
    process_children: int = setting(32, "processes that such a process may start", unit="processes", minimum=0)
    process_max_calls: int = setting(1000, "calls after which it is renewed", unit="calls", minimum=1)
    slow_call_s: float = setting(5.0, "calls that take so long are named in the log", unit="s", minimum=0.001)


class Pacing(StrEnum):
    """When rollouts start that the staleness bound allows."""

    eager = auto()
    """At once."""
    deadline = auto()
    """When they are expected to be needed."""


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

    workers: int = setting(1, "number of RolloutWorkers; each takes a shard of the prompts", minimum=1)
    max_concurrent: int = setting(128, "rollouts one worker runs at the same time", unit="rollouts", minimum=1)
    new_tokens_per_chunk: int = setting(
        0, "ask for so many tokens at a time; 0: the whole answer", unit="tokens", minimum=0
    )
    request_timeout_s: float = setting(
        120.0,
        "longest silence of a server; what it has of an answer that takes longer than half of it is kept, and the "
        "answer goes on in another request",
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
        "after the rest of the epoch; then it is dropped for good, counted as `<the filter's reason>_given_up`",
        minimum=1,
    )
    shaping: list[ChoiceConfig] = setting(help="reward shaping functions, in order", factory=list)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    user_code: UserCodeConfig = field(default_factory=UserCodeConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)


@dataclass
class EvalSamplingConfig:
    """How answers of an evaluation are sampled; what is null is, for a set, as in `eval.sampling`."""

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
    sets: list[EvalSetConfig] = setting(
        help="several sets in place of name, path, args and fields; each with these, and with its own interval, size, "
        "n_samples and sampling where it gives them",
        factory=list,
    )
    sampling: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)


@dataclass(frozen=True)
class EvaluationSet:
    """An evaluation set with all that is said of it; `group` is the group of settings that says it."""

    group: str
    name: str
    path: str | None
    args: Mapping[str, Any]
    fields: Mapping[str, str]
    interval: int
    size: int
    n_samples: int
    temperature: float
    top_p: float
    max_new_tokens: int

    def is_due(self, version: int, total_train_steps: int) -> bool:
        """Whether `version` is to be evaluated: every `interval`-th, the initial and the last one."""
        return self.interval > 0 and (version % self.interval == 0 or version == total_train_steps)


def evaluation_sets(config: ExperimentConfig) -> tuple[EvaluationSet, ...]:
    """The evaluation sets of the settings `eval`, in their order; also those that are never due."""
    common, training = config.eval, config.rollout.sampling
    fields = config.dataset.fields if common.fields is None else common.fields

    def first(*values: Any) -> Any:
        return next(value for value in values if value is not None)

    def one(group: str, own: EvalSetConfig, path: str | None, name: str) -> EvaluationSet:
        return EvaluationSet(
            group,
            name,
            path,
            own.args,
            own.fields,
            first(own.interval, common.interval),
            first(own.size, common.size),
            first(own.n_samples, common.n_samples),
            first(own.sampling.temperature, common.sampling.temperature, 0.0),
            first(own.sampling.top_p, common.sampling.top_p, training.top_p),
            first(own.sampling.max_new_tokens, common.sampling.max_new_tokens, training.max_new_tokens),
        )

    if not common.sets:
        return (one("eval", EvalSetConfig(args=common.args, fields=fields), common.path, common.name),)
    return tuple(one(f"eval.sets[{number}]", own, own.path, own.name) for number, own in enumerate(common.sets))


def longest_answer(config: ExperimentConfig) -> int:
    """The most tokens that an answer may have, in training or in an evaluation."""
    return max(config.rollout.sampling.max_new_tokens, *(one.max_new_tokens for one in evaluation_sets(config)))


def warnings(config: ExperimentConfig) -> Iterator[str]:
    """What these settings do that their reader may not expect, each as `setting=value: what follows`."""
    data = config.dataset
    trained = {_place(path) for path in ([source.path for source in data.sources] or [data.path])}
    for each in evaluation_sets(config):
        same = each.path is not None and is_data_path(each.path) and _place(each.path) in trained
        if each.interval and same and not each.args.get("held_out_share") and not each.args.get("files"):
            yield (
                f"{each.group}.path={each.path!r}: it is the training file; what {each.name!r} measures is how well "
                "the prompts that are trained on are answered"
            )


def _place(path: str) -> Path:
    return Path(path).expanduser().resolve()


def check(config: ExperimentConfig) -> Iterator[str]:
    """What is wrong with these settings, each as `setting=value: what is wrong; what to do`."""
    sampling = config.rollout.sampling
    if sampling.temperature == 0:
        yield (
            "rollout.sampling.temperature=0.0: greedy samples of a group are all the same and carry no signal; use 1.0"
        )
    try:
        check_stop_strings(sampling.stop)
    except ValueError as error:
        yield f"rollout.sampling.stop={list(sampling.stop)}: {error}"
    data, evaluation = config.dataset, config.eval
    yield from _datasets(data)
    yield from _chat(data)
    yield from _evaluation(config)
    if evaluation.sets:
        pass
    elif evaluation.path is not None:
        yield from dataset("eval", evaluation.path, evaluation.args)
    elif evaluation.interval and data.sources:
        yield (
            "eval.path=null: of dataset.sources nothing is held out; give evaluation a set of its own, or switch it "
            "off (eval.interval=0)"
        )
    elif evaluation.interval:
        yield from _held_out_rows(data, evaluation)
    yield from plugin_forms.agent_problems("agent", config.agent.path, config.agent.args)
    if config.agent.run_in == RunIn.loop:
        yield "agent.run_in=loop: an agent of yours is never called on the worker's own event loop; use auto"
    yield from _environment(config.env)
    yield from _rewards(config)


def _evaluation(config: ExperimentConfig) -> Iterator[str]:
    """What is wrong with the evaluation sets, but for where the rows of the one of `eval.path=null` come from."""
    evaluation, default = config.eval, EvalConfig()
    if evaluation.sets:
        for name in ("name", "path", "args", "fields"):
            if (value := getattr(evaluation, name)) != getattr(default, name):
                yield f"eval.{name}={value!r}: set together with eval.sets, each of which has its own; write it there"
    names: set[str] = set()
    for each in evaluation_sets(config):
        group = each.group
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", each.name) or each.name in names:
            yield (
                f"{group}.name={each.name!r}: names the metrics eval/<name>/...; give each set another one, of "
                "letters, digits, '_', '.' and '-'"
            )
        names.add(each.name)
        if evaluation.sets:
            yield from dataset(group, each.path or "", each.args)
            yield from _fields(group, each.path or "", each.fields)
        counts = {"interval": each.interval, "size": each.size, "n_samples": each.n_samples}
        counts["sampling.max_new_tokens"] = each.max_new_tokens
        for name, count in counts.items():
            if count < (least := int(name != "interval")):
                yield f"{group}.{name}={count}: below the least allowed value; use {least} or more"
        if not 0 < each.top_p <= 1:
            yield f"{group}.sampling.top_p={each.top_p}: no nucleus; give a number above 0, up to 1"
        if not (math.isfinite(each.temperature) and each.temperature >= 0):
            yield f"{group}.sampling.temperature={each.temperature}: no temperature; give 0 or more"
        if each.temperature == 0 and each.n_samples > 1:
            yield (
                f"{group}.n_samples={each.n_samples}: greedy answers to a prompt are all the same; give a temperature "
                f"above 0 ({group}.sampling.temperature=1.0), or n_samples=1"
            )


GYMNASIUM = "gymnasium:"
"""What `env.path` begins with for a registered environment; its name follows, or module:name."""
GYMNASIUM_ENV = "asyncrl.plugins.envs.gymnasium_env:GymnasiumEnv"
_GYMNASIUM_VECTOR = "asyncrl.plugins.envs.gymnasium_vector:VectorGames"


def _environment(env: EnvConfig) -> Iterator[str]:
    if env.run_in == RunIn.loop:
        yield "env.run_in=loop: an environment is never called on the worker's own event loop; use auto"
    if env.run_in == RunIn.process and env.vectorized:
        yield (
            "env.run_in=process: the games of env.vectorized=true are one object, which is stepped in a thread; leave "
            "one of them out"
        )
    name = env.path.removeprefix(GYMNASIUM)
    if name == env.path:
        if env.vectorized:
            yield (
                f"env.vectorized=true: env.path={env.path!r} is no environment of gymnasium's; write "
                f"{GYMNASIUM}<name>, or leave it out"
            )
        yield from plugin_forms.environment_problems("env", env.path, env.args)
        return
    if importlib.util.find_spec("gymnasium") is None:
        yield f"env.path={env.path!r}: the package gymnasium is not installed; pip install 'asyncrl[gymnasium]'"
        return
    if ":" not in name:  # what a module registers is known once it is imported, in the workers
        import gymnasium

        try:
            gymnasium.spec(name)
        except gymnasium.error.Error as error:
            yield f"env.path={env.path!r}: {error}; gymnasium.pprint_registry() lists them"
    if env.vectorized:
        yield from signatures.problems("env", _GYMNASIUM_VECTOR, env.args, supplied=("id",), positional=2)
    else:
        yield from signatures.problems("env", GYMNASIUM_ENV, env.args, supplied=("id", "reward"))


_ROW_METRICS = ("mean", "std", "groups_without_variance")
"""Names of `reward/...` metrics that are not a reward's."""


def _rewards(config: ExperimentConfig) -> Iterator[str]:
    """What is wrong with `reward` and `rewards`."""
    if not config.rewards:
        yield from _reward("reward", config.reward)
        return
    if config.reward != RewardConfig():
        yield "reward: set together with rewards, which replace it; write it as one of them"
    names: set[str] = set()
    for number, part in enumerate(config.rewards):
        group = f"rewards[{number}]"
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", part.name) or part.name in _ROW_METRICS or part.name in names:
            yield (
                f"{group}.name={part.name!r}: names the metric reward/<name>; give each of the rewards another one, of "
                f"letters, digits, '_', '.' and '-', none of {', '.join(_ROW_METRICS)}"
            )
        names.add(part.name)
        if not math.isfinite(part.weight):
            yield f"{group}.weight={part.weight}: no factor; give a finite number"
        if part.timeout_s <= 0:
            yield f"{group}.timeout_s={part.timeout_s}: no time to return in; use 0.01 s or more"
        yield from _reward(group, part)


def _reward(group: str, reward: RewardConfig) -> Iterator[str]:
    if reward.failure_reward is not None and not math.isfinite(reward.failure_reward):
        yield f"{group}.failure_reward={reward.failure_reward}: no reward; give a finite number, or null"
    yield from signatures.reward_problems(group, reward.path, reward.args)


def dataset(group: str, path: str, args: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the dataset `path` and `args` of a group of settings, as far as one can tell unloaded."""
    if is_data_path(path):
        if not Path(path).expanduser().exists():
            yield f"{group}.path={path!r}: no such file; give a data file, or a dataset class as package.module:Name"
        supplied = ("path", "split", "seed", "fields")
        yield from signatures.problems(group, "asyncrl.plugins.datasets.files:FileDataset", args, supplied)
    elif ":" in path:
        yield from signatures.problems(group, path, args, supplied=("split", "seed"))
    else:
        yield (
            f"{group}.path={path!r}: give a file that ends in {JSONL} or {PARQUET}, a folder, or a dataset class as "
            "package.module:Name"
        )


def _datasets(data: DatasetConfig) -> Iterator[str]:
    """What is wrong with `dataset`'s path or sources, and their fields."""
    if data.curriculum.low > data.curriculum.high:
        yield (
            f"dataset.curriculum.low={data.curriculum.low}: above dataset.curriculum.high={data.curriculum.high}, so "
            "that no prompt is within; exchange them"
        )
    if not data.sources:
        yield from dataset("dataset", data.path, data.args)
        yield from _fields("dataset", data.path, data.fields)
        return
    default = DatasetConfig()
    for name in ("args", "fields"):
        if getattr(data, name) != getattr(default, name):
            yield f"dataset.{name}: set together with dataset.sources, each of which has its own; write it there"
    names: set[str] = set()
    for number, source in enumerate(data.sources):
        group, name = f"dataset.sources[{number}]", source.name or source.path
        if not (math.isfinite(source.weight) and source.weight > 0):
            yield f"{group}.weight={source.weight}: no share; give a number above 0"
        if name in names:
            yield f"{group}.name={source.name!r}: another source is called {name!r} too; give each a name of its own"
        names.add(name)
        yield from dataset(group, source.path, source.args)
        yield from _fields(group, source.path, source.fields)


def _fields(group: str, path: str, fields: Mapping[str, str]) -> Iterator[str]:
    if fields and not is_data_path(path):
        yield f"{group}.fields={dict(fields)}: {path!r} is a class, not a file; name its rows' fields there"


def _chat(data: DatasetConfig) -> Iterator[str]:
    template = data.chat_template
    if template not in (AUTO, OFF) and not Path(template).expanduser().is_file():
        yield f"dataset.chat_template={template!r}: no such file; give auto, off, or a Jinja file"
    if template == OFF:
        for name in ("system_prompt", "chat_template_args"):
            if value := getattr(data, name):
                yield f"dataset.{name}={value!r}: nothing takes it with dataset.chat_template=off; leave it out"


def _held_out_rows(data: DatasetConfig, evaluation: EvalConfig) -> Iterator[str]:
    """Whether evaluation would take rows of the training file that are trained on."""
    args = evaluation.args
    yield from dataset("eval", data.path, {**data.args, **args}) if args else ()
    if not is_data_path(data.path) or "path" in args:
        return
    if not data.args.get("held_out_share"):
        yield (
            f"eval.path=null: evaluation would take the training file {data.path!r} itself; give it a file of its own "
            "(eval.path=...), hold out a share of this one (dataset.args.held_out_share=0.05), or switch it off "
            "(eval.interval=0)"
        )
    for key in ("held_out_share", "prompt_template", "files"):
        if args.get(key, data.args.get(key)) != data.args.get(key):
            yield (
                f"eval.args.{key}={args[key]!r}: it decides which prompts are held out, and training has another; set "
                f"dataset.args.{key} to the same, or give evaluation a file of its own with eval.path"
            )
