"""An agent in a process of the pool. Its `run` is called there; environment and policy stay in the worker.

Contains both ends of the protocol between them.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncrl.api import (
    ChatClient,
    ChatReply,
    Environment,
    GenerationRequest,
    GenerationResult,
    Prompt,
    Sample,
    SamplingParams,
)
from asyncrl.api.agent import agent_of, taken_by
from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.api.trajectory import check_group
from asyncrl.comm.typed import convert
from asyncrl.config.plugin_code.import_paths import load_plugin
from asyncrl.data.picture_parts import with_content
from asyncrl.data.tokenizers import load_tokenizer

Ask = Callable[..., Any]
"""Ask the worker by name, positional arguments and keyword arguments; returns its answer."""


class ChildAgent:
    """The agent, in its process; for one episode after the other.

    Args:
        path, args: its class or function, and the keyword arguments.
        model: folder of the tokenizer.
        chat: whether there is a chat template.
        ask: asks the worker.
    """

    def __init__(self, path: str, args: Mapping[str, Any], model: str, chat: bool, ask: Ask) -> None:
        found: Any = load_plugin(path)
        offered: dict[str, Any] = {"tokenizer": load_tokenizer(model), "chat": chat}
        is_class = inspect.isclass(found)
        agent: Any = found(**taken_by(found, offered), **args) if is_class else agent_of(found, args, **offered)
        self._run = agent.run
        self._ask = ask

    def run(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """Run one episode and return its outcome in the form that `outcome_of` reads."""
        outcome = self._run(convert(prompt, Prompt), _Env(self._ask), _Client(self._ask))
        if isinstance(outcome, Real):
            return {"reward": float(outcome)}
        samples = [outcome] if isinstance(outcome, Sample) else list(outcome or ())
        if not all(isinstance(sample, Sample) for sample in samples):
            raise TypeError(f"returned {outcome!r:.80}; return a Sample, several, or none to reject the prompt")
        return {"samples": samples}


class _Asking:
    def __init__(self, ask: Ask) -> None:
        self._ask, self._in_turn = ask, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"an agent in a process cannot ask for {name!r}; set agent.run_in=thread")

    def _asked(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self._in_turn:
            return self._ask(name, list(args), kwargs)


class _Env(_Asking):
    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        return tuple(self._asked("reset", seed=seed, options=options))

    def step(self, action: Any) -> tuple[Any, ...]:
        return tuple(self._asked("step", action))


class _Client(_Asking):
    def __init__(self, ask: Ask, group: str = "", policy: str = "") -> None:
        super().__init__(ask)
        self._group, self._policy = group, policy

    def _asked(self, name: str, *args: Any, **kwargs: Any) -> Any:
        own = {key: value for key, value in (("group", self._group), ("policy", self._policy)) if value}
        return super()._asked(name, *args, **own, **kwargs)

    def conversation(self, group: str) -> _Client:
        check_group(group)
        return _Client(self._ask, group, self._policy)

    def policy(self, name: str) -> _Client:
        return _Client(self._ask, policy=name)

    def generate(self, request: GenerationRequest) -> GenerationResult:
        return convert(self._asked("generate", request), GenerationResult)

    def chat(self, messages: Sequence[Mapping[str, Any]], **others: Any) -> ChatReply:
        return convert(self._asked("chat", [*map(with_content, messages)], **others), ChatReply)

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], **others: Any) -> tuple[int, ...]:
        return tuple(self._asked("prompt_ids", [*map(with_content, messages)], **others))

    def samples(self, reward: float = 0.0) -> list[Sample]:
        return [_sample_of(raw) for raw in self._asked("samples", reward)]

    def all_samples(self, reward: float = 0.0) -> list[Sample]:
        return [_sample_of(raw) for raw in self._asked("all_samples", reward)]

    def endpoint(self, group: str = "") -> SimpleNamespace:
        client = self.conversation(group) if group else self
        return SimpleNamespace(**client._asked("endpoint"))


async def answer(env: Environment, client: ChatClient, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Answer a request of the agent's process: call a method of its environment or of its client."""
    if name in ("reset", "step"):
        return await getattr(env, name)(*args, **kwargs)
    if "policy" in kwargs:
        client = client.policy(kwargs.pop("policy"))
    if "group" in kwargs:
        client = client.conversation(kwargs.pop("group"))
    if name == "generate":
        return await client.generate(convert(args[0], GenerationRequest))
    if name == "endpoint":
        session = await client.endpoint()  # type: ignore[attr-defined]
        return {"base_url": session.base_url, "root_url": session.root_url, "api_key": session.api_key}
    if kwargs.get("sampling") is not None:
        kwargs["sampling"] = convert(kwargs["sampling"], SamplingParams)
    if name == "chat":
        return await client.chat(*args, **kwargs)
    if name == "all_samples":
        return client.all_samples(*args)
    return client.samples(*args) if name == "samples" else client.prompt_ids(*args, **kwargs)


def outcome_of(raw: Mapping[str, Any]) -> float | list[Sample]:
    """Decode the outcome that `ChildAgent.run` returned."""
    if "reward" in raw:
        return float(raw["reward"])
    return [_sample_of(sample) for sample in raw["samples"]]


def _sample_of(raw: Mapping[str, Any]) -> Sample:
    rewards = raw["token_rewards"]
    return Sample(
        np.array(raw["tokens"], np.int32),
        np.array(raw["loss_mask"], np.uint8),
        np.array(raw["behave_logprobs"], np.float32),
        np.array(raw["versions"], np.int32),
        raw["reward"],
        raw["truncated"],
        raw["episode"],
        None if rewards is None else np.array(rewards, np.float32),
        raw["reward_parts"],
        raw["metrics"],
        token_columns={name: np.array(column, np.float32) for name, column in raw["token_columns"].items()},
        pictures=convert(raw["pictures"], tuple[PlacedPicture, ...]),
        group=raw["group"],
        frames=convert(raw["frames"], tuple[Picture, ...]),
    )
