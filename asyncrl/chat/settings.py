"""Settings of chat."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto

from asyncrl.config.setting import setting

AUTO = "auto"


class Reasoning(StrEnum):
    """Treatment of earlier reasoning that the chat template leaves out of the history."""

    keep = auto()
    """The conversation is extended with it: one sample, and the policy sees its earlier reasoning."""
    branch = auto()
    """The policy sees the template's history: the conversation is rendered again and continues as another sample."""


class DriftCheck(StrEnum):
    """Comparison of extended conversations with the result of rendering and tokenising them again."""

    off = auto()
    """No comparison."""
    tolerant = auto()
    """Differences are counted, as chat/drift_text and chat/drift_tokens."""
    strict = auto()
    """A difference fails the rollout."""


class Repeated(StrEnum):
    """Answers that an agent threw away: it asked the same again, and no call continued them."""

    keep = auto()
    """They are samples as others are."""
    drop = auto()
    """They are not trained."""


@dataclass
class ChatConfig:
    """Conversations in messages; docs/chat.md."""

    parser: str = setting(
        AUTO,
        "format of tool calls in answers, as in the table of docs/tools.md; auto: the one that reads the calls that "
        "the chat template writes",
    )
    reasoning: Reasoning = setting(
        Reasoning.keep,
        "earlier reasoning that the chat template drops from the history. keep: the policy still sees it; branch: the "
        "conversation continues without it, as another sample",
    )
    drift: DriftCheck = setting(
        DriftCheck.off,
        "compare extended conversations with a new rendering: off, tolerant (count differences), strict (a difference "
        "fails the rollout)",
    )
    repeated: Repeated = setting(
        Repeated.keep,
        "answers that the agent threw away: it asked the same messages with the same tools again after the answer, and "
        "continued that in no call. keep: they are trained; drop: they are not",
    )
    max_turns: int = setting(0, "limit on the policy's answers in one conversation; 0: none", unit="turns", minimum=0)
    feedback_tokens: int = setting(
        256,
        "tokens reserved for the text between two answers, if the context length is derived from the turns",
        unit="tokens",
        minimum=0,
    )
    max_tool_s: float = setting(
        0.0, "limit on the total time of tools in one conversation; 0: none", unit="s", minimum=0.0
    )
