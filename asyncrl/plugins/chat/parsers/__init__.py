"""Formats of tool calls, one per file: a model's text becomes content, reasoning and calls.

| format   | written by                 | a call                                                                   |
|----------|----------------------------|--------------------------------------------------------------------------|
| `hermes` | Hermes, Qwen2.5, Qwen3     | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`               |
| `xml`    | Qwen3-Coder                | `<function=f><parameter=a>text</parameter></function>`, typed by schema  |
| `llama3` | Llama 3                    | the answer is `{"name": ..., "parameters": {...}}`, several with `;`     |
| `json`   | others                     | the answer is such an object, or a list of them, fenced or not           |
| `none`   | models without tools       | there are none                                                           |

No input raises. Text that begins like a call but is not a valid one stays content and counts as malformed; nothing is
guessed or repaired. Calls within the reasoning (`<think>`) do not count.
"""

from __future__ import annotations

from asyncrl.api.tokenizer import Tokenizer
from asyncrl.plugins.chat.parsers.bare import BareFormat
from asyncrl.plugins.chat.parsers.base import CallFormat, Parsed, Parser
from asyncrl.plugins.chat.parsers.hermes import HermesFormat
from asyncrl.plugins.chat.parsers.xml import XmlFormat

__all__ = ["FORMATS", "Parsed", "Parser", "choose", "parser", "unsupported"]

FORMATS: dict[str, CallFormat | None] = {
    "hermes": HermesFormat(),
    "llama3": BareFormat("parameters", tag="<|python_tag|>", separator=";"),
    "json": BareFormat("arguments", lists=True),
    "xml": XmlFormat(),
    "none": None,
}
_FOREIGN = {
    "[TOOL_CALLS]": "Mistral",
    "<｜tool▁calls▁begin｜>": "DeepSeek",
    "<|tool_calls_section_begin|>": "Kimi",
    "<arg_key>": "GLM",
    "<|channel|>": "gpt-oss",
    "<minimax:tool_call>": "MiniMax",
}
"""Marks of templates whose formats are not supported."""


def parser(name: str) -> Parser:
    """Return the parser of the format `name`.

    Raises:
        ValueError: there is no such format.
    """
    if name not in FORMATS:
        raise ValueError(f"no format of tool calls is called {name!r}: choose {', '.join(FORMATS)}")
    return Parser(name, FORMATS[name])


def unsupported(template_source: str | None) -> str | None:
    """Return whose format of tool calls the template uses, if that format is not supported; otherwise None."""
    return next((whose for mark, whose in _FOREIGN.items() if mark in (template_source or "")), None)


def choose(template_source: str | None, tokenizer: Tokenizer | None = None) -> Parser:
    """Return the parser of the format that a chat template asks the model for.

    It is `none` if the template does not mention tools, or asks for a format that is not supported (see `unsupported`).

    Args:
        template_source: the Jinja template; None without one.
        tokenizer: decides by its special tokens for calls if the template does not.
    """
    source = template_source or ""
    if "tools" not in source or unsupported(source) is not None:
        return parser("none")
    if "<function=" in source:
        return parser("xml")
    if "<tool_call>" in source:
        return parser("hermes")
    if "<|python_tag|>" in source or '"parameters": ' in source or _is_token(tokenizer, "<|python_tag|>"):
        return parser("llama3")
    return parser("hermes" if _is_token(tokenizer, "<tool_call>") else "json")


def _is_token(tokenizer: Tokenizer | None, text: str) -> bool:
    if tokenizer is None:
        return False
    try:
        return len(tokenizer.encode(text)) == 1
    except ValueError:  # a character that the tokenizer does not know
        return False
