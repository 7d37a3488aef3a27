"""Checks of the settings of the environment, the rewards, the tools and the MCP servers, and of the code they name.

The code is imported for that, and not called.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
from collections.abc import Iterator

from asyncrl.api.reward import RunIn
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code import interfaces
from asyncrl.config.plugin_code.import_paths import PluginError, load_plugin, path_problems
from asyncrl.plugins.settings import (
    GYMNASIUM,
    GYMNASIUM_ENV,
    ROW_METRICS,
    EnvConfig,
    RewardConfig,
)

_GYMNASIUM_VECTOR = "asyncrl.plugins.envs.gymnasium_vector:VectorGames"


def check_env(env: EnvConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting of `env`."""
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
        yield from path_problems("env", env.path)
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


def env_code_problems(env: EnvConfig) -> Iterator[str]:
    """Yield an error message for each problem of the environment's code, which is imported."""
    if not env.path.startswith(GYMNASIUM):
        yield from interfaces.environment_problems("env", env.path, env.args)
    elif env.vectorized:
        yield from interfaces.problems("env", _GYMNASIUM_VECTOR, env.args, supplied=("id",), positional=2)
    else:
        yield from interfaces.problems("env", GYMNASIUM_ENV, env.args, supplied=("id", "reward"))


_FORMS_ELSEWHERE = {"TRL's": {"completions"}, "verl's": {"solution_str", "data_source"}}
"""Parameters that show that a reward was written for another system."""


def check_rewards(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting of `reward` and `rewards`."""
    if not config.rewards:
        yield from _reward("reward", config.reward)
        return
    if config.reward != RewardConfig():
        yield "reward: set together with rewards, which replace it; write it as one of them"
    names: set[str] = set()
    mixed = [source.name or source.path for source in config.dataset.sources]
    if all(part.sources for part in config.rewards):
        scored = {source for part in config.rewards for source in part.sources}
        for source in (source for source in mixed if source not in scored):
            yield (
                f"rewards: rows of dataset.sources {source!r} have none; name it in the sources of one, or leave those "
                "of one empty, which is for all"
            )
    for number, part in enumerate(config.rewards):
        group = f"rewards[{number}]"
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", part.name) or part.name in ROW_METRICS or part.name in names:
            yield (
                f"{group}.name={part.name!r}: names the metric reward/<name>; give each of the rewards another one, of "
                f"letters, digits, '_', '.' and '-', none of {', '.join(ROW_METRICS)}"
            )
        names.add(part.name)
        if strays := sorted({*part.sources} - {*mixed}) if mixed else ():
            yield (
                f"{group}.sources={part.sources}: {strays[0]!r} is not a name of dataset.sources, which are "
                f"{', '.join(mixed)}"
            )
        if not math.isfinite(part.weight):
            yield f"{group}.weight={part.weight}: no factor; give a finite number"
        if part.timeout_s <= 0:
            yield f"{group}.timeout_s={part.timeout_s}: no time to return in; use 0.01 s or more"
        yield from _reward(group, part)


def _reward(group: str, reward: RewardConfig) -> Iterator[str]:
    if reward.failure_reward is not None and not math.isfinite(reward.failure_reward):
        yield f"{group}.failure_reward={reward.failure_reward}: no reward; give a finite number, or null"
    yield from path_problems(group, reward.path)


def reward_code_problems(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each problem of the rewards' code, which is imported."""
    if not config.rewards:
        yield from _reward_code("reward", config.reward)
    for number, part in enumerate(config.rewards):
        yield from _reward_code(f"rewards[{number}]", part)


def _reward_code(group: str, reward: RewardConfig) -> Iterator[str]:
    try:
        found = load_plugin(reward.path)
    except PluginError as error:
        yield f"{group}.path={error}"
        return
    positional = 0  # a class: its constructor takes none
    if callable(found) and not inspect.isclass(found):  # the name of a function's first parameter shows what it scores
        taken = interfaces.names(found)
        for whose, telling in _FORMS_ELSEWHERE.items():
            if not telling.isdisjoint(taken):
                yield (
                    f"{group}.path={reward.path!r}: it has the form of {whose} rewards ({', '.join(taken)}); here a "
                    "reward is `def score(data, completion) -> float`, called for each answer, where `data` is the "
                    "dataset's row; or `def score(group)`, which returns a number for each answer of a prompt's group"
                )
                return
        positional = 1 if taken[:1] in (("episode",), ("group",)) else 2
    yield from interfaces.call_problems(group, reward.path, found, reward.args, positional=positional)
