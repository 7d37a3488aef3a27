"""Anthropic's messages."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from asyncrl.api.chat import ChatFinish, ChatReply, Message, ToolSchema
from asyncrl.data.picture_parts import joined
from asyncrl.inference.openai.api_call import (
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
from asyncrl.inference.openai.chat_completions import assistant_call, seen_of, text_of

_TEXT: Final = ("text",)
_BILLING: Final = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)
"""Line that Claude Code begins its system text with. It differs between tasks, whose prompts would share no prefix."""
_STOP: Final = {ChatFinish.stop: "end_turn", ChatFinish.length: "max_tokens", ChatFinish.tool_calls: "tool_use"}


class Thinking(msgspec.Struct):
    """Setting that includes the policy's reasoning in the answer."""

    type: str = "disabled"


class Body(msgspec.Struct):
    """The parameters that are used."""

    model: str
    messages: list[Json]
    max_tokens: int | None = None
    system: str | list[Json] = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[Json] = msgspec.field(default_factory=list)
    tool_choice: Json = msgspec.field(default_factory=lambda: {"type": "auto"})
    thinking: Thinking = msgspec.field(default_factory=Thinking)
    output_config: Json = msgspec.field(default_factory=dict)
    stream: bool = False


SURFACE: Final = SupportedParameters(
    Body,
    ignored=frozenset(
        (
            *("metadata", "service_tier", "cache_control", "speed", "inference_geo", "diagnostics", "user_profile_id"),
            *("betas", "workspace_id", "billing_policy", "fallbacks", "fallback_credit_token", "context_management"),
        )
    ),
    neutral={"mcp_servers": ([],)},
    hints={
        "compaction": "ask for a summary in a message",
        "container": "give it a tool",
        "mcp_servers": "give it their tools",
        "thread": "send the whole conversation",
    },
)


class _Message(msgspec.Struct):
    role: str
    content: str | list[Json]


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Json = msgspec.field(default_factory=dict)
    tool_use_id: str = ""
    content: str | list[Json] = ""
    source: Json | None = None


class _Source(msgspec.Struct):
    type: str
    data: str | None = None
    content: str | list[Json] | None = None


class _Document(msgspec.Struct):
    source: _Source
    title: str | None = None
    context: str | None = None


class _Tool(msgspec.Struct):
    name: str
    input_schema: Json
    description: str | None = None
    type: str = "custom"


class CountBody(msgspec.Struct):
    """Request to count tokens."""

    messages: list[Json]
    system: str | list[Json] = ""
    tools: list[Json] = msgspec.field(default_factory=list)


COUNT: Final = SupportedParameters(
    CountBody,
    SURFACE.ignored | {"model", "tool_choice", "thinking", "output_config", "compaction"},
    SURFACE.neutral,
    SURFACE.hints,
)


class Messages:
    """Reader and writer of Anthropic's messages API."""

    def read(self, body: bytes) -> ApiCall:
        asked = SURFACE.read(body)
        if asked.max_tokens is None:
            raise invalid("max_tokens", "missing; give the longest answer in tokens")
        tools = _tools(asked.tools)
        choice, wants_call = tool_choice_of(asked.tool_choice)
        for name, value in asked.output_config.items():
            if name not in ("effort", "format"):
                raise refused(f"output_config.{name}", value, "effort, which is ignored, and format are known")
        answer_format("output_config.format", asked.output_config.get("format") or {})
        sampling = sampling_of(
            max_new_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            stop=asked.stop_sequences,
        )
        messages = messages_of(asked.system, asked.messages)
        begun = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls") and messages[-1]["content"]
        return ApiCall(
            *(asked.model, messages, tools, choice, sampling),
            stream=asked.stream,
            continue_last=bool(begun),
            body=asked,
            wants_call=wants_call,
            left_out_tools=len(asked.tools) - len(tools),
        )

    def answer(self, call: ApiCall, replies: Sequence[ChatReply]) -> Json:
        (reply,) = replies
        stopped = reply.stop is not None and reply.finish_reason is ChatFinish.stop
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": call.model,
            "content": _blocks(call.body, reply),
            "stop_reason": "stop_sequence" if stopped else _STOP[reply.finish_reason],
            "stop_sequence": reply.stop if stopped else None,
            "usage": {"input_tokens": len(reply.prompt_ids), "output_tokens": len(reply.completion.token_ids)},
        }

    def events(self, call: ApiCall, replies: Sequence[ChatReply]) -> Iterator[bytes]:
        def event(kind: str, **fields: Any) -> bytes:
            return frame({"type": kind, **fields}, kind)

        whole = self.answer(call, replies)
        usage = {**whole["usage"], "output_tokens": 0}
        unfinished: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield event("message_start", message={**whole, **unfinished, "usage": usage})
        for index, block in enumerate(whole["content"]):
            empty, deltas = _streamed(block)
            yield event("content_block_start", index=index, content_block={**block, **empty})
            for delta in deltas:
                yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield event("message_delta", delta=delta, usage={"output_tokens": whole["usage"]["output_tokens"]})
        yield event("message_stop")

    def error(self, error: ApiError) -> Json:
        return error.anthropic()

    def error_event(self, error: ApiError) -> bytes:
        return frame(error.anthropic(), "error")


def read_count(body: bytes) -> tuple[list[Message], list[ToolSchema]]:
    """Return the messages and tools whose tokens are to be counted.

    Raises:
        ApiError: the request is invalid.
    """
    asked = COUNT.read(body)
    return messages_of(asked.system, asked.messages), _tools(asked.tools)


def messages_of(system: str | Sequence[Json], given: Sequence[Json]) -> list[Message]:
    """Return the conversation in OpenAI's chat form.

    Raises:
        ApiError: it has content that the policy does not accept.
    """
    if not given:
        raise invalid("messages", "empty; give at least one message")
    text = _system_of(system)
    messages: list[Message] = [{"role": "system", "content": text}] if text else []
    for number, each in enumerate(given):
        where = f"messages[{number}]"
        found = convert(each, _Message, where)
        content = [{"type": "text", "text": found.content}] if isinstance(found.content, str) else found.content
        content = _with_documents(content, f"{where}.content")
        blocks = [convert(block, _Block, f"{where}.content[{at}]") for at, block in enumerate(content)]
        if found.role == "user":
            messages += _of_user(blocks, where)
        elif found.role == "assistant":
            messages.append(_of_assistant(blocks, where))
        elif found.role == "system":
            messages.append({"role": "system", "content": text_of(found.content, f"{where}.content", _TEXT)})
        else:
            raise refused(f"{where}.role", found.role, "user, assistant and system are known")
    return messages


def _system_of(system: str | Sequence[Json]) -> str:
    parts = [{"type": "text", "text": system}] if isinstance(system, str) else system
    text_of(parts, "system", _TEXT)  # refuses other parts
    return "".join(_BILLING.sub("", part["text"]) for part in parts)


def _with_documents(parts: Sequence[Json], where: str) -> list[Json]:
    """Return `parts` with documents of text as text.

    Raises:
        ApiError: a document is of another kind.
    """
    return [
        _text_of_document(part, f"{where}[{at}]") if part.get("type") == "document" else part
        for at, part in enumerate(parts)
    ]


def _text_of_document(part: Json, where: str) -> Json:
    found = convert(part, _Document, where)
    if found.source.type not in ("text", "content"):
        raise refused(f"{where}.source.type", found.source.type, "the policy reads documents of text")
    given = found.source.data if found.source.type == "text" else found.source.content
    text = text_of(given, f"{where}.source.content", _TEXT)
    return {"type": "text", "text": "\n".join(filter(None, (found.title, found.context, text)))}


def _of_user(blocks: Sequence[_Block], where: str) -> Iterator[Message]:
    """Yield a message for each tool's result, then one for the text and the pictures."""
    parts: list[Json] = []
    for number, block in enumerate(blocks):
        if block.type == "tool_result":
            within = f"{where}.content[{number}].content"
            given = block.content if isinstance(block.content, str) else _with_documents(block.content, within)
            content = seen_of(given, within, _TEXT)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        elif block.type == "text":
            parts.append({"type": "text", "text": block.text})
        elif block.type == "image":
            picture = seen_of([{"type": "image", "source": block.source}], f"{where}.content[{number}]", _TEXT)
            parts += picture if isinstance(picture, list) else ()
        else:
            wanted = "the policy reads text, pictures and tools' results"
            raise refused(f"{where}.content[{number}].type", block.type, wanted)
    if parts:
        yield {"role": "user", "content": joined(parts)}


def _of_assistant(blocks: Sequence[_Block], where: str) -> Message:
    message: Json = {"role": "assistant", "content": ""}
    for number, block in enumerate(blocks):
        if block.type == "text":
            message["content"] += block.text
        elif block.type == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
        elif block.type == "tool_use":
            arguments = msgspec.json.encode(block.input).decode()
            call = assistant_call(block.id, block.name, arguments, f"{where}.content[{number}]")
            message.setdefault("tool_calls", []).append(call)
        elif block.type != "redacted_thinking":  # nobody but Anthropic can read that
            raise refused(f"{where}.content[{number}].type", block.type, "text, thinking and tool_use are known")
    return message


def _tools(given: Sequence[Json]) -> list[ToolSchema]:
    tools = []
    for where, tool in offered(given):
        if (kind := tool.get("type") or "custom") != "custom":
            raise refused(f"{where}.type", kind, "tools of your own alone are supported")
        found = convert({**tool, "type": kind}, _Tool, where)
        tools.append(function_tool(found.name, found.description, found.input_schema))
    return tools


def _blocks(body: Body, reply: ChatReply) -> list[Json]:
    blocks: list[Json] = []
    if reply.reasoning is not None and body.thinking.type != "disabled":
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content or not reply.tool_calls:
        blocks.append({"type": "text", "text": reply.content})
    for made in reply.tool_calls:
        blocks.append({"type": "tool_use", "id": made.id, "name": made.name, "input": dict(made.arguments)})
    return blocks


def _streamed(block: Json) -> tuple[Json, Iterator[Json]]:
    """Return the beginning of a streamed block and the additions to it."""
    if block["type"] == "tool_use":
        arguments = pieces(msgspec.json.encode(block["input"]).decode())
        return {"input": {}}, ({"type": "input_json_delta", "partial_json": piece} for piece in arguments)
    if block["type"] == "thinking":
        return {"thinking": ""}, ({"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"]))
    return {"text": ""}, ({"type": "text_delta", "text": piece} for piece in pieces(block["text"]))
