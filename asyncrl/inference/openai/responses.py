"""OpenAI's responses.

A response can continue an earlier one of the same session (`previous_response_id`): `Responses` remembers the
conversation while the session is open; each session has its own instance.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from asyncrl.api.chat import ChatReply, Message, ToolSchema
from asyncrl.inference.openai.api_call import (
    IGNORED_BY_OPENAI,
    ApiCall,
    ApiError,
    Json,
    SupportedParameters,
    answer_format,
    convert,
    frame,
    function_tool,
    invalid,
    offered,
    pieces,
    refused,
    sampling_of,
    tool_choice_of,
)
from asyncrl.inference.openai.chat_completions import (
    Function,
    arguments_of,
    assistant_call,
    finished_at_length,
    message_json,
    seen_of,
    text_of,
    token_logprobs,
)

LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDED: Final = (LOGPROBS, "reasoning.encrypted_content")
_TEXT: Final = ("input_text", "output_text", "text")


class Body(msgspec.Struct):
    """The parameters that are used."""

    model: str
    input: str | list[Json]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[Json] = msgspec.field(default_factory=list)
    tool_choice: str | Json = "auto"
    text: Json = msgspec.field(default_factory=dict)
    include: list[str] = msgspec.field(default_factory=list)
    metadata: Json = msgspec.field(default_factory=dict)
    stream: bool = False


SURFACE: Final = SupportedParameters(
    Body,
    ignored=IGNORED_BY_OPENAI
    | {"reasoning", "stream_options", "max_tool_calls", "parallel_tool_calls"}
    | {"context_management", "client_metadata"},
    neutral={"background": (False,), "truncation": ("disabled",), "top_logprobs": (0,)},
    hints={
        "access_programs": "leave it out",
        "background": "wait for the answer",
        "background_options": "wait for the answer",
        "image": "leave it out",
        "moderation": "leave it out",
        "conversation": "use previous_response_id, or send the whole input",
        "prompt": "send the input itself",
        "truncation": "an input that is too long is refused",
    },
)


class _Item(msgspec.Struct):
    type: str = "message"
    role: str = ""
    content: str | list[Json] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[Json] = ""
    summary: list[Json] = msgspec.field(default_factory=list)


@dataclass(frozen=True)
class _Asked:
    body: Body
    turns: Sequence[Message]
    """The conversation without the instructions, which a later response does not inherit."""


class Responses:
    """Reader and writer of OpenAI's responses API, for one session."""

    def __init__(self) -> None:
        self._messages_by_id: dict[str, list[Message]] = {}

    def read(self, body: bytes) -> ApiCall:
        asked = SURFACE.read(body)
        for name in asked.include:
            if name not in _INCLUDED:
                raise refused("include", name, f"{' and '.join(_INCLUDED)} are known")
        answer_format("text.format", asked.text.get("format") or {})
        tools = _tools(asked.tools)
        choice, wants_call = tool_choice_of(asked.tool_choice)
        turns = [*self._before(asked.previous_response_id), *_messages(asked.input)]
        if not turns:
            raise invalid("input", "empty; give at least one message")
        system: list[Message] = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        sampling = sampling_of(max_new_tokens=asked.max_output_tokens, temperature=asked.temperature, top_p=asked.top_p)
        return ApiCall(
            *(asked.model, [*system, *turns], tools, choice, sampling),
            stream=asked.stream,
            body=_Asked(asked, turns),
            wants_call=wants_call,
            left_out_tools=len(asked.tools) - len(tools),
        )

    def answer(self, call: ApiCall, replies: Sequence[ChatReply]) -> Json:
        (reply,) = replies
        head, output = _head(call), _output(call, reply)
        self._messages_by_id[head["id"]] = [*call.body.turns, message_json(reply)]
        return _whole(head, output, reply)

    def events(self, call: ApiCall, replies: Sequence[ChatReply]) -> Iterator[bytes]:
        whole = self.answer(call, replies)
        begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        numbers = iter(range(1 << 62))

        def event(kind: str, **fields: Any) -> bytes:
            return frame({"type": kind, "sequence_number": next(numbers), **fields}, kind)

        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        for index, item in enumerate(whole["output"]):
            own = {"output_index": index, "item_id": item["id"]}
            empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
            added = {**item, "status": "in_progress", **empty}
            yield event("response.output_item.added", output_index=index, item=added)
            if item["type"] == "function_call":
                for piece in pieces(item["arguments"]):
                    yield event("response.function_call_arguments.delta", **own, delta=piece)
                done = {"name": item["name"], "arguments": item["arguments"]}
                yield event("response.function_call_arguments.done", **own, **done)
            else:
                (part,) = item["content"]
                own |= {"content_index": 0}
                is_message = item["type"] == "message"
                kind = "response.output_text" if is_message else "response.reasoning_text"
                extra: Json = {"logprobs": []} if is_message else {}
                yield event("response.content_part.added", **own, part={**part, "text": "", **extra})
                for piece in pieces(part["text"]):
                    yield event(f"{kind}.delta", **own, delta=piece, **extra)
                yield event(f"{kind}.done", **own, text=part["text"], **extra)
                yield event("response.content_part.done", **own, part=part)
            yield event("response.output_item.done", output_index=index, item=item)
        yield event(f"response.{whole['status']}", response=whole)

    def error(self, error: ApiError) -> Json:
        return error.openai()

    def error_event(self, error: ApiError) -> bytes:
        fields = {"code": error.code, "message": error.message, "param": error.param, "sequence_number": 0}
        return frame({"type": "error", **fields, **error.openai()}, "error")

    def _before(self, response_id: str | None) -> Sequence[Message]:
        if response_id is None:
            return ()
        if response_id not in self._messages_by_id:
            raise invalid("previous_response_id", f"{response_id!r} is not a response of this session")
        return self._messages_by_id[response_id]


def _messages(given: str | Sequence[Json]) -> list[Message]:
    """Return the items of an input as chat messages: calls, reasoning and text of one answer are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Json] = []
    answering: Json | None = None

    def answer() -> Json:
        nonlocal answering
        if answering is None:
            answering = {"role": "assistant", "content": ""}
            messages.append(answering)
        return answering

    for number, each in enumerate(given):
        where = f"input[{number}]"
        item = convert(each, _Item, where)
        if item.type == "message" and item.role == "assistant":
            if answering is not None and (answering["content"] or "tool_calls" in answering):
                answering = None
            answer()["content"] = text_of(item.content, f"{where}.content", _TEXT)
        elif item.type == "message":
            answering = None
            role = "system" if item.role == "developer" else item.role
            if role not in ("system", "user"):
                raise refused(f"{where}.role", item.role, "system, developer, user and assistant are known")
            read = seen_of if role == "user" else text_of
            messages.append({"role": role, "content": read(item.content, f"{where}.content", _TEXT)})
        elif item.type == "function_call":
            calls = answer().setdefault("tool_calls", [])
            calls.append(assistant_call(item.call_id, item.name, item.arguments, where))
        elif item.type == "function_call_output":
            answering = None
            output = seen_of(item.output, f"{where}.output", _TEXT)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif item.type == "reasoning":
            answering = None
            if content := text_of(item.content, f"{where}.content", ("reasoning_text",)):
                answer()["reasoning_content"] = content
        else:
            raise refused(f"{where}.type", item.type, "text, function calls and their outputs are known")
    return list(messages)


def _tools(given: Sequence[Json]) -> list[ToolSchema]:
    tools = []
    for where, tool in offered(given):
        if (kind := tool.get("type")) != "function":
            raise refused(f"{where}.type", kind, "functions alone are supported")
        found = convert(tool, Function, where)
        tools.append(function_tool(found.name, found.description, found.parameters))
    return tools


def _head(call: ApiCall) -> Json:
    body: Body = call.body.body
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": call.model,
        "error": None,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "metadata": body.metadata,
        "parallel_tool_calls": True,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "max_output_tokens": body.max_output_tokens,
        "tool_choice": body.tool_choice,
        "tools": body.tools,
        "text": body.text or {"format": {"type": "text"}},
    }


def _whole(head: Json, output: list[Json], reply: ChatReply) -> Json:
    cut = finished_at_length(reply)
    prompt, made = len(reply.prompt_ids), len(reply.completion.token_ids)
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": reply.completion.cached_tokens},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + made,
    }
    ended = {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
    }
    return {**head, **ended, "output": output, "usage": usage}


def _output(call: ApiCall, reply: ChatReply) -> list[Json]:
    status = "incomplete" if finished_at_length(reply) else "completed"
    items: list[Json] = []
    if reply.reasoning is not None:
        thought = {"type": "reasoning_text", "text": reply.reasoning}
        items.append({"id": _new("rs"), "type": "reasoning", "summary": [], "content": [thought], "status": status})
    if reply.content or not reply.tool_calls:
        answer = reply.completion
        logprobs = token_logprobs(answer.token_ids, answer.logprobs) if LOGPROBS in call.body.body.include else []
        part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": logprobs}
        items.append({"id": _new("msg"), "type": "message", "role": "assistant", "status": status, "content": [part]})
    for made in reply.tool_calls:
        function = {"name": made.name, "arguments": arguments_of(made)}
        items.append({"id": _new("fc"), "type": "function_call", "call_id": made.id, **function, "status": status})
    return items


def _new(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
