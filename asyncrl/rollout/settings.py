"""Settings of the RolloutWorkers: data, sampling, rollouts, evaluation; and their checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from asyncrl.config import signatures
from asyncrl.config.setting import ChoiceConfig, setting
from asyncrl.datasets.jsonl import JSONL

if TYPE_CHECKING:
    from asyncrl.config.experiment import ExperimentConfig

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.
# ruff: noqa: UP045


@dataclass
class DatasetConfig:
    """The prompts."""

    path: str = setting(
        "asyncrl.datasets.arithmetic:ArithmeticDataset", "dataset class by import path, or a JSONL file", fixed=True
    )
    args: dict[str, Any] = setting(help="keyword arguments of the dataset's constructor", factory=dict, fixed=True)
    max_prompt_tokens: int = setting(512, "longer prompts are refused at the start", unit="tokens", minimum=1)


@dataclass
class SamplingConfig:
    """How answers are sampled during training."""

    max_new_tokens: int = setting(112, "longest answer", unit="tokens", minimum=1)
    temperature: float = setting(1.0, "0 is greedy and gives groups without variance", minimum=0.0)
    top_p: float = setting(1.0, "nucleus mass kept", minimum=1e-6, maximum=1.0)
    top_k: int = setting(-1, "most likely tokens kept; -1: all", minimum=-1)
    min_p: float = setting(0.0, "least probability kept, relative to the most likely token", minimum=0.0, maximum=1.0)


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
    rollout_timeout_s: float = setting(
        600.0, "limit of one rollout; beyond it the rollout is dropped", unit="s", minimum=1.0
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


@dataclass
class EvalConfig:
    """Held-out evaluation on the running servers, greedy, outside the staleness count."""

    interval: int = setting(5, "train steps between evaluations; 0: never", unit="steps", minimum=0)
    name: str = setting("held_out", "name of the set in metrics: eval/<name>/accuracy")
    path: Optional[str] = setting(None, "dataset; null: dataset.path with split=held_out")
    args: dict[str, Any] = setting(
        help="keyword arguments of the dataset; added to dataset.args where eval.path is null", factory=dict
    )
    size: int = setting(256, "prompts evaluated, from the set's start", unit="prompts", minimum=1)
    timeout_s: float = setting(300.0, "limit of one evaluation", unit="s", minimum=1.0)


def check(config: ExperimentConfig) -> Iterator[str]:
    """What is wrong with these settings, each as `setting=value: what is wrong; what to do`."""
    sampling = config.rollout.sampling
    if sampling.temperature == 0:
        yield (
            "rollout.sampling.temperature=0.0: greedy samples of a group are all the same and carry no signal; use 1.0"
        )
    data, evaluation = config.dataset, config.eval
    yield from dataset("dataset", data.path, data.args)
    if evaluation.path is not None:
        yield from dataset("eval", evaluation.path, evaluation.args)
    elif evaluation.interval:
        yield from _held_out_rows(data, evaluation)
    yield from signatures.problems("agent", config.agent.path, config.agent.args, supplied=("tokenizer",))
    yield from signatures.problems("env", config.env.path, config.env.args, supplied=("reward",))
    yield from signatures.problems("reward", config.reward.path, config.reward.args, positional=2)


def dataset(group: str, path: str, args: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the dataset `path` and `args` of a group of settings, as far as one can tell unloaded."""
    if path.endswith(JSONL):
        if not Path(path).expanduser().exists():
            yield f"{group}.path={path!r}: no such file; give a JSONL file, or a dataset class as package.module:Name"
        yield from signatures.problems(group, "asyncrl.datasets.jsonl:JsonlDataset", args, ("path", "split", "seed"))
    elif ":" in path:
        yield from signatures.problems(group, path, args, supplied=("split", "seed"))
    else:
        yield f"{group}.path={path!r}: give a file that ends in {JSONL}, or a dataset class as package.module:Name"


def _held_out_rows(data: DatasetConfig, evaluation: EvalConfig) -> Iterator[str]:
    """Whether evaluation would take rows of the training file that are trained on."""
    args = evaluation.args
    yield from dataset("eval", data.path, {**data.args, **args}) if args else ()
    if not data.path.endswith(JSONL) or "path" in args:
        return
    if not data.args.get("held_out_share"):
        yield (
            f"eval.path=null: evaluation would take the training file {data.path!r} itself; give it a file of its own "
            "(eval.path=...), hold out a share of this one (dataset.args.held_out_share=0.05), or switch it off "
            "(eval.interval=0)"
        )
    for key in ("held_out_share", "prompt_template"):
        if args.get(key, data.args.get(key)) != data.args.get(key):
            yield (
                f"eval.args.{key}={args[key]!r}: it decides which prompts are held out, and training has another; set "
                f"dataset.args.{key} to the same, or give evaluation a file of its own with eval.path"
            )
