"""How messages become token ids, and how a conversation goes on by appending ids."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.chat.parsers import Parser
from asyncrl.datasets.prompts import PromptFormat


@dataclass(frozen=True)
class ChatFormat:
    """A run's chat format: the prompts' template and tokenizer, and the parser of answers."""

    prompts: PromptFormat
    parser: Parser
