"""The answers of one episode: a tree of turns, each branch a conversation; their limits; and the recorder.

A `Turn` is one answer of the policy, with the token ids between the previous answer and this one. A turn refers to the
turn before it. Several turns may follow the same one, so turns form trees, and every leaf ends a branch.

A sampled token carries loss in one sample only: in the first branch that contains it, in the order in which answers
were recorded. In later branches it is context.

Limits
------
A `ChatRequest` counts what a conversation has used. It is immutable, and every step returns the next one, so a
conversation that forks needs no copy. A limit ends a conversation when its next answer would begin: `begin` then
returns a request whose `over` names the limit and its setting. Everything sampled before is kept. An answer that is
cut off at `max_new_tokens` finishes with `length` too, but another answer may follow it.

What a call continues
---------------------
A call continues the longest recorded conversation that its messages begin with. The offered tools must be equal.
Of each message its role, content (absent is empty) and name are compared, but not the assistant's name, which
frameworks add. So are the call that a tool's message answers, and the calls' ids, names and arguments as canonical
JSON. Other keys are ignored. A call in token ids continues the longest recorded conversation whose ids its own begin
with. Pictures are compared by content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.api import ChatFinish, ChatReply, Completion, FinishReason, Message, Sample, ToolSchema
from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.api.trajectory import NOT_GENERATED, routing_of_turns


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
    """What a conversation has used of its limits.

    `turns` is the number of answers, `tokens` the conversation's tokens after the last one, `tool_s` its tools'
    seconds. `calls_tools`: the last answer called tools. `over`: the limit that was reached; empty if none was.
    """

    limits: ChatLimits = ChatLimits()
    turns: int = 0
    tokens: int = 0
    tool_s: float = 0.0
    calls_tools: bool = False
    over: str = ""

    def forked(self) -> ChatRequest:
        """Return the state of another branch from here: turns and tool time already used still count."""
        return ChatRequest(self.limits, self.turns, tool_s=self.tool_s)

    @property
    def is_full(self) -> bool:
        """True if the context is the limit that was reached."""
        return bool(self.over) and self.over == self._context_message()

    @property
    def tokens_left(self) -> int | None:
        """Tokens that the running answer may take; None: no limit."""
        return self.limits.max_context - self.tokens if self.limits.max_context else None

    def begin(self, context_tokens: int) -> ChatRequest:
        """Start an answer to a conversation of `context_tokens`, unless a limit leaves no room for it (`over`)."""
        return replace(self, tokens=context_tokens, calls_tools=False, over=self._met(context_tokens))

    def answered(self, finish: ChatFinish, tokens: int) -> ChatRequest:
        """Record that the policy's answer of `tokens` tokens ended with `finish`."""
        full = finish is ChatFinish.length and self.tokens_left is not None and tokens >= self.tokens_left
        over, calls = self._context_message() if full else "", finish is ChatFinish.tool_calls
        return replace(self, turns=self.turns + 1, tokens=self.tokens + tokens, calls_tools=calls, over=over)

    def tools_returned(self, seconds: float) -> ChatRequest:
        """Record the seconds of the turn's tools."""
        return replace(self, tool_s=self.tool_s + seconds)

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
        all_messages: list[Message] = []
        for turn in self.path:
            all_messages += turn.messages
            if turn.reply is not None:
                all_messages.append(turn.reply.message)
        return all_messages


def pictures_of_path(path: Sequence[Turn]) -> tuple[PlacedPicture, ...]:
    """Return the pictures of a branch, at positions from its beginning."""
    found: list[PlacedPicture] = []
    length = 0
    for turn in path:
        found += [placed.shifted(length) for placed in turn.given_pictures]
        length += len(turn.given_ids) + len(turn.completion.token_ids)
    return tuple(found)


def branches(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Yield the branches that end in one of the recorded `turns`, in the order in which their first own turns were
    recorded.
    """
    inner: set[Turn] = set()
    for turn in turns:
        parent = turn.parent
        while parent is not None and parent not in inner:
            inner.add(parent)
            parent = parent.parent
    order = {turn: number for number, turn in enumerate(turns)}
    leaves = [turn.path for turn in turns if turn not in inner]
    yield from sorted(leaves, key=lambda path: [order[turn] for turn in path if turn in order])


def sample_of(path: Sequence[Turn], taken: set[Turn], reward: float, *, truncated: bool) -> Sample:
    """Convert a branch to a sample. Turns in `taken` carry no loss here; the others are added to `taken`."""
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
        truncated=truncated,
        routing=routing_of_turns(len(tokens), routing),
        pictures=pictures_of_path(path),
    )


class TurnRecorder:
    """The turns of one episode, in the order in which they were recorded.

    Attributes:
        recorded: number of turns so far, those that were forgotten included.
        continued: turns that a call went on from, whether by their ids or rendered anew.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.recorded = 0
        self.continued: set[Turn] = set()
        self._numbers: dict[Turn, int] = {}
        """`recorded` after each turn was added."""
        self._answers: dict[bytes, list[tuple[int, Turn]]] = {}
        """The answers to the same, each after `recorded` when its call began, by the digest of what was asked."""
        self._untrained: set[Turn] = set()
        self._cut_off: dict[tuple[Turn | None, int], int] = {}
        """`recorded` when the limit was last met there."""
        self._by_messages: dict[bytes, Turn] = {}
        self._by_ids: dict[int, dict[bytes, Turn]] = {}

    def add(self, turn: Turn, tools: Sequence[ToolSchema] = (), *, since: int | None = None) -> bool:
        """Record an answer to a conversation with these `tools`.

        If two recorded conversations are equal, later calls continue the newer one.

        Args:
            since: `recorded` when its call began; None: the call repeats none, and none repeats it.

        Returns:
            True if the call asked again what had been answered, and nothing has been continued from that answer.
        """
        self.turns.append(turn)
        self.recorded += 1
        self._numbers[turn] = self.recorded
        ids, pictures = _bytes_of(turn.ids), _shown(turn.pictures)
        self._by_ids.setdefault(len(ids) // _BYTES, {})[_digest(ids + pictures).digest()] = turn
        if turn.reply is None:
            asked = _digest(ids[: len(ids) - _BYTES * len(turn.completion.token_ids)] + pictures).digest()
        else:
            (*_, (_, asked, key)) = _prefixes(turn.conversation, tools)
            self._by_messages[key] = turn
        if since is None:
            return False
        answers = self._answers.setdefault(asked, [])
        repeats = any(self._numbers[other] <= since and other not in self.continued for _, other in answers)
        answers.append((since, turn))
        return repeats

    def find(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> tuple[Turn | None, int]:
        """Return the turn that `messages` continue, and how many of them it covers; None and 0 without one."""
        found: tuple[Turn | None, int] = (None, 0)
        if self._by_messages:
            for count, _, key in _prefixes(messages, tools):
                if (turn := self._by_messages.get(key)) is not None:
                    found = turn, count
        return found

    def find_ids(self, token_ids: Sequence[int], pictures: Sequence[PlacedPicture] = ()) -> Turn | None:
        """Return the turn that `token_ids`, with `pictures` at spans of them, continue; None without one."""
        whole, digest, found, read = _bytes_of(token_ids), _digest(), None, 0
        for length in sorted(length for length in self._by_ids if length <= len(token_ids)):
            digest.update(whole[_BYTES * read : _BYTES * length])
            read, of_prefix = length, digest.copy()
            of_prefix.update(_shown([placed for placed in pictures if placed.position < length]))
            found = self._by_ids[length].get(of_prefix.digest(), found)
        return found

    def forget(self, completion: Completion) -> None:
        """Remove an answer that the agent never received, unless a later turn continues it."""
        turn = next((turn for turn in reversed(self.turns) if turn.completion is completion), None)
        if turn is None or any(other.parent is turn for other in self.turns):
            return
        self.turns.remove(turn)
        for found in (self._by_messages, *self._by_ids.values()):
            for key in [key for key, other in found.items() if other is turn]:
                del found[key]
        for answers in self._answers.values():
            answers[:] = [(since, other) for since, other in answers if other is not turn]

    def leave_untrained(self, completions: Sequence[Completion]) -> bool:
        """Carry no loss on these answers. What continues them has them as context.

        Returns:
            False if none of them is recorded.
        """
        found = {turn for turn in self.turns if any(turn.completion is each for each in completions)}
        self._untrained |= found
        return bool(found)

    def cut_off(self, turn: Turn | None, tokens: int) -> bool:
        """Record that a limit left no room for an answer. A branch that ends with `turn` is then truncated, unless an
        answer is recorded later: the program has gone on, from its summary for example.

        Args:
            turn: the turn that the answer would have followed; None at the beginning of a conversation.
            tokens: number of the conversation's tokens.

        Returns:
            False if that was recorded before.
        """
        is_new = (turn, tokens) not in self._cut_off
        self._cut_off[turn, tokens] = self.recorded
        return is_new

    def samples(self, reward: float, *, drop_repeated: bool = False) -> list[Sample]:
        """Return a sample for every branch, up to its last answer that has a token and is trained.

        It is truncated if the newest answer at its end or after it was cut off, or if a limit ended the conversation
        there.

        Args:
            drop_repeated: leave out answers to what was asked again, if no call continued them.
        """
        taken = set(self._untrained)
        for answers in self._answers.values() if drop_repeated else ():
            last = max((since for since, _ in answers), default=0)
            taken |= {turn for _, turn in answers if self._numbers[turn] <= last} - self.continued
        sampled = [turn for turn in self.turns if turn.completion.token_ids and turn not in taken]
        cut = self._cut()
        return [sample_of(path, taken, reward, truncated=path[-1] in cut) for path in branches(sampled)]

    def _cut(self) -> set[Turn]:
        """Return the turns at or after which the conversation was cut off."""
        newest: dict[Turn, Turn] = {}
        for turn in reversed(self.turns):  # those that follow a turn come before it
            last = newest.setdefault(turn, turn)
            if turn.parent is not None:
                newest[turn.parent] = max(last, newest.get(turn.parent, last), key=self._numbers.__getitem__)
        latest = self._numbers[self.turns[-1]] if self.turns else 0
        ended = [turn for (turn, _), number in self._cut_off.items() if turn is not None and number >= latest]
        cut = {turn for turn, last in newest.items() if last.completion.finish_reason == FinishReason.length}
        return cut.union(*(turn.path for turn in ended))


def _prefixes(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[tuple[int, bytes, bytes]]:
    """Return, for each assistant's message, the number of messages up to it, and digests of the tools and the messages:
    of those before it, and with it.
    """
    digest = _digest(_canonical(list(tools)))
    found = []
    for count, message in enumerate(messages, start=1):
        before = digest.copy() if message["role"] == "assistant" else digest
        digest.update(b"\n" + _canonical(_what_counts(message)))
        if before is not digest:
            found.append((count, before.digest(), digest.digest()))
    return found


def _what_counts(message: Message) -> list[Any]:
    role = message["role"]
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    name = None if role == "assistant" else message.get("name")
    return [role, message.get("content") or "", calls, message.get("tool_call_id"), name]


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # arguments that are not JSON are compared as they are
            arguments = json.loads(arguments)
    return [call.get("id"), function.get("name"), arguments]


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> str:
    return value.sha256 if isinstance(value, Picture) else str(value)


def bytes_of_ids(ids: Sequence[int], pictures: Sequence[PlacedPicture]) -> bytes:
    """Return bytes that are equal for equal ids with the same pictures at the same spans."""
    return _bytes_of(ids) + _shown(pictures)


_BYTES = 4
"""Bytes of a token id."""
_digest = partial(hashlib.blake2b, digest_size=16)


def _bytes_of(ids: Sequence[int]) -> bytes:
    return np.fromiter(ids, dtype="<i4", count=len(ids)).tobytes()


def _shown(pictures: Sequence[PlacedPicture]) -> bytes:
    return "".join(f"{placed.position} {placed.length} {placed.picture.sha256};" for placed in pictures).encode()
