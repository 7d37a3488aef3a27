"""Chat templates, rendered as transformers renders them, without transformers (which imports torch).

A template is a Jinja program that comes with the tokenizer. It is foreign code, so it runs in Jinja's sandbox with
limits (`template_sandbox`). The tests compare what is rendered with transformers, text by text.

A template puts messages and control tokens, such as `<|im_start|>`, into one string. There the name of a control token
in a user's text looks like the real one. So while the template runs, such names are replaced by stand-ins (`StandIns`):
letters and digits that occur nowhere else. Then each stretch of text with a stand-in gets its original words back and
is encoded separately, with control tokens off (`split_special_tokens` in transformers). Stretches end at the template's
own control tokens, so their tokens are the same as within the whole. Without such a name the text is encoded in one
piece as usual. Tokens that a tokenizer has added but not marked as special (Qwen's `<think>`, `<tool_call>`) are text,
as in transformers.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from asyncrl.api.chat import Message
from asyncrl.api.picture import Picture
from asyncrl.data.picture_parts import PictureRules, expanded, pictures_of, placed, without_pictures
from asyncrl.data.template_sandbox import TemplateLimit, TemplateRefusal, render
from asyncrl.data.tokenizers import DEFAULT, ChatTokenizer, Rendered

TOOL_USE = "tool_use"
"""Name of the template for conversations with tools, if a tokenizer has several templates."""


class ChatError(ValueError):
    """Messages that cannot be rendered; the message says why."""


class ChatTemplate:
    """A template and its variables besides the messages.

    Args:
        source: the template, or several by name: `tool_use` renders conversations that offer tools if there is one,
            `default` renders the others. The rest is not used.
        special_tokens: the template's `bos_token`, `eos_token` and so on.
        args: further variables of the template, such as `enable_thinking`; they take precedence over `special_tokens`.
        system_prompt: text of a system message that is put before messages without one; empty for none.

    Raises:
        ChatError: `source` is not a Jinja template, or has names but none is `default`.
        TemplateLimit: it takes more than the limits to compile it.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str],
        args: Mapping[str, Any] | None = None,
        system_prompt: str = "",
    ) -> None:
        named = {DEFAULT: source} if isinstance(source, str) else source
        if DEFAULT not in named:
            raise ChatError(
                f"the tokenizer has the chat templates {', '.join(sorted(named))} and none that is called {DEFAULT}; "
                "set dataset.chat_template to a Jinja file"
            )
        self.source_with_tools = named.get(TOOL_USE, named[DEFAULT])
        """The template of conversations that offer tools."""
        self.differs_with_tools = self.source_with_tools != named[DEFAULT]
        """True if conversations that offer tools have a separate template."""
        self._source = named[DEFAULT]
        self._variables = {**special_tokens, **(args or {})}
        self._system_prompt = system_prompt
        self._takes_parts_alone = False
        for name in named.keys() & {DEFAULT, TOOL_USE}:
            self._filled(name, named[name], None)
        self._takes_parts_alone = not self._shows_text() and self._shows_text(in_parts=True)

    def _shows_text(self, *, in_parts: bool = False) -> bool:
        """True if the template's output contains the text of a message. Some templates of models with pictures need
        parts.
        """
        turn: dict[str, Any] = {"role": "user", "content": "ShownText"}
        variables = {"tools": None, "documents": None, **self._variables, "add_generation_prompt": True}
        try:
            text = self._filled(
                DEFAULT, self._source, {**variables, "messages": [_in_parts(turn) if in_parts else turn]}
            )
        except (ChatError, TemplateLimit):
            return False
        return "ShownText" in text and "'ShownText'" not in text

    def messages(self, prompt: str | Sequence[Message]) -> list[dict[str, Any]]:
        """Return the conversation of a prompt: text is the user's turn; the system prompt comes first."""
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(turn) for turn in prompt]
        if self._system_prompt and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self._system_prompt})
        return turns

    def render(self, prompt: str | Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """Render the text that the model continues: the conversation and the generation prompt.

        Raises:
            ChatError: the template refuses the messages, or fails.
            TemplateLimit: the template takes more than the limits of `template_sandbox`.
        """
        return self.render_turns(self.messages(prompt), tools)

    def render_turns(self, turns: Sequence[Message], tools: Sequence[Message] = (), *, to_answer: bool = True) -> str:
        """Like `render`, without adding the system prompt; with `to_answer=False` also without the generation prompt.

        Raises:
            ChatError, TemplateLimit: as for `render`.
        """
        filled = {"tools": None, "documents": None, **self._variables}
        if tools:
            filled["tools"] = [dict(tool) for tool in tools]
        shown = [_normalised(turn) for turn in without_pictures(turns)]
        if self._takes_parts_alone:
            shown = [_in_parts(turn) for turn in shown]
        filled |= {"messages": shown, "add_generation_prompt": to_answer}
        if tools and self.differs_with_tools:
            return self._filled(TOOL_USE, self.source_with_tools, filled)
        return self._filled(DEFAULT, self._source, filled)

    def conversation(
        self,
        tokenizer: ChatTokenizer,
        turns: Sequence[Message],
        tools: Sequence[Message] = (),
        *,
        pictures: PictureRules | None = None,
        to_answer: bool = True,
        until: str = "",
    ) -> Rendered:
        """Return token ids of messages; names of control tokens within them stay text.

        Args:
            turns: the messages, with their pictures loaded.
            tools: tools that the template describes.
            pictures: rules for pictures; None if the model takes none.
            to_answer: True adds the generation prompt.
            until: text of the messages from which on nothing is returned; empty: return all.

        Raises:
            ChatError: the template refuses them, or leaves `until` out.
            ValueError: the tokenizer does not know a character, or the template or the tokenizer does not show the
                pictures.
        """
        plain = without_pictures(turns)
        stand_ins = StandIns(tokenizer, plain, tools)
        text = self.render_turns(stand_ins.put(plain), stand_ins.put(tools), to_answer=to_answer)
        if until:
            text, found, _ = text.rpartition(until)
            if not found:
                raise ChatError("the chat template leaves out the message that is to be continued")
        return stand_ins.encoded(text, [*pictures_of(turns)], pictures)

    def _filled(self, name: str, source: str, variables: Mapping[str, Any] | None) -> str:
        try:
            return render(source, variables, datetime.now())
        except TemplateRefusal as error:
            raise ChatError(f"the chat template {error}") from None
        except TemplateLimit as error:
            raise TemplateLimit(f"the chat template {name!r} {error}; set dataset.chat_template to another") from None


def _normalised(turn: Message) -> dict[str, Any]:
    """Return the message in the form that templates read, as transformers does.

    Keys that are None are removed. Reasoning is stored under the names that templates use. Arguments of calls in
    OpenAI's form (JSON in a string) become objects.
    """
    given = {key: value for key, value in turn.items() if value is not None}
    if calls := given.get("tool_calls"):
        given["tool_calls"] = [_with_arguments_read(call) for call in calls]
    reasoning = next((given[key] for key in ("reasoning_content", "thinking", "reasoning") if key in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _in_parts(turn: Message) -> dict[str, Any]:
    content = turn.get("content")
    return {**turn, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(turn)


def _with_arguments_read(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:  # the model's text need not be JSON; some templates can show it unchanged
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class StandIns:
    """The names of control tokens in some values, and their stand-ins while the values are rendered."""

    def __init__(self, tokenizer: ChatTokenizer, *values: Any) -> None:
        self._tokenizer = tokenizer
        names = sorted(filter(None, tokenizer.control_tokens), key=len, reverse=True)
        self._name = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._meant: dict[str, str] = {}
        found = sorted({name for value in values for text in _texts(value) for name in self._name.findall(text)})
        if found:
            texts = [text for value in values for text in _texts(value)]
            head = next(h for h in map("CtlTok{}x".format, itertools.count()) if not any(h in text for text in texts))
            self._meant = {f"{head}{number}z": name for number, name in enumerate(found)}
        self._stand_in = re.compile("|".join(self._meant) or r"(?!)")

    def put(self, value: Any) -> Any:
        """Return `value` (text, lists and mappings) with stand-ins for the names of control tokens."""
        if not self._meant:
            return value
        number_of = {name: number for number, name in self._meant.items()}

        def replaced(part: Any) -> Any:
            if isinstance(part, str):
                return self._name.sub(lambda match: number_of[match[0]], part)
            if isinstance(part, Mapping):
                return {key: replaced(item) for key, item in part.items()}
            if isinstance(part, Sequence) and not isinstance(part, bytes):
                return [replaced(item) for item in part]
            return part

        return replaced(value)

    def text(self, rendered: str) -> str:
        """Return `rendered` with the original names in place of the stand-ins."""
        return self._stand_in.sub(lambda match: self._meant[match[0]], rendered)

    def encode(self, rendered: str) -> list[int]:
        """Encode the rendered text; only the template's own control tokens become control tokens.

        Raises:
            ValueError: the tokenizer does not know a character.
        """
        if not self._meant:
            return self._tokenizer.encode(rendered)
        ids: list[int] = []
        pending = ""
        position = 0
        for match in itertools.chain(self._name.finditer(rendered), [None]):
            stretch = rendered[position : match.start() if match else len(rendered)]
            control = match[0] if match else ""
            position = match.end() if match else position
            if self._stand_in.search(stretch):
                ids += self._tokenizer.encode(pending) + self._tokenizer.encode_plain(self.text(stretch))
                pending = control
            else:
                pending += stretch + control
        return ids + self._tokenizer.encode(pending)

    def encoded(self, rendered: str, pictures: Sequence[Picture], rules: PictureRules | None) -> Rendered:
        """Encode the text that the template made from messages with `pictures`.

        Raises:
            ValueError: as for `encode`, or the template or the tokenizer does not show the pictures.
        """
        ids = self.encode(expanded(rendered, pictures, rules))
        return Rendered(ids, placed(ids, pictures, rules))


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [text for item in value for text in _texts(item)]
    return []
