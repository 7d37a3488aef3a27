"""Rewards from a server: your own over HTTP, or a judge model over any OpenAI-compatible API.

Failures that may pass (no connection, a time limit, 408, 429, 5xx) are retried with growing waits, three attempts in
all.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.api import run_in
from asyncrl.comm.http.calls import HttpError, HttpRefused, JsonHttp
from asyncrl.comm.waits.backoff import Backoff

ATTEMPTS = 3
_BACKOFF = Backoff(0.5, 5.0)
_PASSING = (408, 429)


class _Scored(msgspec.Struct):
    reward: float


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _ChatReply(msgspec.Struct):
    choices: list[_Choice]


class _Server:
    """A server with an optional key; failed requests are repeated."""

    def __init__(self, url: str, api_key_env: str | None, timeout_s: float) -> None:
        if not re.match(r"https?://\S+$", url):
            raise ValueError(f"url is {url!r}; give one that begins with http:// or https://")
        if api_key_env is not None and api_key_env not in os.environ:
            raise ValueError(f"api_key_env is {api_key_env!r}, and there is no such environment variable")
        self._url, self._timeout_s = url, timeout_s
        self._http = JsonHttp(None, key=os.environ[api_key_env] if api_key_env is not None else None)

    async def ask(self, body: dict[str, Any], reply: type[Any]) -> Any:
        """Return the reply to `body`.

        Raises:
            HttpError: refused, or failed `ATTEMPTS` times.
        """
        for failures in range(1, ATTEMPTS + 1):
            try:
                return await self._http.call("POST", self._url, body, timeout_s=self._timeout_s, reply=reply)
            except HttpError as error:
                refused = isinstance(error, HttpRefused) and error.status < 500 and error.status not in _PASSING
                if refused or failures == ATTEMPTS:
                    raise
            await asyncio.sleep(_BACKOFF.delay(failures))
        raise AssertionError("the last attempt returns or raises")


@run_in("loop")
class HttpReward:
    """Reward from your server: `POST url` with `{"data": row, "completion": text}` answers `{"reward": number}`.

    Args:
        url: URL of the server.
        api_key_env: environment variable with the bearer token, if the server needs one.
        request_timeout_s: limit of one attempt. `reward.timeout_s` limits all attempts together.

    Raises:
        ValueError: no URL, or no such environment variable.
    """

    def __init__(self, *, url: str, api_key_env: str | None = None, request_timeout_s: float = 20.0) -> None:
        self._server = _Server(url, api_key_env, request_timeout_s)

    async def __call__(self, data: Mapping[str, Any], completion: str) -> float:
        """Return the server's reward.

        Raises:
            HttpError: the server did not return one.
        """
        scored: _Scored = await self._server.ask({"data": dict(data), "completion": completion}, _Scored)
        return scored.reward


@run_in("loop")
class JudgeReward:
    """Reward from a language model that judges the answer, over `<base_url>/chat/completions`.

    Args:
        base_url: URL of the server, with its `/v1`.
        model: name of the model there.
        template: the question to the judge; `{completion}` and the row's fields in braces are filled in.
        pattern: a regular expression whose first group is the score in the judge's answer; the last match counts.
        max_score: best score; the score is clipped to 0 and `max_score`, then divided by `max_score`.
        api_key_env: environment variable with the key, if the server needs one.
        max_tokens, temperature: sampling of the judge's answer.
        request_timeout_s: limit of one attempt. `reward.timeout_s` limits all attempts together.

    Raises:
        ValueError: there is no URL or no such environment variable, `pattern` has no group, or `max_score` is not above
            0.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        template: str,
        pattern: str = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)",
        max_score: float = 10.0,
        api_key_env: str | None = None,
        max_tokens: int = 512,
        temperature: float = 0.0,
        request_timeout_s: float = 50.0,
    ) -> None:
        self._server = _Server(f"{base_url.rstrip('/')}/chat/completions", api_key_env, request_timeout_s)
        if max_score <= 0:
            raise ValueError(f"max_score is {max_score}; give a number above 0")
        if "{completion}" not in template:
            raise ValueError("template has no {completion}: the judge would not see the answer")
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
        if self._pattern.groups < 1:
            raise ValueError(f"pattern {pattern!r} has no group; put the score in parentheses")
        self._template, self._max_score = template, max_score
        self._asked = {"model": model, "max_tokens": max_tokens, "temperature": temperature}

    async def __call__(self, data: Mapping[str, Any], completion: str) -> float:
        """Return the judge's score, from 0 to 1.

        Raises:
            HttpError: the judge gave no answer.
            ValueError: the answer contains no score.
        """
        question = _filled(self._template, {**data, "completion": completion})
        body = self._asked | {"messages": [{"role": "user", "content": question}]}
        reply: _ChatReply = await self._server.ask(body, _ChatReply)
        text = (reply.choices[0].message.content or "") if reply.choices else ""
        scores = [match[1] for match in self._pattern.finditer(text)]
        if not scores:
            raise ValueError(f"the judge's answer holds no score ({self._pattern.pattern}): {text[-200:]!r}")
        return min(max(float(scores[-1]), 0.0), self._max_score) / self._max_score


def _filled(template: str, fields: Mapping[str, Any]) -> str:
    """Return `template` with each `{name}` of `fields` replaced once, so braces in an answer stay unchanged."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in fields:
            raise ValueError(f"the judge's template names {{{match[1]}}}, and the row has no such field")
        found = fields[match[1]]
        return found if isinstance(found, str) else json.dumps(found, default=str)

    return re.sub(r"\{(\w+)\}", value, template)
