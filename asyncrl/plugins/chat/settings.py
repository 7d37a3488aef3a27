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


@dataclass
class ChatConfig:
    """Conversations in messages; docs/chat.md."""

    parser: str = setting(
        AUTO,
        "how tool calls and reasoning are read: hermes, llama3, json, xml, none; auto: as the chat template writes",
    )
    reasoning: Reasoning = setting(
        Reasoning.keep,
        "earlier reasoning that the chat template drops from the history: keep it in view, or branch off a sample "
        "without it",
    )
    drift: DriftCheck = setting(
        DriftCheck.off,
        "compare extended conversations with a rendering from scratch: off, tolerant (count differences), strict "
        "(fail)",
    )
    max_turns: int = setting(0, "answers of the policy in one conversation; 0: no limit", unit="turns", minimum=0)
    feedback_tokens: int = setting(
        256,
        "room for what comes between two answers, where the context length is derived from the turns",
        unit="tokens",
        minimum=0,
    )
    max_tool_s: float = setting(
        0.0, "time that the tools of one conversation may take in all; 0: no limit", unit="s", minimum=0.0
    )
