"""Replies of the policy: a sampled answer, parsed into content, reasoning and calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from asyncrl.api import ChatFinish, ChatReply, Completion, FinishReason, ToolCall, ToolSchema, answer_text
from asyncrl.api.seeds import seed_from
from asyncrl.plugins.chat.parsers import common_length
from asyncrl.plugins.chat.stop_strings import before_stop, first_stop
from asyncrl.plugins.chat.template import ChatFormat


def reply_of(
    chat: ChatFormat,
    prompt_ids: tuple[int, ...],
    completion: Completion,
    tools: Sequence[ToolSchema],
    stop: Sequence[str],
    name: str,
    begun: str = "",
) -> ChatReply:
    """Parse an answer into a reply.

    Args:
        tools: tools that were offered; without any, text that looks like a call stays text.
        stop: stop strings of the request.
        name: name of the answer, from which the ids of its calls are derived.
        begun: text of the assistant's message that the answer continues; it is part of the reply's message alone.
    """
    ended = completion.finish_reason == FinishReason.stop
    text = chat.answer_text(() if begun else prompt_ids, completion.token_ids, ended=ended)
    parsed = chat.parsed(begun + (before_stop(text, stop) if ended else text), tools)
    content = parsed.content[common_length(begun, parsed.content) :]
    calls = tuple(
        ToolCall(f"c{seed_from('call', name, number):08x}", call.name, call.arguments)
        for number, call in enumerate(parsed.calls)
    )
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if calls:
        message["tool_calls"] = [_as_message(call) for call in calls]
    finish = ChatFinish.length
    if ended:
        finish = ChatFinish.tool_calls if calls else ChatFinish.stop
    return ChatReply(
        message,
        content,
        parsed.reasoning,
        calls,
        parsed.malformed,
        finish,
        prompt_ids,
        completion,
        stop=first_stop(text, stop) if ended else None,
        text=answer_text(chat.tokenizer, prompt_ids, completion.token_ids),
    )


def _as_message(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def no_completion() -> Completion:
    """Return the completion without tokens for a context without room."""
    return Completion([], [], [], FinishReason.length)


def empty_reply(ids: tuple[int, ...]) -> ChatReply:
    """Return the empty answer for a context without room."""
    message = {"role": "assistant", "content": ""}
    return ChatReply(message, "", None, (), 0, ChatFinish.length, ids, no_completion())
