"""From the text that a model sampled to reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.api import ToolCall, ToolSchema
from asyncrl.datasets.tokenizers import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer in its parts. `malformed` counts calls that could not be read; their text stays in `content`."""

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    malformed: int = 0


class Parser(Protocol):
    """Reads one format of reasoning and calls."""

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> Parsed:
        """The parts of `text`, an answer with its control tokens but for the one that ended it. Never raises.

        The ids of calls need to be unique within `text` only.
        """
        ...


class PlainParser:
    """Everything is content, but for what stands between `<think>` and `</think>` at its beginning."""

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> Parsed:
        """`text` without its reasoning."""
        head, end, rest = text.partition("</think>")
        begin = head.lstrip()
        if not end or not begin.startswith("<think>"):
            return Parsed(text)
        return Parsed(rest.lstrip("\n"), begin.removeprefix("<think>").strip("\n"))


def choose(template_source: str, tokenizer: ChatTokenizer) -> Parser:
    """The parser of the format that a chat template writes."""
    return PlainParser()


def parser(name: str) -> Parser:
    """The parser called `name`.

    Raises:
        ValueError: there is none; the message lists them.
    """
    if name != "none":
        raise ValueError(f"rollout.chat.parser={name!r}: no such parser; use auto or none")
    return PlainParser()
