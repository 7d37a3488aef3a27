"""What the APIs have in common: a call, its parameters, errors in each API's form, and frames of a stream.

Every parameter of a request belongs to one of four kinds:

- *used*: a field of the API's Struct, which has its type.
- *ignored*: it does not change the meaning of the answer (metadata, caching, tiers, hints).
- *neutral* for values that request nothing (`presence_penalty: 0`), and refused for others.
- unknown, or known and not supported: refused by name. If a parameter were silently left out, an agent would be trained
  on other answers than it asked for.

`null` means the same as a missing parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from asyncrl.api.chat import ChatReply, Message, ToolSchema
from asyncrl.api.generation import SamplingParams
from asyncrl.comm import typed

T = TypeVar("T", bound=msgspec.Struct)

_OPENAI_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error"}
_ANTHROPIC_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class ApiError(Exception):
    """A call that is not served.

    Attributes:
        status: the HTTP status.
        message: what is wrong, and what to do.
        param: the field of the request that is wrong.
        code: a short name of the case.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def openai(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """Return the error in Anthropic's form."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def refused(param: str, value: object, why: str) -> ApiError:
    """Return the error for a request whose `param` asks for something unsupported."""
    return ApiError(400, f"{param}={_shown(value)}: {why}", param=param, code="unsupported_parameter")


def invalid(param: str, why: str) -> ApiError:
    """Return the error for a request whose field `param` is invalid."""
    return ApiError(400, f"{param}: {why}", param=param, code="invalid_value")


class ContextExceeded(ApiError):
    """A conversation that leaves no room for an answer, in the words at which programs of each API shorten theirs.

    Args:
        tokens: the conversation's.
        most: tokens that a conversation may have, its answers included.
    """

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(
            400,
            f"This model's maximum context length is {most} tokens. However, your messages resulted in {tokens} "
            "tokens, which leaves no room for an answer. Please reduce the length of the messages.",
            param="messages",
            code="context_length_exceeded",
        )
        self._of_anthropic = ApiError(400, f"prompt is too long: {tokens} tokens > {most - 1} maximum")

    def anthropic(self) -> dict[str, Any]:
        """Return the error in Anthropic's form; the maximum is that of a prompt, before an answer of one token."""
        return self._of_anthropic.anthropic()


ERROR_HEADERS: Final[Mapping[str, str]] = {"x-should-retry": "false"}
"""Sent with every error: the same call would fail again, as the policy's client has retried already."""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_CACHE: Final = {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
IGNORED_BY_OPENAI: Final = frozenset({"store", "user", "safety_identifier", "service_tier"} | _CACHE)
"""Parameters that are left out in both of OpenAI's APIs."""

_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)


@dataclass(frozen=True)
class SupportedParameters(Generic[T]):
    """The parameters of one API.

    Attributes:
        used: the Struct of a request.
        ignored: names that are left out.
        neutral: for each name, the values that are left out; every other value is refused.
        hints: for each name, what to do instead.
    """

    used: type[T]
    ignored: frozenset[str] = frozenset()
    neutral: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)

    def read(self, body: bytes) -> T:
        """Return the request in `body`.

        Raises:
            ApiError: it is not a JSON object, or a parameter is refused or has the wrong type.
        """
        try:
            given = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
        if not isinstance(given, dict):
            raise ApiError(400, "the body is not a JSON object", code="invalid_json")
        known = {each.encode_name for each in msgspec.structs.fields(self.used)}
        kept = {}
        for name, value in given.items():
            if value is None or name in self.ignored:
                continue
            if name in known:
                kept[name] = value
            elif name not in self.neutral or value not in self.neutral[name]:
                why = "not supported" if name in self.neutral or name in self.hints else "no such parameter here"
                hint = self.hints.get(name, "leave it out")
                raise refused(name, value, f"{why}; {hint}")
        return convert(kept, self.used)


def convert(value: Any, kind: type[T], where: str = "") -> T:
    """Convert `value`, which the request has at `where`, to `kind`.

    Raises:
        ApiError: it is not of that kind; the message names the field.
    """
    try:
        return typed.convert(value, kind)
    except msgspec.ValidationError as error:
        found = _PATH.match(str(error))
        what, path = (found["what"], found["path"] or "") if found else (str(error), "")
        param = ".".join(part for part in (where, path) if part)
        raise ApiError(400, f"{param}: {what}" if param else what, param=param or None, code="invalid_value") from None


MAX_ANSWERS: Final = 128
"""Most answers to one call (`n`), as at OpenAI."""
MAX_STOPS: Final = 16

Json = dict[str, Any]


@dataclass(frozen=True)
class ApiCall:
    """One request.

    Attributes:
        model: the model's name in the request; the answer repeats it.
        messages: the conversation in OpenAI's chat form.
        tools: the tools that may be called, in OpenAI's chat form.
        tool_choice: `auto` or `none`.
        wants_call: whether the request asks for a call, which cannot be enforced.
        left_out_tools: number of tools that the policy cannot have (`NOT_OFFERED`).
        sampling: the request's changes to the session's sampling.
        n: number of answers.
        stream: whether the answer is a stream of events.
        continue_last: whether the answer continues the last message, an assistant's.
        body: the request, for parts that only its API knows.
    """

    model: str
    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    tool_choice: str = "auto"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    stream: bool = False
    continue_last: bool = False
    body: Any = None
    wants_call: bool = False
    left_out_tools: int = 0

    def sampled_by(self, session: SamplingParams) -> SamplingParams:
        """Return the request's sampling parameters, and the session's for those that the request lacks. The session's
        length is a limit.
        """
        own = dict(self.sampling)
        if "max_new_tokens" in own:
            own["max_new_tokens"] = min(own["max_new_tokens"], session.max_new_tokens)
        return replace(session, **own)


class Api(Protocol):
    """One API: how its requests are read, and its answers written."""

    def read(self, body: bytes) -> ApiCall:
        """Return the call in `body`.

        Raises:
            ApiError: it is invalid, or asks for something that is not supported.
        """
        ...

    def answer(self, call: ApiCall, replies: Sequence[ChatReply]) -> Json:
        """Return the whole answer, with `call.n` replies."""
        ...

    def events(self, call: ApiCall, replies: Sequence[ChatReply]) -> Iterator[bytes]:
        """Yield the same answer as a stream."""
        ...

    def error(self, error: ApiError) -> Json:
        """Return the body of an error."""
        ...

    def error_event(self, error: ApiError) -> bytes:
        """Return an error within a stream that has begun. Without it, clients would take the end of the stream for the
        end of the answer.
        """
        ...


def sampling_of(**given: Any) -> Json:
    """Check the parameters that are present in `given` (by the names of `SamplingParams`) and return them.

    Raises:
        ApiError: a value with which sampling is impossible.
    """
    found = {name: value for name, value in given.items() if value is not None}
    for name, low, high in (("temperature", 0.0, math.inf), ("top_p", 1e-6, 1.0), ("min_p", 0.0, 1.0)):
        if name in found and not (math.isfinite(found[name]) and low <= found[name] <= high):
            raise invalid(name, f"{found[name]} is not within {low:g} and {high:g}")
    if found.get("max_new_tokens", 1) < 1:
        raise invalid("max_tokens", f"{found['max_new_tokens']} is not a valid length; give at least 1")
    if "stop" in found:
        stop = found["stop"]
        found["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        if len(found["stop"]) > MAX_STOPS or not all(found["stop"]):
            raise invalid("stop", f"give at most {MAX_STOPS} strings, none of them empty")
    return found


def function_tool(name: str, description: str | None, parameters: Json | None) -> ToolSchema:
    """Return a function that may be called, in OpenAI's chat form."""
    function: Json = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def json_arguments(text: str, where: str) -> str:
    """Return `text` after checking that it is the arguments of a call.

    Raises:
        ApiError: it is not a JSON object.
    """
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(where, f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise invalid(where, "no JSON object")
    return text or "{}"


NOT_OFFERED: Final = ("web_search", "web_fetch", "tool_search", "namespace", "image_generation")
"""Beginnings of the types of tools that the API's side would run or resolve, and that programs send unasked: Codex
`web_search` and `namespace`, Claude Code `web_search_20250305`. They are left out and counted.
"""


def offered(tools: Sequence[Json]) -> Iterator[tuple[str, Json]]:
    """Yield the tools of a request that are not left out, each after its place in the request."""
    for number, tool in enumerate(tools):
        if not str(tool.get("type")).startswith(NOT_OFFERED):
            yield f"tools[{number}]", tool


def tool_choice_of(choice: str | Json) -> tuple[str, bool]:
    """Return `auto` or `none`, and whether a call is asked for: any, or one of a function.

    Raises:
        ApiError: it is none of these.
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in ("required", "function", "any", "tool"):
        return "auto", True
    if kind not in ("auto", "none"):
        raise refused("tool_choice", choice, "auto, none, a required call and the name of a function are known")
    return str(kind), False


def answer_format(param: str, wanted: Json) -> None:
    """Check the wanted form of the answer: text, or JSON, which is not enforced.

    Raises:
        ApiError: the form is neither.
    """
    if wanted and wanted.get("type") not in ("text", "json_object", "json_schema"):
        raise refused(param, wanted, "text, json_object and json_schema are known")


DONE: Final = b"data: [DONE]\n\n"
WAITING: Final = b": waiting for the policy\n\n"
"""A comment, which clients skip, to show that the connection is alive."""
STREAM_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}

_PIECE = re.compile(r"\s*\S+\s*?|\s+")


def encoded(value: Any) -> bytes:
    """Return `value` as JSON."""
    return msgspec.json.encode(value)


def frame(event: Any, name: str | None = None) -> bytes:
    """Return the frame of `event`, as JSON, with its `name` if the API names its events."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encoded(event) + b"\n\n"


def pieces(text: str) -> Iterator[str]:
    """Yield `text` word by word: an answer is streamed once it is complete."""
    return (found.group() for found in _PIECE.finditer(text))
