"""Compaction: a conversation that has become long is summarised by the policy, and continues from the summary.

The request for the summary extends the conversation. So the summary is the last answer of that sample, carries loss
and has the episode's reward. The conversation that follows is a new sample: the task with the summary below it, and the
last turns verbatim, which are context there. A turn is an answer with what followed it, such as results of tools.

For agents of your own, with a conversation that began with `messages_of(prompt)`:

    compaction = CompactionRules(at=0.75).begin(prompt, client)
    while ...:
        messages = await compaction.shortened(messages)
        reply = await client.chat(messages)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Self

from asyncrl.api import ChatClient, ChatFinish, Message, Prompt, ToolSchema, messages_of
from asyncrl.config.setting import did_you_mean
from asyncrl.data.chat_template import ChatError
from asyncrl.data.picture_parts import joined

_log = logging.getLogger(__name__)
QUESTION = (
    "This conversation is nearly as long as it may be. Summarise it so that you can go on from your summary alone: "
    "what you did, what you found, and what is left to do. Answer with the summary only."
)
HEADING = "Your summary of the conversation so far:"


@dataclass(frozen=True, slots=True)
class CompactionRules:
    """When and how a conversation is compacted.

    Raises:
        ValueError: a number is out of range.
    """

    at: float = 0.75
    """Share of the context that the conversation has reached."""
    max_times: int = 4
    """Limit on summaries asked for in an episode; after them the conversation ends at the context's end, as without."""
    summary_tokens: int = 256
    """Limit on the tokens of a summary. A summary that reaches it is used as far as it goes, unless it has no text."""
    keep_turns: int = 1
    """Turns at the end that are repeated verbatim, if the new conversation then stays below `at`."""
    question: str = QUESTION
    """The message that asks for the summary."""

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Self:
        """Return the rules of an agent's argument `compaction`.

        Raises:
            ValueError: an unknown name, or a number out of range.
        """
        names = [field.name for field in fields(cls)]
        for name in args:
            if name not in names:
                raise ValueError(f"compaction has no {name!r}{did_you_mean(name, names)}; it has {', '.join(names)}")
        return cls(**args)

    def begin(self, prompt: Prompt, client: ChatClient, tools: Sequence[ToolSchema] = ()) -> Compaction:
        """Return the compactions of an episode that begins; see `Compaction`."""
        return Compaction(self, prompt, client, tools)

    def __post_init__(self) -> None:
        if not 0.0 < self.at < 1.0:
            raise ValueError(f"compaction at={self.at}: it is a share of the context, set it above 0 and below 1")
        for name, least in (("max_times", 1), ("summary_tokens", 1), ("keep_turns", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"compaction {name}={getattr(self, name)}: give at least {least}")


class Compaction:
    """The compactions of one episode.

    Args:
        prompt: the episode's; its messages are the task, which every conversation begins with.
        tools: those that the conversation offers.

    Raises:
        ValueError: conversations have no limit, so there is no share of it.
    """

    def __init__(
        self, rules: CompactionRules, prompt: Prompt, client: ChatClient, tools: Sequence[ToolSchema] = ()
    ) -> None:
        if not client.max_context:
            raise ValueError("compaction: conversations have no limit of tokens; set generation.context_length")
        self._rules, self._client, self._tools = rules, client, tools
        self._task, self._sampling = messages_of(prompt), replace(prompt.sampling, max_new_tokens=rules.summary_tokens)
        self._asked = self._times = self._cut = 0

    @property
    def metrics(self) -> dict[str, float]:
        """`compactions`, and `cut_summaries`: those that reached the limit of tokens, and those without text, after
        which nothing is compacted.
        """
        return {"compactions": float(self._times), "cut_summaries": float(self._cut)}

    async def shortened(self, messages: Sequence[Message]) -> list[Message]:
        """Return `messages`, whose last one the policy is to answer; from the threshold on, what replaces them.

        If the request for a summary does not fit, it leaves out the last turn, which is then repeated verbatim. If it
        still does not fit, or the chat template refuses it, the conversation stays as it is, and ends at its limit. It
        also stays as it is if the summary has no text, such as one that is cut off in its reasoning.
        """
        whole, rules, first = list(messages), self._rules, len(self._task)
        turns = [at for at, each in enumerate(whole) if at >= first and each["role"] == "assistant"]
        if not turns or self._asked == rules.max_times or not self._is_long(whole):
            return whole
        for end in (len(whole), *turns[1:][-1:]):
            asked = _followed(whole[:end], rules.question)
            try:
                if self._tokens(asked) + rules.summary_tokens <= self._client.max_context:
                    break
            except ChatError as error:
                _report(str(error))
        else:
            return whole
        reply = await self._client.chat(asked, tools=self._tools, sampling=self._sampling, tool_choice="none")
        if not reply.completion.token_ids:  # at a limit of turns or of the tools' time
            return whole
        self._asked += 1
        has_text = bool(reply.content.strip())
        self._cut += reply.finish_reason is ChatFinish.length or not has_text
        if not has_text:
            return whole
        self._times += 1
        last, summary = self._task[-1], f"\n\n{HEADING}\n{reply.content}"
        begun: list[Message] = [*self._task[:-1], {**last, "content": joined(last.get("content") or "", summary)}]
        kept = max(rules.keep_turns, int(end < len(whole)))
        for start in turns[-kept:] if kept else ():
            if not self._is_long(shorter := [*begun, *whole[start:]]):
                return shorter
        return begun

    def _tokens(self, messages: Sequence[Message]) -> int:
        return len(self._client.prompt_ids(messages, tools=self._tools))

    def _is_long(self, messages: Sequence[Message]) -> bool:
        return self._tokens(messages) >= self._rules.at * self._client.max_context


def _followed(messages: Sequence[Message], question: str) -> list[Message]:
    """Return `messages` with the question at the end; many templates refuse two messages of the user in a row."""
    *before, last = messages
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": question}]
    return [*before, {**last, "content": joined(last.get("content") or "", f"\n\n{question}")}]


@cache
def _report(problem: str) -> None:
    """Log, once for each problem, that conversations are not compacted."""
    _log.warning("a conversation is not compacted: its request for a summary cannot be rendered: %s", problem)
