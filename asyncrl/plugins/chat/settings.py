"""Settings of chat, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import TYPE_CHECKING

from asyncrl.config import signatures
from asyncrl.config.setting import not_a_choice, setting

if TYPE_CHECKING:
    from asyncrl.config.experiment import ExperimentConfig

AUTO = "auto"


class Reasoning(StrEnum):
    """What becomes of earlier reasoning where the chat template leaves it out of the history."""

    keep = auto()
    """The conversation is extended with it: one sample, and the policy sees its earlier reasoning."""
    branch = auto()
    """The policy sees what the template shows: the conversation goes on in another sample, rendered anew."""


class DriftCheck(StrEnum):
    """Whether extended conversations are compared with what rendering and tokenising them anew would give."""

    off = auto()
    """They are not."""
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
        "compare extended conversations with rendering them anew: off, tolerant (count differences), strict (fail)",
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


def turns(config: ExperimentConfig) -> int:
    """How many answers a conversation has room for: as `rollout.chat.max_turns` or the agent's own `max_turns` say,
    else 1.
    """
    own = _agents_own(config)
    limit = config.rollout.chat.max_turns
    return limit or own or 1


def needed_context(config: ExperimentConfig) -> int:
    """Tokens of the longest conversation that prompt, answers and turns allow."""
    answer = config.rollout.sampling.max_new_tokens
    between = answer + config.rollout.chat.feedback_tokens
    return config.dataset.max_prompt_tokens + answer + (turns(config) - 1) * between


def check(config: ExperimentConfig) -> Iterator[str]:
    """What is wrong with these settings, each as `setting=value: what is wrong; what to do`."""
    from asyncrl.plugins.chat.parsers import FORMATS

    chat = config.rollout.chat
    if chat.parser not in (AUTO, *FORMATS):
        yield not_a_choice("rollout.chat.parser", chat.parser, (AUTO, *FORMATS))
    own = _agents_own(config)
    if 0 < chat.max_turns < own:
        yield (
            f"rollout.chat.max_turns={chat.max_turns}: agent.args.max_turns={own} is more, and would never be reached; "
            f"use 0 (no limit) or {own} or more, or fewer turns of the agent"
        )


def _agents_own(config: ExperimentConfig) -> int:
    """The agent's parameter `max_turns`, given or default; 0 where it has none."""
    own = signatures.argument(config.agent.path, config.agent.args, "max_turns")
    return own if isinstance(own, int) and own > 0 else 0
