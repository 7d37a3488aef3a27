"""Checks of the environment's settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from asyncrl.api.reward import RunIn
from asyncrl.config.plugin_code import interfaces
from asyncrl.config.plugin_code.import_paths import path_problems
from asyncrl.plugins.envs.settings import GYMNASIUM, GYMNASIUM_ENV, EnvConfig

_GYMNASIUM_VECTOR = "asyncrl.plugins.envs.gymnasium_vector:VectorGames"


def check(env: EnvConfig) -> Iterator[str]:
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


def code_problems(env: EnvConfig) -> Iterator[str]:
    """Yield an error message for each problem of the environment's code, which is imported."""
    if not env.path.startswith(GYMNASIUM):
        yield from interfaces.environment_problems("env", env.path, env.args)
    elif env.vectorized:
        yield from interfaces.problems("env", _GYMNASIUM_VECTOR, env.args, supplied=("id",), positional=2)
    else:
        yield from interfaces.problems("env", GYMNASIUM_ENV, env.args, supplied=("id", "reward"))
