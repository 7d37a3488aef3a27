"""Agents without any asyncrl code: functions that get the address of the policy's OpenAI API and call the policy there.

    from openai import AsyncOpenAI

    async def run(prompt, base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as policy:
            answer = await policy.chat.completions.create(model="policy", messages=[{"role": "user", "content": ...}])
        return answer.choices[0].message.content        # or a number: the episode's reward

Any client or framework works that uses chat completions, responses or Anthropic's messages; docs/endpoint.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from asyncrl.api import Agent, Environment, Outcome, Prompt
from asyncrl.config.plugin_code.import_paths import load_plugin


class OpenAIAgent(Agent):
    """An episode is a call of your function `run(prompt, base_url, api_key)`, asynchronous or not.

    The function returns the episode's reward, a number; or its answer, a text, which the environment then scores like
    other agents' answers (so that `reward` and `rewards` apply); or None, which rejects the episode. Every conversation
    that it had with the policy becomes a sample with that reward. A plain `def` runs in a thread.

    Args:
        tokenizer: the run's tokenizer; not needed.
        run: import path of the function, or of a class whose instances are called in the same way.
        args: further keyword arguments of the function, or of the class's constructor.
    """

    def __init__(self, *, tokenizer: object = None, run: str, args: Mapping[str, Any] | None = None) -> None:
        self._function, self._args = _loaded(run, dict(args or {}))
        # Code of the user is called from here, so the place depends on the user's module and function.
        self.__module__ = self._function.__module__
        if not _is_async(self._function):
            self.run = self._run_blocking  # type: ignore[assignment, method-assign]

    async def run(self, prompt: Prompt, env: Environment, client: Any) -> Outcome:
        """See the class."""
        session = await client.endpoint()
        result = await self._function(prompt, session.base_url, session.api_key, **self._args)
        if not isinstance(result, str):
            return _reward(result)
        await env.reset(options={"data": prompt.data})
        return float((await env.step(result))[1])

    def _run_blocking(self, prompt: Prompt, env: Any, client: Any) -> Outcome:
        session = client.endpoint()
        result = self._function(prompt, session.base_url, session.api_key, **self._args)
        if not isinstance(result, str):
            return _reward(result)
        env.reset(options={"data": prompt.data})
        return float(env.step(result)[1])


def _loaded(path: str, args: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Load the function at `path`; return it with its remaining arguments."""
    found = load_plugin(path)
    if inspect.isclass(found):
        made = found(**args)
        if not callable(made):
            raise TypeError(f"run={path!r}: instances of {found.__name__} are not callable; give it a __call__")
        found, args = made, {}
    try:
        inspect.signature(found).bind(None, "", "", **args)
    except TypeError as error:
        raise TypeError(f"run={path!r} is to take (prompt, base_url, api_key) and args: {error}") from None
    return found, args


def _is_async(function: Callable[..., Any]) -> bool:
    called = function if inspect.isroutine(function) else type(function).__call__
    return inspect.iscoroutinefunction(called)


def _reward(result: object) -> float | None:
    if result is None:
        return None
    if isinstance(result, Real):
        return float(result)
    raise TypeError(f"the episode returned {result!r:.80}; return its reward, its answer as text, or None to reject it")
