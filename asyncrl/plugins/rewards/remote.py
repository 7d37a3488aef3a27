"""Rewards from a server: your own over HTTP, or a judge model over any OpenAI-compatible API.

Failures that may pass (no connection, a time limit, 408, 429, 5xx) are retried with growing waits, `ATTEMPTS` in all.
If the server says when it takes calls again (`Retry-After`), all calls wait until then, which counts as no attempt.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.api import run_in, without_thoughts
from asyncrl.comm.http_client import HttpError, HttpRefused, JsonHttp
from asyncrl.comm.waits import Backoff

ATTEMPTS = 5
MOST_PAUSES = 100
"""Times that a call is put off by a server that says when to come back."""
MOST_PAUSE_S = 600.0
"""Longest pause in seconds that a server may ask for; beyond it the call fails."""
SCORE = (
    r"(?i)(?<![a-z])scores?(?:\s*\(\s*\d+\s*(?:-|\u2013|to)\s*\d+\s*\))?(?:\s+(?:is|of|was))?"
    r"\W{0,12}?(-?\d+(?:[.,]\d+)?)(?:\W{0,4}(?:/|out of)\s*(?P<of>\d+))?"
)
"""A score in a judge's answer: `Score: 7.5`, `**Score:** 8`, `score = 8/10`, `{"score": 8}`."""
_BACKOFF = Backoff(0.5, 20.0)
_PASSING = (408, 429)


class _Scored(msgspec.Struct):
    reward: float


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _ChatReply(msgspec.Struct):
    choices: list[_Choice]


class _Server:
    """A server with an optional key; failed requests are repeated, and at most `max_concurrent` run at a time."""

    def __init__(self, url: str, api_key_env: str | None, timeout_s: float, max_concurrent: int) -> None:
        if not re.match(r"https?://\S+$", url):
            raise ValueError(f"url is {url!r}; give one that begins with http:// or https://")
        if api_key_env is not None and api_key_env not in os.environ:
            raise ValueError(f"api_key_env is {api_key_env!r}, and there is no such environment variable")
        if max_concurrent < 1:
            raise ValueError(f"max_concurrent is {max_concurrent}; give at least 1")
        self._url, self._timeout_s = url, timeout_s
        key = os.environ[api_key_env] if api_key_env is not None else None
        self._http = JsonHttp(None, key=key, proxies=True)
        self._slots, self._not_before = asyncio.Semaphore(max_concurrent), 0.0

    async def ask(self, body: dict[str, Any], reply: type[Any]) -> Any:
        """Return the reply to `body`.

        Raises:
            HttpError: refused, or failed `ATTEMPTS` times.
        """
        failures = pauses = 0
        while True:
            async with self._slots:
                await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
                try:
                    return await self._http.call("POST", self._url, body, timeout_s=self._timeout_s, reply=reply)
                except HttpError as error:
                    pause_s = retry_after_s(error.headers) if isinstance(error, HttpRefused) else None
                    if pause_s is not None and pause_s <= MOST_PAUSE_S and pauses < MOST_PAUSES:
                        pauses += 1
                        self._not_before = max(self._not_before, time.monotonic() + pause_s)
                        continue
                    failures += 1
                    refused = isinstance(error, HttpRefused) and error.status < 500 and error.status not in _PASSING
                    if refused or failures == ATTEMPTS or pause_s is not None:
                        raise
            await asyncio.sleep(_BACKOFF.delay(failures))


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds after which a server takes calls again, from `Retry-After` (seconds or a date) or OpenAI's
    `retry-after-ms`; None if it does not say.
    """
    named = {name.lower(): value.strip() for name, value in headers.items()}
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = named.get(name, "")
        if re.fullmatch(r"\d{1,12}(?:\.\d{1,9})?", value):
            return float(value) * unit
        if value:
            try:
                return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
            except ValueError:
                continue
    return None


@run_in("loop")
class HttpReward:
    """Reward from your server: `POST url` with `{"data": row, "completion": text}` answers `{"reward": number}`.

    Args:
        url: URL of the server.
        api_key_env: environment variable with the bearer token, if the server needs one.
        request_timeout_s: limit of one attempt. `reward.timeout_s` limits all attempts and waits together.
        max_concurrent: calls at a time of a RolloutWorker; others wait.

    Raises:
        ValueError: no URL, or no such environment variable.
    """

    def __init__(
        self, *, url: str, api_key_env: str | None = None, request_timeout_s: float = 20.0, max_concurrent: int = 64
    ) -> None:
        self._server = _Server(url, api_key_env, request_timeout_s, max_concurrent)

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
        template: the question to the judge; `{completion}`, the answer behind its thoughts, `{thoughts}`, the whole
            answer with them, and the row's fields in braces are filled in.
        pattern: a regular expression whose first group is the score in the judge's answer; the last match counts, and
            thoughts of the judge do not. A group named `of` is the best score of that scale.
        max_score: best score; the score is clipped to 0 and `max_score`, then divided by `max_score`.
        api_key_env: environment variable with the key, if the server needs one.
        max_tokens, temperature: sampling of the judge's answer; None leaves the field out of the request.
        body: further fields of the request, such as `{max_completion_tokens: 2000, reasoning_effort: low}`.
        request_timeout_s: limit of one attempt. `reward.timeout_s` limits all attempts and waits together.
        max_concurrent: calls at a time of a RolloutWorker; others wait.

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
        pattern: str = SCORE,
        max_score: float = 10.0,
        api_key_env: str | None = None,
        max_tokens: int | None = 512,
        temperature: float | None = 0.0,
        body: Mapping[str, Any] | None = None,
        request_timeout_s: float = 50.0,
        max_concurrent: int = 16,
    ) -> None:
        url = f"{base_url.rstrip('/')}/chat/completions"
        self._server = _Server(url, api_key_env, request_timeout_s, max_concurrent)
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
        named = {"model": model, "max_tokens": max_tokens, "temperature": temperature, **(body or {})}
        self._asked = {name: value for name, value in named.items() if value is not None}

    def check_row(self, data: Mapping[str, Any]) -> None:
        """Raise ValueError if the template names a field that the row has not."""
        self._question(data, "")

    async def __call__(self, data: Mapping[str, Any], completion: str) -> float:
        """Return the judge's score, from 0 to 1.

        Raises:
            HttpError: the judge gave no answer.
            ValueError: the answer contains no score.
        """
        body = self._asked | {"messages": [{"role": "user", "content": self._question(data, completion)}]}
        try:
            reply: _ChatReply = await self._server.ask(body, _ChatReply)
        except HttpRefused as error:
            if error.status not in (400, 422):
                raise
            raise ValueError(
                f"{error}; fields of the request: args.max_tokens and args.temperature, which null leaves out, and "
                "args.body"
            ) from error
        choice = reply.choices[0] if reply.choices else None
        text = (choice and choice.message.content) or ""
        if (score := self.score_in(text)) is None:
            cut = ", and was cut off: raise args.max_tokens" if choice and choice.finish_reason == "length" else ""
            raise ValueError(f"the judge's answer holds no score for args.pattern{cut}: {text[-200:]!r}")
        return score

    def score_in(self, text: str | None) -> float | None:
        """Return the score in a judge's answer, from 0 to 1; None without one."""
        scores = list(self._pattern.finditer(without_thoughts(text or "")))
        if not scores:
            return None
        last, best = scores[-1], self._max_score
        if "of" in self._pattern.groupindex and float(last["of"] or 0) > 0:
            best = float(last["of"])
        return min(max(float(last[1].replace(",", ".")) / best, 0.0), 1.0)

    def _question(self, data: Mapping[str, Any], completion: str) -> str:
        return _filled(self._template, {"thoughts": completion, **data, "completion": without_thoughts(completion)})


def _filled(template: str, fields: Mapping[str, Any]) -> str:
    """Return `template` with each `{name}` of `fields` replaced once, so braces in an answer stay unchanged."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in fields:
            raise ValueError(f"the judge's template names {{{match[1]}}}, and the row has no such field")
        found = fields[match[1]]
        return found if isinstance(found, str) else json.dumps(found, default=str)

    return re.sub(r"\{(\w+)\}", value, template)
