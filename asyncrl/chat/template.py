"""Render messages to token ids, extend a conversation by appending ids, and read answers into replies.

The first call renders the whole conversation. A later call keeps all earlier ids and appends

    [the end-of-turn token, if the answer was cut off]  +  ids of the bridge

The *bridge* is the template's text between an answer's end-of-turn token and the start of the next answer: the new
messages and the generation prompt. A sentinel finds it: the template renders `[user, assistant(SENTINEL), new
messages...]` once, and the bridge is the text after the sentinel's end-of-turn token. Since it follows a control token,
its tokens are the same alone as within the whole. The difference of two renderings would not work: templates render an
assistant's last message differently from one in the history (Qwen3).

This works for some templates only. So it is tested at the start for each kind of continuation, on another conversation
than the one that gave the bridge: the whole rendering must end with the bridge, as text and as ids. If a kind fails,
its conversations are never extended: each call renders them again, as a new branch, and a notice at the start gives the
reason.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.api import ChatFinish, ChatReply, Completion, FinishReason, Message, ToolCall, ToolSchema, answer_text
from asyncrl.api.generation import seed_from
from asyncrl.api.text import opened_thoughts
from asyncrl.chat.parsers import Parsed, Parser, parser, why_thoughts_unread
from asyncrl.data.chat_template import ChatError, StandIns
from asyncrl.data.picture_parts import pictures_of, without_pictures, wrong_turns
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import Rendered, common_length

_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
_IDS = ("c00000000", "c00000001")
_RESULTS: tuple[Message, ...] = tuple(
    {"role": "tool", "tool_call_id": each, "content": f"471{number}"} for number, each in enumerate(_IDS)
)
_MORE: Message = {"role": "user", "content": "And then?"}
_PROBES: Mapping[str, tuple[Message, ...]] = {
    "user": (_MORE,),
    "tool": _RESULTS[:1],
    "two tools": _RESULTS,
    "tool and user": (_RESULTS[0], _MORE),
}
"""The kinds of continuation, each with an example."""
PICTURES = "picture"
"""The kind of continuation that contains a picture, for models that take pictures."""
_SHOWN: Message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]}


def kind_of(new: Sequence[Message]) -> str | None:
    """Return the kind of continuation of the messages `new`; None for any other, which is never extended."""
    roles = [message["role"] for message in new]
    if any(isinstance(message.get("content"), list) for message in new):
        return PICTURES if set(roles) <= {"user", "tool"} else None
    tools = len(list(itertools.takewhile(lambda role: role == "tool", roles)))
    if any(role != "user" for role in roles[tools:]) or not roles:
        return None
    if tools == 0:
        return "user"
    if tools < len(roles):
        return "tool and user"
    return "tool" if tools == 1 else "two tools"


@dataclass(frozen=True)
class Findings:
    """Properties of a template. `end_id` is the token that ends an assistant's turn; None if no single one does.

    `refused` has the reason for each kind of continuation that is not extended by ids. `shows_reasoning`: earlier
    reasoning stays visible after another user's message. `rewrites`: even an answer without reasoning looks different
    in the history than when it was sampled.
    """

    end_id: int | None
    refused: Mapping[str, str]
    shows_reasoning: bool
    rewrites: bool

    def lines(self) -> list[str]:
        """Return notices about the template for the user, before the run."""
        found = [
            f"after {kind} messages each call is rendered from scratch, as a separate sample: {why}"
            for kind, why in self.refused.items()
        ]
        if self.rewrites:
            found.append("the template shows earlier answers otherwise than they were sampled (rollout.chat.drift)")
        if not self.shows_reasoning:
            found.append("the template leaves out earlier reasoning (rollout.chat.reasoning: keep it, or branch)")
        return found


class ChatFormat:
    """A run's chat format.

    Args:
        prompts: the prompts' template and tokenizer.
        reader: reads answers to conversations that offer tools.
        unread: why it does not read this template's calls, so that no conversation may offer tools; None if it does.
            If the template's thoughts are not read either, there are no conversations.

    Raises:
        ValueError: `prompts` has no chat template.
    """

    def __init__(self, prompts: PromptFormat, reader: Parser, *, unread: str | None = None) -> None:
        if prompts.chat is None:
            raise ValueError("there is no chat template; set dataset.chat_template to a Jinja file")
        self._prompts, self._template = prompts, prompts.chat
        self.parser, self._without_calls, self._unread = reader, parser("none"), unread
        self.tokenizer = prompts.tokenizer
        self._thoughts_unread = why_thoughts_unread(prompts.chat, in_turns=True)
        self._control_ids = frozenset(self.tokenizer.control_tokens.values())
        # There may be separate templates with and without tools; both are tried.
        self._offers: tuple[Sequence[ToolSchema], ...] = ((), (_TOOL,)) if self._template.differs_with_tools else ((),)
        self._end = self._end_of_turn(())
        self._end_with_tools = self._end_of_turn(self._offers[-1])
        probes = dict(_PROBES) if prompts.pictures is None else {**_PROBES, PICTURES: (_SHOWN,)}
        refused = {kind: why for kind, new in probes.items() if (why := self._wrong(new)) is not None}
        self.findings = Findings(self.end_id(), refused, self._shows_reasoning(), self._rewrites())

    @property
    def takes_pictures(self) -> bool:
        """True if the model takes pictures."""
        return self._prompts.pictures is not None

    def end_id(self, tools: Sequence[ToolSchema] = ()) -> int | None:
        """Return the token that ends an assistant's turn in conversations that offer `tools`; None if there is none."""
        return self.tokenizer.control_tokens.get(self._end_with_tools if tools else self._end)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer: the tokenizer's end token, and the templates' end tokens if they differ."""
        ends = (self.tokenizer.eos_token_id, self.end_id(), self.end_id((_TOOL,)))
        return tuple(dict.fromkeys(end for end in ends if end is not None))

    def begin(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Rendered:
        """Return token ids and pictures of a whole conversation, up to where the assistant's answer begins.

        Raises:
            ChatError: the messages are not a conversation, the template refuses them, or calls of `tools` would not be
                read.
        """
        if self._thoughts_unread is not None:
            raise ChatError(
                f"{self._thoughts_unread}: an agent cannot converse with this model; set dataset.chat_template to a "
                "Jinja file that writes them as <think>...</think>, or not at all, or use an agent that calls "
                "`generate`"
            )
        if tools and self._unread is not None:
            raise ChatError(
                f"the conversation offers tools, and rollout.chat.parser={self.parser.name}: {self._unread}"
            )
        return self._rendered(messages, tools)

    def shown(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Rendered:
        """Render messages without a generation prompt to token ids and pictures; the last message may have any role.

        Raises:
            ChatError: the messages are malformed, or the template refuses them.
        """
        return self._rendered(messages, tools, to_answer=False)

    def continued(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Rendered:
        """Return token ids and pictures of a conversation whose last message the answer continues.

        They end with that message's text, as the template writes it.

        Raises:
            ChatError: the last message is not an assistant's text, or the template does not show that text as it is.
        """
        last = messages[-1] if messages else {}
        if last.get("role") != "assistant" or last.get("tool_calls") or not isinstance(last.get("content"), str):
            raise ChatError("only an assistant's text is continued; the last message is another one")
        mark = _absent(messages, tools)
        marked = [*messages[:-1], {**last, "content": last["content"] + mark}]
        return self._rendered(marked, tools, to_answer=False, until=mark)

    def bridge(self, reply: Message, new: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Rendered | None:
        """Return token ids and pictures between the end-of-turn token of the answer `reply` and the next answer.

        None if this template's conversations are not extended by messages of this kind.
        """
        kind = kind_of(new)
        if kind is None or kind in self.findings.refused or wrong_turns(new) is not None:
            return None
        plain = without_pictures(new)
        stand_ins = StandIns(self.tokenizer, reply, plain, tools)
        text = self._bridge_text(stand_ins.put(reply), stand_ins.put(plain), stand_ins.put(tools))
        if text is None:
            return None
        try:
            return stand_ins.encoded(text, [*pictures_of(new)], self._prompts.pictures)
        except ValueError as error:
            raise ChatError(str(error)) from None

    def hides_reasoning_of(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], which: Sequence[int]
    ) -> bool:
        """True if the template renders `messages` without the reasoning of one at the positions `which`; False if it
        refuses them.
        """
        sentinels = {number: f"{_absent(messages)}{number}z" for number in which}
        turns = [
            {**message, "reasoning_content": sentinels[number]} if number in sentinels else message
            for number, message in enumerate(messages)
        ]
        plain = without_pictures(turns)
        stand_ins = StandIns(self.tokenizer, plain, tools)
        try:
            text = self._template.render_turns(self._template.messages(stand_ins.put(plain)), stand_ins.put(tools))
        except ChatError:
            return False
        return any(sentinel not in text for sentinel in sentinels.values())

    def answer_text(self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, ended: bool) -> str:
        """Return the text of a sampled answer for its parser. The control token that ended the answer is left out. If
        the generation prompt opens the reasoning, that opening is added.
        """
        kept = token_ids[:-1] if ended and token_ids and token_ids[-1] in self._control_ids else token_ids
        return opened_thoughts(self.tokenizer, prompt_ids) + self.tokenizer.decode_all(kept)

    def parsed(self, text: str, tools: Sequence[ToolSchema]) -> Parsed:
        """Parse an answer. Without offered tools, text that looks like a call stays text."""
        return (self.parser if tools else self._without_calls).parse(text, tools)

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, to_answer: bool = True, until: str = ""
    ) -> Rendered:
        """See `ChatTemplate.conversation`; every error is a `ChatError`."""
        if (wrong := wrong_turns(messages)) is not None:
            raise ChatError(f"these messages are not a valid conversation: {wrong}")
        try:
            turns = self._template.messages(messages)
            pictures = self._prompts.pictures
            return self._template.conversation(
                self.tokenizer, turns, tools, pictures=pictures, to_answer=to_answer, until=until
            )
        except ValueError as error:  # also an unknown character, or pictures that do not show
            raise ChatError(str(error)) from None

    def _bridge_text(self, reply: Message, new: Sequence[Message], tools: Sequence[ToolSchema]) -> str | None:
        sentinel, end = _absent(reply, new, tools), self._end_with_tools if tools else self._end
        for dummy in _dummies(reply, new, sentinel):
            try:
                text = self._template.render_turns([{"role": "user", "content": "x"}, dummy, *new], tools)
            except ChatError:
                continue
            _, found, rest = text.rpartition(sentinel)
            _, ended, bridge = rest.partition(end) if end else ("", "", "")
            if found and ended:
                return bridge
        return None

    def _end_of_turn(self, tools: Sequence[ToolSchema]) -> str:
        """Return the text of the control token that directly follows an assistant's text; empty if there is none."""
        sentinel = _absent()
        turns = ({"role": "user", "content": "x"}, {"role": "assistant", "content": sentinel}, _MORE)
        try:
            rest = self._template.render_turns(turns, tools).partition(sentinel)[2]
        except ChatError:
            return ""
        names = [name for name in self.tokenizer.control_tokens if name and rest.startswith(name)]
        return max(names, key=len, default="")

    def _wrong(self, new: Sequence[Message]) -> str | None:
        """Return why conversations are not extended by messages like `new`; None if they are."""
        answers_calls = any(message["role"] == "tool" for message in new)
        offers = [(_TOOL,)] if answers_calls else self._offers
        return next((why for tools in offers if (why := self._wrong_with(new, tools)) is not None), None)

    def _wrong_with(self, new: Sequence[Message], tools: Sequence[ToolSchema]) -> str | None:
        """As `_wrong`, for conversations that offer `tools`."""
        end = self._end_with_tools if tools else self._end
        if not end:
            return (
                "the template ends an assistant's message with no special token of the tokenizer; for conversations of "
                "several turns it needs one directly after the text, as <|im_end|>"
            )
        reply = _answer(min(sum(message["role"] == "tool" for message in new), 2))
        bridge = self._bridge_text(reply, new, tools)
        if bridge is None:
            return "the template refuses such messages, or shows nothing of the answer before them"
        if not all(message["content"] in bridge for message in new if isinstance(message["content"], str)):
            return f"the template does not end such an answer with {end!r}, or leaves out what follows it"
        first = _SHOWN if new[0] is _SHOWN else {"role": "user", "content": "What is 2 + 2?"}
        history: list[Message] = [
            first,
            {"role": "assistant", "content": "Four."},
            {"role": "user", "content": "Are you sure?"},
        ]
        whole = None
        for each in _answers(reply):
            try:
                whole = self._template.render_turns([*history, each, *new], tools)
                break
            except ChatError as error:
                refusal = str(error)
        if whole is None:
            return refusal
        if not whole.endswith(end + bridge):
            return "what the template puts before the next answer depends on the messages before"
        encode, before = self.tokenizer.encode, whole[: len(whole) - len(bridge)]
        try:
            apart = encode(before) + encode(bridge)
        except ValueError as error:  # a character that the tokenizer does not know
            return str(error)
        return None if encode(whole) == apart else f"the tokenizer joins {end!r} with what follows it"

    def _shows_reasoning(self) -> bool:
        turns = [{"role": "user", "content": "x"}, _answer(0), _MORE]
        return not any(self.hides_reasoning_of(turns, tools, [1]) for tools in self._offers)

    def _rewrites(self) -> bool:
        user = {"role": "user", "content": "x"}
        try:
            return any(
                not self._template.render_turns([user, _answer(0), _MORE], tools).startswith(
                    self._template.render_turns([user], tools)
                    + "Four."
                    + (self._end_with_tools if tools else self._end)
                )
                for tools in self._offers
            )
        except ChatError:
            return False


def _answer(calls: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "" if calls else "Four."}
    if calls:
        message["tool_calls"] = [_call(each, {"a": 2}) for each in _IDS[:calls]]
    return message


def _answers(reply: Message) -> Iterator[Message]:
    """Yield `reply`, then `reply` with only its first call, for templates that accept a single call."""
    yield reply
    if len(calls := reply.get("tool_calls") or ()) > 1:
        yield {**reply, "tool_calls": calls[:1]}


def _call(call_id: str, arguments: Mapping[str, Any], name: str = "add") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _dummies(reply: Message, new: Sequence[Message], sentinel: str) -> Iterator[Message]:
    """Yield copies of `reply` whose only text is the sentinel."""
    dummy: dict[str, Any] = {"role": "assistant", "content": sentinel}
    answered = [message.get("tool_call_id", "") for message in new if message["role"] == "tool"]
    if answered:
        names = {call["id"]: call["function"]["name"] for call in reply.get("tool_calls") or ()}
        calls = [_call(each, {"x": sentinel}, names.get(each, "add")) for each in names or answered]
        yield from _answers({**dummy, "tool_calls": calls})
    yield dummy


def _absent(*values: Any) -> str:
    """Return letters and digits that occur nowhere in `values`."""
    text = repr(values)
    return next(each for each in map("CutHere{}x".format, itertools.count()) if each not in text)


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


def first_stop(text: str, strings: Sequence[str]) -> str | None:
    """Return the stop string that is complete first in `text`; None if there is none."""
    ends = [(at + len(string), string) for string in strings if (at := text.find(string)) >= 0]
    return min(ends)[1] if ends else None


def before_stop(text: str, strings: Sequence[str]) -> str:
    """Return `text` up to the first stop string in it; all of it if there is none."""
    found = [at for string in strings if (at := text.find(string)) >= 0]
    return text[: min(found)] if found else text


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
