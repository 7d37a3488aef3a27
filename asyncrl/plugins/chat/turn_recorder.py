"""Record an episode's answers, and find the recorded conversation that a later call continues.

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
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from asyncrl.api import Completion, Message, Sample, ToolSchema
from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.plugins.chat.conversation import Turn, branches, sample_of


class TurnRecorder:
    """The turns of one episode, in the order in which they were recorded."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._cut_off: set[tuple[Turn | None, int]] = set()
        self._by_messages: dict[bytes, Turn] = {}
        self._by_ids: dict[int, dict[bytes, Turn]] = {}

    def add(self, turn: Turn, tools: Sequence[ToolSchema] = ()) -> None:
        """Record an answer to a conversation with these `tools`.

        If two recorded conversations are equal, later calls continue the newer one.
        """
        self.turns.append(turn)
        if turn.reply is not None:
            (*_, (_, key)) = _prefixes(turn.conversation, tools)
            self._by_messages[key] = turn
        ids = turn.ids
        self._by_ids.setdefault(len(ids), {})[_ids_key(ids, turn.pictures)] = turn

    def find(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> tuple[Turn | None, int]:
        """Return the turn that `messages` continue, and how many of them it covers; None and 0 without one."""
        found: tuple[Turn | None, int] = (None, 0)
        if self._by_messages:
            for count, key in _prefixes(messages, tools):
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

    def cut_off(self, turn: Turn | None, tokens: int) -> bool:
        """Record that a limit left no room for an answer. A branch that ends with `turn` is then truncated.

        Args:
            turn: the turn that the answer would have followed; None at the beginning of a conversation.
            tokens: number of the conversation's tokens.

        Returns:
            False if that was recorded before.
        """
        if (turn, tokens) in self._cut_off:
            return False
        self._cut_off.add((turn, tokens))
        return True

    def samples(self, reward: float) -> list[Sample]:
        """Return a sample for every branch that ends in sampled tokens."""
        taken: set[Turn] = set()
        cut_off = {turn for turn, _ in self._cut_off}
        sampled = [path for path in branches(self.turns) if path[-1].completion.token_ids]
        return [sample_of(path, taken, reward, cut_off=path[-1] in cut_off) for path in sampled]


def _prefixes(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[tuple[int, bytes]]:
    """Return, for each assistant's message, the number of messages up to it, and a digest of these messages and the
    tools.
    """
    digest = _digest(_canonical(list(tools)))
    found = []
    for count, message in enumerate(messages, start=1):
        digest.update(b"\n" + _canonical(_what_counts(message)))
        if message["role"] == "assistant":
            found.append((count, digest.digest()))
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


def _ids_key(ids: Sequence[int], pictures: Sequence[PlacedPicture]) -> bytes:
    return _digest(bytes_of_ids(ids, pictures)).digest()


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
