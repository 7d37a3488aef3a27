"""A call in the form common to all APIs: the request to the policy, and its combination with the session's sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import msgspec

from asyncrl.api.chat import ChatReply, Message, ToolSchema
from asyncrl.api.generation import SamplingParams
from asyncrl.inference.openai.api_errors import ApiError, invalid, refused

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


def forced_call(value: object) -> ApiError:
    """Return the refusal of a `tool_choice` that would force a call."""
    return refused("tool_choice", value, "the policy cannot be forced to call a tool; use auto or none")


def check_tool_choice(choice: object) -> None:
    """Check OpenAI's parameter `tool_choice`.

    Raises:
        ApiError: it would force a call.
    """
    if choice not in ("auto", "none"):
        raise forced_call(choice)


def answer_format(param: str, wanted: Json) -> None:
    """Check the wanted form of the answer: text, or JSON, which is not enforced.

    Raises:
        ApiError: the form is neither.
    """
    if wanted and wanted.get("type") not in ("text", "json_object", "json_schema"):
        raise refused(param, wanted, "text, json_object and json_schema are known")
