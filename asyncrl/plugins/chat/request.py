"""The life of a conversation as a state machine: pure values, no clocks, no processes.

    pending --begin--> running --answered--> calling_tools --begin--> running ...
                          |                       |
                          +--> completed <--------+        any but the ends --failed--> failed
                                  |
                                  +--begin--> running      for another message, unless a limit was reached

A `ChatRequest` is immutable, and every step returns the next one, so a conversation that forks needs no copy. A step
that the phase does not allow raises `IllegalStep`: an error of the program, not of the model.

A limit ends a conversation when its next answer would begin: `begin` then returns a completed request whose finish is
`length` and whose `over` names the limit and its setting. Everything sampled before is kept. An answer that is cut off
at `max_new_tokens` finishes with `length` too, but another answer may follow it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum, auto


class Phase(StrEnum):
    """State of a conversation."""

    pending = auto()
    """Nothing was sampled yet."""
    running = auto()
    """The policy answers."""
    calling_tools = auto()
    """Its answer called tools; their results are awaited."""
    completed = auto()
    """It ended; `finish` has the reason."""
    failed = auto()
    """It cannot continue; `over` has the reason."""


class Finish(StrEnum):
    """End of the latest answer or of the conversation."""

    stop = auto()
    """The policy ended its answer, or a stop string did."""
    length = auto()
    """At a limit."""
    tool_calls = auto()
    """The policy ended its answer and calls tools."""
    abort = auto()
    """It was aborted from outside."""


class IllegalStep(RuntimeError):
    """A step that the phase does not allow."""


@dataclass(frozen=True, slots=True)
class ChatLimits:
    """Limits of a conversation; 0 is no limit."""

    max_turns: int = 0
    """Answers of the policy."""
    max_context: int = 0
    """Tokens of the whole conversation, prompt and answers."""
    max_tool_s: float = 0.0
    """Seconds that its tools take; the calls of a turn run together and count as the longest of them."""
    context_setting: str = "generation.context_length"
    """Setting that `max_context` comes from."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation's state; see the module's docstring.

    `turns` is the number of answers, `tokens` the conversation's tokens after the last one, `tool_s` its tools'
    seconds.
    """

    limits: ChatLimits = ChatLimits()
    phase: Phase = Phase.pending
    turns: int = 0
    tokens: int = 0
    tool_s: float = 0.0
    finish: Finish | None = None
    over: str = ""

    def forked(self) -> ChatRequest:
        """Return the state of another branch from here: turns, tokens and tool time already used still count."""
        return ChatRequest(self.limits, turns=self.turns, tool_s=self.tool_s)

    @property
    def ended(self) -> bool:
        """True if no further answer can follow: it failed, was aborted, or reached a limit."""
        return bool(self.over)

    @property
    def room(self) -> int | None:
        """Tokens that the running answer may take; None: no limit."""
        return self.limits.max_context - self.tokens if self.limits.max_context else None

    def begin(self, context_tokens: int) -> ChatRequest:
        """Start an answer to a conversation of `context_tokens`. Return the running state, or a completed one at a
        limit.

        Raises:
            IllegalStep: it is running or has ended.
        """
        if self.ended or self.phase is Phase.running:
            raise IllegalStep(f"an answer cannot begin: the conversation is {self._where()}")
        over = self._met(context_tokens)
        if over:
            return replace(self, phase=Phase.completed, tokens=context_tokens, finish=Finish.length, over=over)
        return replace(self, phase=Phase.running, tokens=context_tokens, finish=None)

    def answered(self, finish: Finish, tokens: int) -> ChatRequest:
        """Record that the policy's answer ended with `finish`, and the conversation then has `tokens` tokens.

        Raises:
            IllegalStep: it was not running.
        """
        if self.phase is not Phase.running:
            raise IllegalStep(f"an answer cannot end: the conversation is {self._where()}")
        full = finish is Finish.length and self.room is not None and tokens >= self.room
        over = self._context_message() if full else ""
        phase = Phase.calling_tools if finish is Finish.tool_calls else Phase.completed
        return replace(self, phase=phase, turns=self.turns + 1, tokens=self.tokens + tokens, finish=finish, over=over)

    def tools_returned(self, seconds: float) -> ChatRequest:
        """Record the seconds of the turn's tools. The phase stays, because the policy has not begun its next answer.

        Raises:
            IllegalStep: no tools were called.
        """
        if self.phase is not Phase.calling_tools:
            raise IllegalStep(f"no tools can return: the conversation is {self._where()}")
        return replace(self, tool_s=self.tool_s + seconds)

    def aborted(self, why: str) -> ChatRequest:
        """Abort the conversation from outside; one that has ended stays unchanged."""
        if self.ended:
            return self
        return replace(self, phase=Phase.completed, finish=Finish.abort, over=why)

    def failed(self, why: str) -> ChatRequest:
        """Mark the conversation as failed.

        Raises:
            IllegalStep: it has ended.
        """
        if self.ended:
            raise IllegalStep(f"it cannot fail: the conversation is {self._where()}")
        return replace(self, phase=Phase.failed, over=why)

    def _met(self, context_tokens: int) -> str:
        """Return the limit that leaves no room for another answer; empty if there is room."""
        limits = self.limits
        if limits.max_turns and self.turns >= limits.max_turns:
            return f"rollout.chat.max_turns={limits.max_turns}"
        if limits.max_context and context_tokens >= limits.max_context:
            return self._context_message()
        if limits.max_tool_s and self.tool_s >= limits.max_tool_s:
            return f"rollout.chat.max_tool_s={limits.max_tool_s:g}"
        return ""

    def _context_message(self) -> str:
        return f"{self.limits.context_setting}={self.limits.max_context}"

    def _where(self) -> str:
        ended = f" ({self.finish})" if self.finish else ""
        return f"{self.phase}{ended}{f', over {self.over}' if self.over else ''}"
