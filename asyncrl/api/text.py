"""The tokenizer, the text of an answer, and the thoughts in it.

All built-in agents score the same text, that of `answer_text`: what the model wrote in its last turn, thoughts, calls
and a stop string included, without control tokens. If the chat template opened the thoughts (`<think>` at the end of
the prompt), the text begins with that. Verdicts on an answer look behind its thoughts, `without_thoughts`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol


class Tokenizer(Protocol):
    """A text codec with an end-of-sequence token."""

    @property
    def eos_token_id(self) -> int:
        """Id of the token that ends an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without added special tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, without special tokens."""
        ...


_PAIRS: tuple[tuple[str, str], ...] = (
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
    ("◁think▷", "◁/think▷"),
)
"""Marks of thoughts besides the XML ones: of Magistral, Command A, Sky-T1, Apertus, Gemma 4, Kimi-VL."""
_XML = r"(?:[a-z]+[:_])?(?:think(?:ing)?|thoughts?|reasoning)"
"""`<think>`, `<thinking>`, `<thought>`, `<reasoning>`, `<seed:think>`, `<longcat_think>`."""
_MARK = re.compile(
    rf"(?=[<\[◁])(?:<(?P<open>{_XML})(?:\s[^<>]{{0,80}})?>|</(?P<close>{_XML})>|"  # most characters begin no mark
    + "|".join(f"(?P<o{n}>{re.escape(begin)})|(?P<c{n}>{re.escape(end)})" for n, (begin, end) in enumerate(_PAIRS))
    + ")",
    re.IGNORECASE,
)
_ALWAYS = re.compile(r"(?:[a-z]+[:_])?think")
"""XML marks that a model writes for thoughts alone; others may be what a prompt asks for."""
_HARMONY, _FINAL = "<|channel|>", re.compile(r"<\|channel\|>final\b[^<]*<\|message\|>")
"""gpt-oss writes in channels, of which `final` is the answer."""
_HARMONY_TOKENS = (_HARMONY, "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|constrain|>")
_ROLE = re.compile(r"\s*\w*\s*")
"""What a template may put between a control token and the opening of the thoughts."""
_MOST_OPENING = 4096
"""Tokens at a prompt's end among which thoughts may have been opened."""


def answer_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> str:
    """Return the text of an answer, as rewards read it.

    Args:
        tokenizer: the run's tokenizer.
        prompt_ids: all tokens before the answer.
        token_ids: the answer's tokens.
    """
    return opened_thoughts(tokenizer, prompt_ids) + text_of_tokens(tokenizer, token_ids)


def text_of_tokens(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of `token_ids` without control tokens, except for those that mark thoughts."""
    control = _control_tokens(tokenizer)
    marks = {token for name, token in control.items() if name in _HARMONY_TOKENS or _is_mark(name)}
    if marks.isdisjoint(token_ids):
        return tokenizer.decode(token_ids)
    left_out = {*control.values()} - marks
    decode_all: Callable[[Sequence[int]], str] = tokenizer.decode_all  # type: ignore[attr-defined]
    return decode_all([token for token in token_ids if token not in left_out])


def opened_thoughts(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str:
    """Return the end of the prompt from where it opens the answer's thoughts; empty if it does not.

    They are open if a mark that opens them is the prompt's end, or the beginning of what follows its last control
    token, after the role.
    """
    control = _control_tokens(tokenizer)
    boundaries = {token for name, token in control.items() if not _is_mark(name)}
    last = reversed(prompt_ids[-_MOST_OPENING:])
    tail = list(itertools.takewhile(lambda token: token not in boundaries, last))[::-1]
    text = text_of_tokens(tokenizer, tail)
    marks = list(_MARK.finditer(text))
    if not marks or not opens(marks[-1]):
        return ""
    begin, end = marks[-1].span()
    after_role = len(tail) < len(prompt_ids) and _ROLE.fullmatch(text[:begin]) is not None
    return text[begin:] if after_role or not text[end:].strip() else ""  # else the prompt speaks of the mark


def without_thoughts(text: str) -> str:
    """Return `text` without the thoughts in it, and without blanks at both ends if it had any.

    Thoughts last from a mark that opens them to the one that closes them, or to the end of a text that was cut off.
    Without an opening, all before the closing mark is thoughts.
    """
    if _HARMONY in text:
        finals = list(_FINAL.finditer(text))
        return re.split(r"<\|(?:end|return|start)\|>", text[finals[-1].end() :])[0].strip() if finals else ""
    kept: list[str] = []
    at, opened = 0, None
    for mark in _MARK.finditer(text):
        kind = _kind(mark)
        if opened is None and opens(mark):
            kept.append(text[at : mark.start()])
            opened = kind
        elif opened in (None, kind) and not opens(mark):
            kept, opened = kept if opened else [], None
            at = mark.end()
    if opened is None and at == 0:
        return text
    return "".join(kept + ([text[at:]] if opened is None else [])).strip()


def find_mark(text: str, at: int, of: re.Match[str] | None = None) -> re.Match[str] | None:
    """Return the first mark of thoughts in `text` from position `at` on; None if there is none.

    Marks that a prompt may ask for, such as `<reasoning>`, are none here: an answer with them stays as it is.

    Args:
        of: a mark that opens thoughts, of which the closing one is searched.
    """
    for mark in _MARK.finditer(text, at):
        name = mark["open"] or mark["close"]
        if of is not None:
            if not opens(mark) and _kind(mark) == _kind(of):
                return mark
        elif name is None or _ALWAYS.fullmatch(name.lower()):
            return mark
    return None


def opens(mark: re.Match[str]) -> bool:
    """True if a mark opens thoughts, False if it closes them."""
    return str(mark.lastgroup).startswith("o")


def _kind(mark: re.Match[str]) -> str:
    """Return what a mark that opens and the one that closes have in common."""
    group = str(mark.lastgroup)
    return mark[group].lower() if group in ("open", "close") else group[1:]


@lru_cache(4096)
def _is_mark(name: str) -> bool:
    return _MARK.fullmatch(name) is not None or name in ("<|channel>", "<channel|>")


def _control_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    found: Mapping[str, int] = getattr(tokenizer, "control_tokens", {})
    return found
