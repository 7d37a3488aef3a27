"""Context of an answer: the ids of a recorded conversation and those that follow, or of a new rendering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.api import Message, Prompt, ToolSchema, messages_of
from asyncrl.api.picture import PlacedPicture
from asyncrl.plugins.chat.conversation import Turn
from asyncrl.plugins.chat.settings import Reasoning
from asyncrl.plugins.chat.template import ChatFormat
from asyncrl.plugins.chat.turn_recorder import TurnRecorder
from asyncrl.plugins.datasets.templates.chat_template import ChatError, wrong_turns
from asyncrl.plugins.datasets.templates.picture_parts import Rendered


@dataclass(frozen=True, slots=True)
class Context:
    """Context of an answer: a recorded turn and the ids after it, or the ids of the whole conversation."""

    parent: Turn | None
    given: Rendered
    messages: tuple[Message, ...]
    before: Turn | None
    """The recorded turn that the messages begin with. It is also `parent` if its ids are kept."""

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.parent.ids, *self.given.ids) if self.parent else tuple(self.given.ids)

    @property
    def pictures(self) -> tuple[PlacedPicture, ...]:
        """The pictures of the context, at spans of `ids`."""
        if self.parent is None:
            return self.given.pictures
        length = len(self.parent.ids)
        return (*self.parent.pictures, *(placed.shifted(length) for placed in self.given.pictures))


def find_context(
    chat: ChatFormat,
    recorder: TurnRecorder,
    prompt: Prompt,
    reasoning: Reasoning,
    messages: Sequence[Message],
    tools: Sequence[ToolSchema],
    *,
    continue_last: bool = False,
) -> Context:
    """Return the context of the answer to `messages`: a recorded conversation, extended, or a new rendering.

    Args:
        reasoning: treatment of earlier reasoning that the template hides.
        continue_last: the answer continues the last message, which is always rendered anew.

    Raises:
        ChatError: the messages are not a conversation, or the template refuses them.
    """
    if (wrong := wrong_turns(messages)) is not None:
        raise ChatError(f"these messages are not a valid conversation: {wrong}")
    if continue_last:
        turn, _ = recorder.find(messages[:-1], tools)
        return Context(None, chat.continued(with_reasoning(turn, messages), tools), tuple(messages[:-1]), turn)
    turn, covered = recorder.find(messages, tools)
    if turn is not None and (given := _extension(chat, reasoning, turn, messages, covered, tools)) is not None:
        return Context(turn, given, tuple(messages[covered:]), turn)
    if not tools and "prompt" in prompt.data and list(messages) == messages_of(prompt):
        first = Rendered([*prompt.input_ids], prompt.pictures)  # the prompt may have been shortened
        return Context(None, first, tuple(messages), None)
    given = chat.begin(with_reasoning(turn, messages), tools)
    return Context(None, given, tuple(messages), turn)


def _extension(
    chat: ChatFormat,
    reasoning: Reasoning,
    turn: Turn,
    messages: Sequence[Message],
    covered: int,
    tools: Sequence[ToolSchema],
) -> Rendered | None:
    """Return the ids that `messages[covered:]` append to those of `turn`; None if the turn cannot be extended."""
    assert turn.reply is not None, "a turn that messages find has a message"
    bridge = chat.bridge(turn.reply.message, messages[covered:], tools)
    if bridge is None:
        return None
    if reasoning is Reasoning.branch:
        reasoned = _reasoned(turn)
        if reasoned and chat.hides_reasoning_of(messages, tools, reasoned):
            return None  # rendered again, as the template shows the history
    end_id, sampled = chat.end_id(tools), turn.completion.token_ids
    assert end_id is not None, "only a template with an end-of-turn token has bridges"
    if sampled and sampled[-1] == end_id:
        return bridge
    return Rendered([end_id, *bridge.ids], tuple(placed.shifted(1) for placed in bridge.pictures))


def _reasoned(turn: Turn) -> list[int]:
    """Return the positions of the answers in `turn`'s conversation whose reasoning is part of its ids."""
    positions, said = [], 0
    for each in turn.path:
        said += len(each.messages)
        if each.reply is not None and each.reply.reasoning:
            positions.append(said)
        said += 1
    return positions


def with_reasoning(turn: Turn | None, messages: Sequence[Message]) -> list[Message]:
    """Return `messages`, with recorded reasoning added to answers that the agent passes without it."""
    whole = list(messages)
    for position, said in enumerate(turn.conversation if turn else ()):
        reasoning = said.get("reasoning_content")
        if reasoning and not whole[position].get("reasoning_content"):
            whole[position] = {**whole[position], "reasoning_content": reasoning}
    return whole
