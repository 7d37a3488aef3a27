"""Runs environments of the `verifiers` package; a separate program, in the environment where that package is installed.

`asyncrl.plugins.agents.verifiers_env` starts it and speaks to it in lines of JSON, requests on standard input, replies
on standard output; what environments print goes to standard error. It ends with its standard input: it cancels the
rollouts in progress, whose containers, sandboxes and folders `verifiers` then frees. It imports nothing of asyncrl,
whose dependencies need not be there.

    {"env": ..., "args": ...}                       first: what to load          -> {"ready": true} or {"error": ...}
    {"id": 1, "run": 17, "split": "train", "base_url": ..., "api_key": ...}      -> {"id": 1, "reward": ..., ...}
    {"cancel": 1}                                   its result is no longer needed

A process that is asked for rows in its first line answers with them and ends. It starts none of the environment's
servers.

    {"env": ..., "args": ..., "rows": ["train"]}                         -> {"train": {"rows": [{"prompt": ...}]}}
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import functools
import importlib
import inspect
import itertools
import json
import math
import os
import sys
import threading
import traceback
import types
from collections.abc import AsyncIterator, Callable, Mapping
from types import ModuleType
from typing import Any, Protocol

EMPTY_ANSWER = "EmptyModelResponseError"
"""verifiers' error for an answer without text and calls. It is the model's fault: reward 0, not a failed episode."""
MODEL = "policy"
END_LIMIT_S = 7.0
"""Longest time, in s, to free what rollouts hold once the input has ended: less than supervisors leave for that."""
RUBRIC_FAILED = "rubric_failed/"
"""Beginning of the metrics of functions of the rubric that have raised so far: 1 if one raised in this rollout."""


class NoRows(ValueError):
    """The environment has no rows of a split, which is nothing wrong unless somebody needs them."""


class EnvironmentWorld(Protocol):
    """An environment of either API."""

    def serving(self, *, rollouts: bool = True) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold what the environment has within this block, for `rollouts` its servers too."""
        ...

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Return the rows of a split.

        Raises:
            NoRows: it has none.
        """
        ...

    async def run(self, row: int, split: str, base_url: str, api_key: str) -> dict[str, Any]:
        """Roll out one row: `reward`, its `parts` and `metrics`, or `runs` with these of each agent's run."""
        ...


Load = Callable[[str, Mapping[str, Any]], EnvironmentWorld]


class Classic:
    """Environments of verifiers 0.2: `load_environment()` makes a `verifiers.Environment`."""

    def __init__(self, env: str, args: Mapping[str, Any]) -> None:
        import openai
        import verifiers
        from verifiers.clients.openai_chat_completions_client import OpenAIChatCompletionsClient

        self._make_client = OpenAIChatCompletionsClient
        self._shared = openai.AsyncOpenAI(base_url="http://unset", api_key="unset", max_retries=0, timeout=None)
        if env.endswith(".py"):
            module = module_of(env)
            self._env = module.load_environment(**args)
        else:
            self._env = verifiers.load_environment(env, **args)
        if self._env.requires_group_rollouts or self._env.provides_advantages:
            raise ValueError("its rubric scores groups, or gives advantages: rewards of single rollouts are needed")
        rubric = self._env.rubric
        self._failed: contextvars.ContextVar[set[str]] = contextvars.ContextVar("failed")
        self._failing: set[str] = set()
        for each in getattr(rubric, "rubrics", [rubric]):
            each.funcs = [self._noting(function) for function in each.funcs]
        self._weights = dict(zip(rubric._get_reward_func_names(), rubric._get_reward_weights(), strict=True))
        self._tables: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def serving(self, *, rollouts: bool = True) -> AsyncIterator[None]:
        yield
        await self._env._teardown()

    def rows(self, split: str) -> list[dict[str, Any]]:
        table = self._table(split)
        return [{"prompt": plain(prompt)} for prompt in table["prompt"]]

    async def run(self, row: int, split: str, base_url: str, api_key: str) -> dict[str, Any]:
        client = self._make_client(self._shared.with_options(base_url=base_url, api_key=api_key))
        failed: set[str] = set()
        self._failed.set(failed)  # this task runs one rollout
        made = await self._env.run_rollout(self._table(split)[row], client, MODEL, {})
        if error := made.get("error"):
            if error.get("error") == EMPTY_ANSWER:
                return {
                    "reward": 0.0,
                    "parts": {name: 0.0 for name, weight in self._weights.items() if weight},
                    "metrics": {"empty_answer": 1.0},
                }
            raise RuntimeError(f"the rollout failed: {json.dumps(error, default=str)[:2000]}")
        values = {name: float(value) for name, value in (made.get("metrics") or {}).items() if value is not None}
        parts = {name: value for name, value in values.items() if self._weights.get(name)}
        metrics = {name: value for name, value in values.items() if name not in parts}
        self._failing |= failed
        metrics |= {f"{RUBRIC_FAILED}{name}": float(name in failed) for name in sorted(self._failing)}
        return {"reward": float(made["reward"]), "parts": parts, "metrics": metrics}

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` of a rubric with a note of its failures, which the rubric counts as 0."""

        @functools.wraps(function)
        async def noting(*args: Any, **kwargs: Any) -> Any:
            try:
                value = function(*args, **kwargs)
                value = await value if inspect.isawaitable(value) else value
                if not math.isfinite(float(value)):
                    raise ValueError(f"a function of the rubric returned {value!r}")
                return value
            except Exception:
                self._failed.get(set()).add(getattr(function, "__name__", repr(function)))
                traceback.print_exc()
                raise

        return noting

    def _table(self, split: str) -> Any:
        if split not in self._tables:
            if split == "train":
                table = self._env.get_dataset()
            else:
                self._env.build_eval_dataset()
                if self._env.eval_dataset is None:
                    raise NoRows("it has no eval_dataset; give eval.path another set, or use eval.interval=0")
                table = self._env.get_eval_dataset()
            self._tables[split] = table
        return self._tables[split]


class V1:
    """Environments of verifiers 0.4: a taskset by its module, with the config of its environment.

    The requests of each agent's run carry a header `X-Session-ID` with the id of its trace, which tells them apart.
    """

    def __init__(self, env: str, args: Mapping[str, Any]) -> None:
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.configs import client as client_configs
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.types import SamplingConfig
        from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

        self._client, self._context, self._sampling = EvalClientConfig, ModelContext, SamplingConfig
        # Keys by the name of a variable that only verifiers' clients see: processes of episodes would inherit others.
        self._keys: dict[str, str] = {}
        self._numbers = itertools.count()
        client_configs.os = types.SimpleNamespace(environ=collections.ChainMap(self._keys, os.environ))
        # Harnesses call uv, which is installed beside this interpreter; any other python stays the one that is found.
        os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:{os.path.dirname(sys.executable)}"
        if env.endswith(".py"):
            sys.path.insert(0, os.path.dirname(os.path.abspath(env)))
            env = os.path.splitext(os.path.basename(env))[0]
        config = {**args, "taskset": {**args.get("taskset", {}), "id": env}}
        fields = env_config_type(env, config.get("id", "")).model_fields
        self._agents = [name for name, field in fields.items() if isinstance(field.default, AgentConfig)]
        for name in self._agents:  # agents run on this machine unless a setting names another place
            config[name] = {"runtime": {"type": "subprocess"}, **config.get(name, {})}
        self._env = load_environment(resolve_env_config(config))
        self._tasks = list(self._env.taskset)

    def serving(self, *, rollouts: bool = True) -> contextlib.AbstractAsyncContextManager[None]:
        serving: contextlib.AbstractAsyncContextManager[None] = self._env.serving()
        return serving if rollouts else contextlib.nullcontext()

    def rows(self, split: str) -> list[dict[str, Any]]:
        if split != "train":
            raise NoRows(
                "a taskset has no held-out rows; give eval.path one of its own, whose eval.args say split: train, or "
                "use eval.interval=0"
            )
        named = [(task.data.prompt, task.data.name or f"task {number}") for number, task in enumerate(self._tasks)]
        return [{"prompt": plain(prompt) or name} for prompt, name in named]  # some environments speak first

    async def run(self, row: int, split: str, base_url: str, api_key: str) -> dict[str, Any]:
        variable = f"ASYNCRL_KEY_{next(self._numbers)}"
        self._keys[variable] = api_key
        try:
            client = self._client(base_url=base_url, api_key_var=variable)
            context = self._context(model=MODEL, client=client, sampling=self._sampling())
            episode = await self._env.run_episode(self._tasks[row], context)
        finally:
            del self._keys[variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or not episode.traces:
            reasons = "; ".join(f"{error.type}: {error.message}" for error in errors) or "no agent ran"
            raise RuntimeError(f"the episode failed: {reasons[:2000]}")
        return {"runs": [self._described(trace) for trace in episode.traces]}

    def _described(self, trace: Any) -> dict[str, Any]:
        scored = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        return {
            "trace": trace.id,
            "agent": trace.agent.name if len(self._agents) > 1 else "",
            "trained": trace.agent.trainable,
            "reward": float(trace.reward),
            "parts": {name: reward.score for name, reward in scored.items() if reward.weight},
            "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
        }


def module_of(path: str) -> ModuleType:
    """Return the module in the file `path`."""
    path = os.path.abspath(path)
    sys.path.insert(0, os.path.dirname(path))
    return importlib.import_module(os.path.splitext(os.path.basename(path))[0])


def plain(prompt: Any) -> Any:
    """Return a prompt as text, or as messages of plain values."""
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    messages = [message if isinstance(message, dict) else message.model_dump() for message in prompt]
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def rows_of(world: EnvironmentWorld, split: str) -> dict[str, Any]:
    """Return the `rows` of a split, or the `error` instead."""
    try:
        return {"rows": world.rows(split)}
    except NoRows as error:
        return {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def of_verifiers(env: str, args: Mapping[str, Any]) -> EnvironmentWorld:
    """Return the environment, of the API that the installed package has."""
    import verifiers

    return Classic(env, args) if hasattr(verifiers, "load_environment") else V1(env, args)


async def serve(requests: asyncio.Queue[Any], reply: Callable[[Mapping[str, Any]], None], load: Load) -> None:
    """Answer `requests` to what `load` returns until None comes."""
    first = await requests.get()
    if first is None:
        return
    try:
        world = load(first["env"], first["args"])
    except Exception as error:
        traceback.print_exc()
        reply({"error": f"{type(error).__name__}: {error}"})
        return
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(request: Mapping[str, Any]) -> None:
        try:
            found = await world.run(request["run"], request["split"], request["base_url"], request["api_key"])
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        reply({"id": request["id"], **found})

    def forget(number: int, _: object) -> None:
        del running[number]

    async with world.serving(rollouts="rows" not in first):
        if "rows" in first:
            reply({split: rows_of(world, split) for split in first["rows"]})
            return
        reply({"ready": True})
        while (request := await requests.get()) is not None:
            if "cancel" in request:
                if task := running.get(request["cancel"]):
                    task.cancel()
                continue
            task = asyncio.create_task(answer(request))
            running[request["id"]] = task
            task.add_done_callback(functools.partial(forget, request["id"]))
        for task in list(running.values()):
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


def main(load: Load = of_verifiers) -> None:
    """Serve requests from standard input; this process alone uses its standard input and output."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)

    def leave_pipes() -> None:
        """In a forked process, which may outlive this one: its copies would keep the other end waiting for output."""
        for pipe in (incoming, outgoing):
            os.dup2(null, pipe.fileno(), inheritable=False)

    os.register_at_fork(after_in_child=leave_pipes)

    def reply(message: Mapping[str, Any]) -> None:
        outgoing.write(json.dumps(message, default=str).encode() + b"\n")
        outgoing.flush()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        requests: asyncio.Queue[Any] = asyncio.Queue()

        def read() -> None:
            for line in incoming:
                loop.call_soon_threadsafe(requests.put_nowait, json.loads(line))
            threading.Timer(END_LIMIT_S, os._exit, (1,)).start()  # if the running rollouts do not end
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(requests.put_nowait, None)

        threading.Thread(target=read, daemon=True).start()
        await serve(requests, reply, load)

    with contextlib.suppress(BrokenPipeError):
        asyncio.run(run())
    os._exit(0)  # without waiting for threads of environments


if __name__ == "__main__":
    main()
