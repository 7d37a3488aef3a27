"""Checks of a whole config, before any process starts. Each rule is a small generator of messages.

A message reads `setting=value: what is wrong; what to do`.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl.algorithms import catalog
from asyncrl.algorithms.signatures import KINDS
from asyncrl.config.experiment import ChoiceConfig, ExperimentConfig
from asyncrl.config.import_paths import PluginError, split_path
from asyncrl.config.load import Config, ConfigError, settings
from asyncrl.inference.sglang.command import check_args
from asyncrl.trainer.supervised.settings import SFTConfig

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
MAX_SGLANG_TOP_K = 4096
_PARALLEL = re.compile(r"d([1-9][0-9]*)")


def data_parallel_ranks(parallel: str) -> int:
    """Number of data-parallel ranks in `trainer.parallel`, e.g. 2 for `d2`.

    Raises:
        ConfigError: it is not `d<N>`.
    """
    match = _PARALLEL.fullmatch(parallel)
    if match is None:
        raise ConfigError(
            f"trainer.parallel={parallel!r}: not a layout; write d<N> for N data-parallel ranks, for example d2"
        )
    return int(match[1])


def validate(config: Config) -> None:
    """Check values against their bounds and choices, and against each other.

    Raises:
        ConfigError: with every message, one per line.
    """
    messages = list(_fields(config))
    if not messages:
        messages += _names(config)
        if isinstance(config, ExperimentConfig):
            for rule in _RULES:
                messages += rule(config)
        else:
            messages += _supervised(config)
    if messages:
        raise ConfigError("\n".join(messages))


def _fields(config: Config) -> Iterator[str]:
    for path, _, info in settings(type(config)):
        value, unit = _value(config, path), f" {info.unit}" if info.unit else ""
        if info.choices and value not in info.choices:
            yield f"{path}={value!r}: not a choice; choose one of {', '.join(info.choices)}"
        if isinstance(value, (int, float)) and info.minimum is not None and value < info.minimum:
            yield f"{path}={value}: below the least allowed value; use {info.minimum:g}{unit} or more"
        if isinstance(value, (int, float)) and info.maximum is not None and value > info.maximum:
            yield f"{path}={value}: above the greatest allowed value; use {info.maximum:g}{unit} or less"


def _value(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = getattr(config, part)
    return config


def _names(config: Config) -> Iterator[str]:
    names = {"experiment_name": config.experiment_name}
    if isinstance(config, ExperimentConfig):
        names["trial_name"] = config.trial_name
    for name, value in names.items():
        if not _SAFE_NAME.fullmatch(value):
            yield (
                f"{name}={value!r}: becomes a folder's name; use letters, digits, '.', '_' and '-', beginning "
                "with a letter or digit"
            )
    root = Path(config.fileroot).expanduser()
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield f"fileroot={config.fileroot!r}: {existing} is not a folder one can write to; choose another fileroot"


def _supervised(config: SFTConfig) -> Iterator[str]:
    yield from _dataset("dataset.path", config.dataset.path)
    if not config.phases:
        yield "phases=[]: there is nothing to imitate; give at least one, for example phases=[{steps: 1000}]"
    if config.model.path is not None:
        yield from _hugging_face_folder("model.path", config.model.path)
        if config.model.architecture:
            yield "model.architecture: a pretrained model has its own; set model.path or model.architecture, not both"


def _batches(config: ExperimentConfig) -> Iterator[str]:
    batch, minibatches = config.train_batch_size, config.trainer.ppo_minibatches
    if batch % minibatches:
        below, above = batch - batch % minibatches, batch + minibatches - batch % minibatches
        near = " or ".join(str(size) for size in (below, above) if size)
        yield f"train_batch_size={batch}: not divisible by trainer.ppo_minibatches={minibatches}; use {near}"
    try:
        ranks = data_parallel_ranks(config.trainer.parallel)
    except ConfigError as error:
        yield str(error)
        return
    if batch // minibatches < ranks:
        yield (
            f"trainer.parallel={config.trainer.parallel!r}: a minibatch has {batch // minibatches} rollouts, "
            "fewer than the "
            f"{ranks} ranks; use at most d{batch // minibatches}, or a larger train_batch_size"
        )
    held, in_flight = config.trainer.buffer_capacity * ranks, (config.max_head_offpolicyness + 1) * batch
    if held < in_flight:
        yield (
            f"trainer.buffer_capacity={config.trainer.buffer_capacity}: {ranks} rank(s) hold {held} rollouts, fewer "
            f"than the (max_head_offpolicyness + 1) * train_batch_size = {in_flight} that may be under way; use "
            f"{-(-in_flight // ranks)} or more"
        )
    if config.group_size == 1 and config.algorithm.advantage.name in ("grpo", "dr_grpo", "opo", "gpg"):
        yield (
            f"group_size=1: algorithm.advantage.name={config.algorithm.advantage.name!r} compares the samples of "
            "a group, and one "
            "sample has nothing to be compared with; use group_size=2 or more, or another advantage"
        )


def _sampling(config: ExperimentConfig) -> Iterator[str]:
    sampling, generation = config.rollout.sampling, config.generation
    if sampling.temperature == 0:
        yield (
            "rollout.sampling.temperature=0.0: greedy samples of a group are all the same and carry no signal; use 1.0"
        )
    needed = config.dataset.max_prompt_tokens + sampling.max_new_tokens
    if 0 < generation.context_length < needed:
        yield (
            f"generation.context_length={generation.context_length}: shorter than dataset.max_prompt_tokens + "
            f"rollout.sampling.max_new_tokens = {needed}; use 0 or {needed} or more"
        )
    if generation.backend == "embedded" and generation.max_running_requests < config.group_size:
        yield (
            f"generation.max_running_requests={generation.max_running_requests}: a group of "
            f"group_size={config.group_size} does "
            f"not fit; use {config.group_size} or more"
        )
    if generation.backend == "embedded" and generation.max_total_tokens < needed:
        yield (
            f"generation.max_total_tokens={generation.max_total_tokens}: one sample may take {needed}; use "
            f"{needed} or more"
        )


def _model(config: ExperimentConfig) -> Iterator[str]:
    for setting, path in (
        ("model.path", config.model.path),
        ("algorithm.critic.path", config.algorithm.critic.path),
        ("algorithm.reference.path", config.algorithm.reference.path),
    ):
        if path is not None:
            yield from _hugging_face_folder(setting, path)


def _hugging_face_folder(setting: str, path: str) -> Iterator[str]:
    if not (Path(path).expanduser() / "config.json").is_file():
        yield (
            f"{setting}={path!r}: no Hugging Face model there (no config.json); give the folder of a downloaded model"
        )


def _plugins(config: ExperimentConfig) -> Iterator[str]:
    yield from _dataset("dataset.path", config.dataset.path)
    if config.eval.path is not None:
        yield from _dataset("eval.path", config.eval.path)
    for setting, path in (
        ("agent.path", config.agent.path),
        ("env.path", config.env.path),
        ("reward.path", config.reward.path),
    ):
        yield from _plugin(setting, path)


def _dataset(setting: str, path: str) -> Iterator[str]:
    if ":" in path:
        yield from _plugin(setting, path)
    elif not Path(path).expanduser().is_file():
        yield f"{setting}={path!r}: no such file; give a JSONL file, or a dataset class as package.module:Name"


def _plugin(setting: str, path: str) -> Iterator[str]:
    """Whether `path` names something, found without running its module (it may import torch)."""
    try:
        module, name = split_path(path)
    except PluginError as error:
        yield f"{setting}: {error}"
        return
    source = Path(module).expanduser() if module.endswith(".py") else _module_source(module)
    if source is None or not source.is_file():
        yield f"{setting}={path!r}: no module or file {module!r}; is it installed, or its folder on PYTHONPATH?"
    elif source.suffix == ".py" and name not in (defined := _top_level_names(source)):
        yield f"{setting}={path!r}: {source} defines no {name!r}; it has: {', '.join(sorted(defined))}"


def _module_source(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _top_level_names(source: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return found


def _algorithms(config: ExperimentConfig) -> Iterator[str]:
    algorithm = config.algorithm
    choices: list[tuple[str, str, ChoiceConfig]] = [
        ("algorithm.policy_loss", "policy_loss", algorithm.policy_loss),
        ("algorithm.correction", "correction", algorithm.correction),
        ("algorithm.advantage", "advantage", algorithm.advantage),
        ("algorithm.aggregation", "aggregation", algorithm.aggregation),
        ("algorithm.kl", "kl", algorithm.kl),
        ("algorithm.critic.value_loss", "value_loss", algorithm.critic.value_loss),
        *((f"rollout.filters[{i}]", "filter", choice) for i, choice in enumerate(config.rollout.filters)),
        *((f"rollout.shaping[{i}]", "shaping", choice) for i, choice in enumerate(config.rollout.shaping)),
    ]
    try:
        for kind in KINDS:
            catalog.known(kind, algorithm.plugins)
    except ValueError as error:
        yield f"algorithm.plugins={algorithm.plugins}: {error}"
        return
    for setting, kind, choice in choices:
        try:
            catalog.check(kind, choice.name, choice.params, algorithm.plugins)
        except ValueError as error:
            yield f"{setting}={choice.name!r}: {error}"


def _generation_backend(config: ExperimentConfig) -> Iterator[str]:
    generation = config.generation
    if generation.backend != "sglang":
        return
    if config.rollout.sampling.top_k > MAX_SGLANG_TOP_K:
        yield (
            f"rollout.sampling.top_k={config.rollout.sampling.top_k}: SGLang tells the distribution it sampled "
            f"from only up to {MAX_SGLANG_TOP_K} tokens; use that or less, or -1"
        )
    try:
        check_args(generation.sglang.args)
    except ValueError as error:
        yield str(error)
    if generation.sglang.urls:
        return
    python = generation.sglang.python
    if python and shutil.which(Path(python).expanduser()) is None:
        yield (
            f"generation.sglang.python={python!r}: not an executable; give the interpreter of an environment with "
            "sglang"
        )
    if not python and importlib.util.find_spec("sglang") is None:
        yield (
            "generation.backend='sglang': sglang is not installed in this environment; install the `sglang` "
            "extra, or name the "
            "interpreter of an environment that has it in generation.sglang.python"
        )


_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_PER_ENGINE = ("dp_size", "data_parallel_size", "pp_size", "pipeline_parallel_size", "nnodes")
"""SGLang flags by which an engine has more ranks than `tensor_parallel`."""


def _weight_transport(config: ExperimentConfig) -> Iterator[str]:
    transport, generation = config.manager.weight_transport, config.generation
    if transport == "disk":
        return
    if generation.backend != "sglang":
        yield (
            f"manager.weight_transport={transport!r}: generation.backend={generation.backend!r} takes weights from "
            "disk only; use weight_transport=disk or backend=sglang"
        )
    host = config.system.host
    here = {host, *_LOOPBACK}
    elsewhere = [url for url in generation.sglang.urls if urlsplit(url).hostname not in here]
    if elsewhere and transport == "tensor":
        yield (
            f"manager.weight_transport='tensor': server {elsewhere[0]!r} is not on system.host={host!r}, and memory is "
            "shared on one machine only; use distributed or disk"
        )
    if elsewhere and transport == "distributed" and host in _LOOPBACK:
        yield (
            f"manager.weight_transport='distributed': server {elsewhere[0]!r} cannot reach the trainer at "
            f"system.host={host!r}; set it to this machine's address on their network"
        )
    for key, value in generation.sglang.args.items():
        if key.lstrip("-").replace("-", "_") in _PER_ENGINE and value != 1:
            yield (
                f"manager.weight_transport={transport!r}: generation.sglang.args.{key}={value!r} makes ranks that are "
                "not sent to; start more servers with generation.servers, or use weight_transport=disk"
            )


def _logging(config: ExperimentConfig) -> Iterator[str]:
    project = config.logging.wandb_project
    if project and importlib.util.find_spec("wandb") is None:
        yield (
            f"logging.wandb_project={project!r}: wandb is not installed; install the `tracking` extra, or leave "
            "it empty"
        )


def _system(config: ExperimentConfig) -> Iterator[str]:
    system = config.system
    if system.name_resolve == "etcd3":
        if not system.name_resolve_root:
            yield "system.name_resolve_root='': name_resolve=etcd3 needs the server's address; give host:port"
        if importlib.util.find_spec("etcd3") is None:
            yield "system.name_resolve='etcd3': etcd3 is not installed; install the `etcd` extra, or use file"


_RULES = (_batches, _sampling, _model, _plugins, _algorithms, _generation_backend, _weight_transport, _logging, _system)
