"""OpenAI's chat messages, to which all APIs are translated: a request's messages and tools, an answer as a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from asyncrl.api.chat import ChatFinish, ChatReply, Message, ToolCall, ToolSchema
from asyncrl.api.picture import PictureError
from asyncrl.inference.openai.api_call import Json, function_tool, json_arguments
from asyncrl.inference.openai.api_errors import invalid, refused
from asyncrl.inference.openai.supported_parameters import convert
from asyncrl.plugins.datasets.templates.picture_parts import PICTURE_TYPES, Content, content_of


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: Json | None = None


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _ToolCall(msgspec.Struct):
    id: str
    function: _CalledFunction
    type: Literal["function"] = "function"


class _Message(msgspec.Struct):
    role: str
    content: str | list[Json] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Json | None = None
    audio: Json | None = None


def tools_of(given: Sequence[Json]) -> list[ToolSchema]:
    """Return the functions in a request's `tools`.

    Raises:
        ApiError: a tool is of another kind.
    """
    tools = []
    for number, tool in enumerate(given):
        if tool.get("type") != "function":
            raise refused(f"tools[{number}].type", tool.get("type"), "functions alone are supported")
        found = convert(tool.get("function"), _Function, f"tools[{number}].function")
        tools.append(function_tool(found.name, found.description, found.parameters))
    return tools


def messages_of(given: Sequence[Json]) -> list[Message]:
    """Return a request's messages with the fields that have a meaning here.

    Raises:
        ApiError: a role or content that the policy does not accept.
    """
    if not given:
        raise invalid("messages", "empty; give at least one message")
    return [_message(each, f"messages[{number}]") for number, each in enumerate(given)]


def _message(given: Json, where: str) -> Message:
    found = convert(given, _Message, where)
    role = "system" if found.role == "developer" else found.role
    if role not in ("system", "user", "assistant", "tool"):
        raise refused(f"{where}.role", found.role, "system, developer, user, assistant and tool are known")
    for name in ("function_call", "audio"):
        if value := getattr(found, name):
            raise refused(f"{where}.{name}", value, "not supported; functions are called by tool_calls")
    read = seen_of if role in ("user", "tool") else text_of
    message: Json = {"role": role, "content": read(found.content, f"{where}.content", ("text",))}
    if found.name is not None:
        message["name"] = found.name
    if role == "tool":
        if found.tool_call_id is None:
            raise invalid(f"{where}.tool_call_id", "missing; a tool's message names the call that it answers")
        message["tool_call_id"] = found.tool_call_id
    elif role == "assistant":
        if reasoning := found.reasoning_content or found.reasoning:
            message["reasoning_content"] = reasoning
        if found.tool_calls:
            message["tool_calls"] = [
                assistant_call(call.id, call.function.name, call.function.arguments, f"{where}.tool_calls[{number}]")
                for number, call in enumerate(found.tool_calls)
            ]
    return message


def assistant_call(call_id: str, name: str, arguments: str, where: str) -> Json:
    """Return a call within an assistant's message, in OpenAI's chat form."""
    arguments = json_arguments(arguments, f"{where}.function.arguments")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_of(content: str | Sequence[Json] | None, where: str, kinds: Sequence[str]) -> str:
    """Return the text of a message's content: the content itself, or its parts of one of `kinds`, joined.

    Raises:
        ApiError: a part is of another kind, such as an image, audio or a file.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for number, part in enumerate(content):
        if part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise refused(f"{where}[{number}].type", part.get("type"), "the policy reads text")
    return "".join(part["text"] for part in content)


def seen_of(content: str | Sequence[Json] | None, where: str, kinds: Sequence[str]) -> Content:
    """Return a message's content with its pictures: text, or parts that are text of one of `kinds` or pictures.

    Raises:
        ApiError: a part is of another kind, or a picture cannot be used; nothing is fetched from URLs.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Json] = []
    for number, part in enumerate(content):
        if part.get("type") in PICTURE_TYPES:
            try:
                found = content_of([part])
            except PictureError as error:
                raise invalid(f"{where}[{number}]", str(error)) from None
            parts += found if isinstance(found, list) else ()
        elif part.get("type") in kinds and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise refused(f"{where}[{number}].type", part.get("type"), "the policy reads text and pictures")
    return content_of(parts)


def told(reply: ChatReply) -> Json:
    """Return the reply as a message of this API."""
    message: Json = {"role": "assistant", "content": None if reply.tool_calls and not reply.content else reply.content}
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_of(call)}}
            for call in reply.tool_calls
        ]
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    return message


def arguments_of(call: ToolCall) -> str:
    """Return the arguments of a call in these APIs' form: JSON within a string."""
    return msgspec.json.encode(dict(call.arguments)).decode()


def finished_at_length(reply: ChatReply) -> bool:
    """True if the answer was cut off."""
    return reply.finish_reason == ChatFinish.length


def token_logprobs(token_ids: Sequence[int], logprobs: Sequence[float]) -> list[Json]:
    """Return each token's log-probability; tokens are named by id, as in vLLM."""
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]
