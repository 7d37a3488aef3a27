"""Tree of the answers of one episode; each branch is a conversation.

A `Turn` is one answer of the policy, with the token ids between the previous answer and this one. A turn refers to the
turn before it. Several turns may follow the same one, so turns form trees, and every leaf ends a branch.

A sampled token carries loss in one sample only: in the first branch that contains it, in the order in which answers
were recorded. In later branches it is context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.api import ChatReply, Completion, FinishReason, Message, Sample
from asyncrl.api.picture import PlacedPicture
from asyncrl.api.trajectory import routing_of_turns
from asyncrl.plugins.chat.request import ChatRequest

NOT_GENERATED = -1
"""The version of a token that no policy produced."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """An answer.

    `given_ids` are the ids between the previous answer (or the beginning) and this one, which no policy sampled;
    `given_pictures` are at spans of them. `messages` are the new messages of the request, `reply` the answer as a
    message; both are absent if the request was in token ids.
    """

    parent: Turn | None
    given_ids: tuple[int, ...]
    completion: Completion
    messages: tuple[Message, ...] = ()
    reply: ChatReply | None = None
    request: ChatRequest = field(default_factory=ChatRequest)
    given_pictures: tuple[PlacedPicture, ...] = ()
    answered_at: float = 0.0
    """Time of the answer, of `time.monotonic`; 0 if the request was in token ids."""

    @property
    def path(self) -> list[Turn]:
        """Return the turns of this turn's branch, from the first one to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def ids(self) -> list[int]:
        """Token ids of the conversation up to the end of this answer."""
        return [token for turn in self.path for part in (turn.given_ids, turn.completion.token_ids) for token in part]

    @property
    def pictures(self) -> tuple[PlacedPicture, ...]:
        """The pictures of the conversation, at spans of `ids`."""
        return pictures_of_path(self.path)

    @property
    def conversation(self) -> list[Message]:
        """The messages up to this answer, included. Turns that were requested in token ids have none."""
        said: list[Message] = []
        for turn in self.path:
            said += turn.messages
            if turn.reply is not None:
                said.append(turn.reply.message)
        return said


def pictures_of_path(path: Sequence[Turn]) -> tuple[PlacedPicture, ...]:
    """Return the pictures of a branch, at positions from its beginning."""
    found: list[PlacedPicture] = []
    length = 0
    for turn in path:
        found += [placed.shifted(length) for placed in turn.given_pictures]
        length += len(turn.given_ids) + len(turn.completion.token_ids)
    return tuple(found)


def branches(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Yield the branches of recorded `turns`, in the order in which their first own turns were recorded."""
    inner = {turn.parent for turn in turns}
    order = {turn: number for number, turn in enumerate(turns)}
    leaves = [turn.path for turn in turns if turn not in inner]
    yield from sorted(leaves, key=lambda path: [order[turn] for turn in path if turn in order])


def sample_of(path: Sequence[Turn], taken: set[Turn], reward: float, *, cut_off: bool = False) -> Sample:
    """Convert a branch to a sample. Turns in `taken` carry no loss here; the others are added to `taken`.

    The sample is truncated if its last answer is, or if a limit `cut_off` the conversation after that.
    """
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    routing: list[NDArray[Any] | None] = []

    def give(ids: Sequence[int]) -> None:
        tokens.extend(ids)
        mask.extend([0] * len(ids))
        logprobs.extend([0.0] * len(ids))
        versions.extend([NOT_GENERATED] * len(ids))

    for turn in path:
        give(turn.given_ids)
        completion = turn.completion
        if completion.token_ids:
            routing.append(completion.routing)
        if turn in taken:
            give(completion.token_ids)
            continue
        taken.add(turn)
        tokens.extend(completion.token_ids)
        mask.extend([1] * len(completion.token_ids))
        logprobs.extend(completion.logprobs)
        versions.extend(completion.versions)
    return Sample(
        tokens=np.array(tokens, np.int32),
        loss_mask=np.array(mask, np.uint8),
        behave_logprobs=np.array(logprobs, np.float32),
        versions=np.array(versions, np.int32),
        reward=reward,
        truncated=cut_off or path[-1].completion.finish_reason == FinishReason.length,
        routing=routing_of_turns(len(tokens), routing),
        pictures=pictures_of_path(path),
    )
