"""The client of one episode: takes messages, returns the policy's answers, and records everything in token ids.

The context of an answer is a recorded conversation with the ids that follow, or a new rendering (`Context`).

Drift
-----
An extended conversation can be compared with rendering and tokenising its messages again (`DriftCheck`). Extending by
ids is correct: these are the tokens that the policy sampled and saw. Other programs render the messages again: a server
behind an OpenAI API, or an evaluation of the trained model. The comparison shows how far they deviate.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import itertools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from asyncrl.api import (
    ChatFinish,
    ChatReply,
    Completion,
    FinishReason,
    GenerationClient,
    GenerationRequest,
    GenerationResult,
    Message,
    Prompt,
    Sample,
    SamplingParams,
    ToolSchema,
    messages_of,
)
from asyncrl.api.generation import seed_from
from asyncrl.api.picture import PictureError, PlacedPicture
from asyncrl.api.trajectory import check_group, role_of
from asyncrl.chat.conversation import ChatLimits, ChatRequest, Turn, TurnRecorder, bytes_of_ids
from asyncrl.chat.settings import DriftCheck, Reasoning, Repeated
from asyncrl.chat.template import ChatFormat, empty_reply, no_completion, reply_of
from asyncrl.data.chat_template import ChatError
from asyncrl.data.picture_parts import check_prompt_pictures, with_content, wrong_turns
from asyncrl.data.stop_strings import check_stop_strings
from asyncrl.data.tokenizers import Rendered, common_length

_log = logging.getLogger(__name__)
TOOL_CHOICES = ("auto", "none")
SHOWN_TOKENS = 8
"""Number of tokens of each side that a `DriftError` shows."""
RENDERED_ON_LOOP_CHARS = 20_000
"""Longest conversation, in characters, that is rendered and tokenised on the event loop, not in a thread."""


class ConversationEnded(RuntimeError):
    """The agent continues a conversation that has reached a limit, as an answer with finish `length` has reported.

    Attributes:
        tokens: tokens of the conversation that the agent sent, if the limit is the context; else 0.
        most: the limit of the context, in tokens; 0 for other limits.
    """

    def __init__(self, message: str, tokens: int = 0, most: int = 0) -> None:
        super().__init__(message)
        self.tokens, self.most = tokens, most


class DriftError(RuntimeError):
    """A conversation drifts, and `rollout.chat.drift=strict`; the message shows the difference."""


@dataclass(frozen=True, slots=True)
class ChatPolicy:
    """Rules of conversations: their limits, and the choices of `rollout.chat`."""

    limits: ChatLimits = ChatLimits()
    reasoning: Reasoning = Reasoning.keep
    drift: DriftCheck = DriftCheck.off
    repeated: Repeated = Repeated.keep
    policies: tuple[str, ...] = ()
    """Names of the policies that an agent may ask besides the run's own."""
    trained: tuple[str, ...] = ()
    """Those of them that are trained."""


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


class EpisodeClient:
    """`asyncrl.api.ChatClient` over any `GenerationClient`.

    Args:
        policy: generates answers as token ids.
        prompt: the prompt of the group's member; its sampling parameters are the default.
        chat: converts messages to token ids; without a chat template None, and only `generate` works.
        rules: limits and settings of conversations.
    """

    def __init__(
        self, policy: GenerationClient, prompt: Prompt, chat: ChatFormat | None, rules: ChatPolicy | None = None
    ) -> None:
        self._policy, self._prompt, self._format = policy, prompt, chat
        self._rules = rules or ChatPolicy()
        self._numbers = itertools.count()
        """Numbers of the episode's requests, for their names; all clients of the episode share them."""
        self._asked: Counter[bytes] = Counter()
        """Answers asked for each conversation so far, by its digest; all clients of the episode share them."""
        self._clients: dict[tuple[str, str], Self] = {}
        """The episode's other clients, by policy and comparison group; all clients of the episode share this table."""
        self._name = ""
        """The policy's name; empty: the run's own."""
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._unfit: list[str] = []
        """The first conversation of the episode that did not even begin, in words; all clients share this."""
        self._start("")

    def _start(self, group: str) -> None:
        """Begin the records of this client, whose samples are in comparison group `group`."""
        self._group, self._recorder = group, TurnRecorder()
        self._conversation = ""
        """Name that `conversation` was called with; empty for the client of an episode or a policy."""
        self._sides: dict[str, Self] = {}

    def policy(self, name: str) -> Self:
        """See `asyncrl.api.ChatClient`.

        Raises:
            ValueError: the run has no policy of this name.
        """
        if name not in self._rules.policies:
            named = ", ".join(self._rules.policies) or "none"
            raise ValueError(f"policy {name!r} is not one of the setting `policies`, which has {named}")
        if (name, "") not in self._clients:
            made = copy.copy(self)
            made._start(name if name in self._rules.trained else "")
            made._name, made._counts = name, defaultdict(float)
            self._clients[name, ""] = made
        return self._clients[name, ""]

    def conversation(self, group: str) -> Self:
        """See `asyncrl.api.ChatClient`. Counts and random streams are the episode's.

        Raises:
            ValueError: `group` cannot be a name, is empty, or names another trained policy.
        """
        check_group(group)
        if not group:
            raise ValueError("conversation(group=''): name the comparison group, such as 'judge'")
        if not self._name and role_of(group) in self._rules.trained:
            raise ValueError(
                f"conversation(group={group!r}): {role_of(group)!r} is a trained policy, whose samples come from "
                f"client.policy({role_of(group)!r}); give the group of this policy another name"
            )
        if (self._name, group) not in self._clients:
            made = copy.copy(self)
            made._start(f"{self._name}/{group}" if self._name in self._rules.trained else group)
            check_group(made._group)
            made._conversation = group
            self._clients[self._name, group] = made
        return self._clients[self._name, group]

    def aside(self, group: str) -> Self:
        """Return the client of side conversations of this one: `conversation(group)`, or of a conversation `name`,
        `conversation(name/group)`. Their samples are among this client's.

        Raises:
            ValueError: as for `conversation`.
        """
        made = self.conversation(f"{self._conversation}/{group}" if self._conversation else group)
        self._sides[group] = made
        return made

    @property
    def metrics(self) -> dict[str, float]:
        """Return the counts so far, as `chat/...`.

        - `calls`, the calls that `extended` a conversation, the `branches` begun, and `malformed_calls`;
        - `repeated_calls`, which asked again what had been answered, when no call had continued the answer;
        - of the endpoint: `left_out_tools`, the tools offered that a policy cannot have; `unmet_tool_choices`, answers
          without the call that was asked for; `untrained_calls`, by the rules of `rollout.endpoint.conversations`;
        - `limit_context_length` and its like: conversations that met the limit of this name;
        - `tool_s`: seconds between an answer that calls tools and what follows it;
        - `drift_checks`, and of these `drift_text`, `drift_tokens`, `drift_refused` (the template cannot render it
          again).
        """
        return {f"chat/{name}": count for name, count in self._counts.items()}

    def count(self, name: str, number: int) -> None:
        """Add `number` to the metric `chat/<name>`."""
        if number:
            self._counts[name] += number

    @property
    def why_no_samples(self) -> str:
        """See `asyncrl.api.ChatClient`."""
        clients: list[EpisodeClient] = [self, *self._clients.values()]
        trained = [each for each in clients if not each._name or each._name in self._rules.trained]
        turns = [turn for each in trained for turn in each.turns]
        if not turns:
            return self._unfit[0] if self._unfit else ""
        reasons = {
            "without a token": any(not turn.completion.token_ids for turn in turns),
            "untrained by rollout.endpoint.conversations": self._counts.get("untrained_calls"),
            "thrown away by rollout.chat.repeated=drop": self._rules.repeated is Repeated.drop,
        }
        found = " or ".join(reason for reason, applies in reasons.items() if applies)
        return f"all its answers are {found}" if found else ""

    @property
    def max_context(self) -> int:
        """Tokens that a conversation may have, prompt and answers; 0: no limit."""
        return self._rules.limits.max_context

    @property
    def takes_pictures(self) -> bool:
        """True if messages may have pictures."""
        return self._format is not None and self._format.takes_pictures

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Return the turns that this client recorded, in order."""
        return tuple(self._recorder.turns)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Generate and record an answer in token ids, or score tokens, which records nothing.

        An answer is empty if the context has no room for one.

        Raises:
            TypeError: `request` is not a GenerationRequest.
            Exception: the policy failed.
        """
        if not isinstance(request, GenerationRequest):
            raise TypeError(f"client.generate takes a GenerationRequest, not a {type(request).__name__}")
        if request.policy and request.policy != self._name:
            return await self.policy(request.policy).generate(request)
        request = replace(request, policy=self._name)
        if request.score_from is not None:  # scoring generates nothing, so nothing is recorded
            return await self._policy.generate(request)
        check_prompt_pictures(self._prompt, request.input_ids, request.pictures)
        since = self._recorder.recorded
        parent = self._recorder.find_ids(request.input_ids, request.pictures)
        length = len(parent.ids) if parent else 0
        given = request.input_ids[length:]
        shown = tuple(placed.shifted(-length) for placed in request.pictures if placed.position >= length)
        state = self._begun(parent, parent, len(request.input_ids))
        if state.over:
            return GenerationResult(request.request_id, tuple(no_completion() for _ in range(request.n)))
        result = await self._policy.generate(replace(request, sampling=_within(request.sampling, state)))
        repeats = False
        for completion in result.completions:
            finish = ChatFinish.stop if completion.finish_reason == FinishReason.stop else ChatFinish.length
            after = state.answered(finish, len(completion.token_ids))
            turn = Turn(parent, given, completion, request=after, given_pictures=shown)
            repeats |= self._recorder.add(turn, since=since)
        self.count("repeated_calls", repeats)
        return result

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] = (),
        sampling: SamplingParams | None = None,
        tool_choice: str = "auto",
        n: int = 1,
        continue_last: bool = False,
    ) -> ChatReply:
        """See `asyncrl.api.ChatClient`.

        Args:
            continue_last: the answer continues the last message, an assistant's. The reply's `message` has the text of
                both, its `content` that of the answer alone.

        Raises:
            ChatError: these messages cannot be rendered, or an argument is wrong.
            DriftError: the conversation drifts, and `rollout.chat.drift=strict`.
            ConversationEnded: the conversation had reached a limit, and an earlier answer has reported that.
            Exception: the policy failed.
        """
        if n < 1:
            raise ChatError(f"n={n}: ask for at least 1 answer")
        if tool_choice not in TOOL_CHOICES:
            raise ChatError(
                f"tool_choice={tool_choice!r}: the policy's tokens are not constrained; use {' or '.join(TOOL_CHOICES)}"
            )
        since = None if continue_last else self._recorder.recorded
        chat, wanted = self._chat(), sampling or self._prompt.sampling
        check_stop_strings(wanted.stop)
        messages = [_read(message) for message in messages]
        if sum(len(str(message.get("content"))) for message in messages) > RENDERED_ON_LOOP_CHARS:
            context = await asyncio.to_thread(self._find_context, messages, tools, continue_last=continue_last)
        else:
            context = self._find_context(messages, tools, continue_last=continue_last)
        ids = context.ids
        self._check_drift(context, ids, messages, tools)
        state = self._begun(context.parent, context.before, len(ids))
        if state.over:
            return empty_reply(ids)
        seed = self._seed(ids, context.pictures, wanted.seed)
        stops = tuple(dict.fromkeys((*wanted.stop_token_ids, *chat.stop_token_ids)))
        drawn = _within(replace(wanted, seed=seed, stop_token_ids=stops), state)
        name = f"{self._prompt.prompt_id}/{self._prompt.member}/{next(self._numbers)}"
        request = GenerationRequest(name, ids, n, drawn, context.pictures, self._name)
        result = await self._policy.generate(request)
        self._counts["calls"] += 1
        self._counts["extended" if context.parent else "branches"] += 1
        offered = tools if tool_choice == "auto" else ()
        begun, repeats = str(messages[-1]["content"]) if continue_last else "", False
        first, *others = [
            reply_of(chat, ids, completion, offered, drawn.stop, f"{seed}/{index}", begun)
            for index, completion in enumerate(result.completions)
        ]
        for reply in (first, *others):
            after = state.answered(reply.finish_reason, len(reply.completion.token_ids))
            given, now = context.given, time.monotonic()
            turn = Turn(
                *(context.parent, tuple(given.ids), reply.completion, context.messages, reply, after, given.pictures),
                answered_at=now,
            )
            repeats |= self._recorder.add(turn, tools, since=since)
            self._counts["malformed_calls"] += reply.malformed_calls
        self.count("repeated_calls", repeats)
        return replace(first, alternatives=tuple(others))

    def prompt_ids(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """See `asyncrl.api.ChatClient`.

        Raises:
            ChatError: these messages cannot be rendered.
        """
        return self._find_context([_read(message) for message in messages], tools).ids

    def shown_ids(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Render `messages` to token ids, without a generation prompt; the last message may have any role.

        Raises:
            ChatError: these messages cannot be rendered.
        """
        return tuple(self._chat().shown([_read(message) for message in messages], tools).ids)

    def forget(self, answer: Completion) -> None:
        """Remove `answer` from the records: the agent never received it."""
        self._recorder.forget(answer)

    def leave_untrained(self, answers: Sequence[Completion]) -> None:
        """Leave the `answers` to a call out of training; they are context for what continues them."""
        self.count("untrained_calls", self._recorder.leave_untrained(answers))

    def close(self) -> None:
        """End the episode. Called by the owner of the client."""

    def samples(self, reward: float = 0.0) -> list[Sample]:
        """See `asyncrl.api.ChatClient`."""
        others = [client for (policy, group), client in self._clients.items() if policy == self._name and group]
        clients: list[EpisodeClient] = [self, *(self._sides.values() if self._conversation else others)]
        return [sample for client in clients for sample in client._own_samples(reward)]

    def _own_samples(self, reward: float) -> list[Sample]:
        """Return the samples of this client's own records."""
        if self._name and self._name not in self._rules.trained:
            return []
        own = self._recorder.samples(reward, drop_repeated=self._rules.repeated is Repeated.drop)
        return [replace(sample, group=self._group) for sample in own] if self._group else own

    def all_samples(self, reward: float = 0.0) -> list[Sample]:
        """See `asyncrl.api.ChatClient`."""
        others = [client for (policy, group), client in self._clients.items() if policy and not group]
        return self.samples(reward) + [sample for client in others for sample in client.samples(reward)]

    def _chat(self) -> ChatFormat:
        if self._format is None:
            raise ChatError(
                "there is no chat template to put messages into tokens; set dataset.chat_template to a Jinja file (or "
                "to auto, with a model whose tokenizer has one), or use `generate`"
            )
        return self._format

    def _find_context(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, continue_last: bool = False
    ) -> Context:
        """Return the context of the answer to `messages`: a recorded conversation, extended, or a new rendering.

        Args:
            continue_last: the answer continues the last message, which is always rendered anew.

        Raises:
            ChatError: the messages are not a conversation, or the template refuses them.
        """
        chat = self._chat()
        if (wrong := wrong_turns(messages)) is not None:
            raise ChatError(f"these messages are not a valid conversation: {wrong}")
        if continue_last:
            if (begun := self._recorder.find(messages, tools)[0]) is not None:  # as an answer that was cut off
                self._recorder.continued.add(begun)
            turn, _ = self._recorder.find(messages[:-1], tools)
            given = chat.continued(with_reasoning(turn, messages), tools)
            return Context(None, given, tuple(messages[:-1]), turn)
        turn, covered = self._recorder.find(messages, tools)
        if turn is not None and (extension := self._extension(turn, messages, covered, tools)) is not None:
            return Context(turn, extension, tuple(messages[covered:]), turn)
        if not tools and "prompt" in self._prompt.data and list(messages) == messages_of(self._prompt):
            first = Rendered([*self._prompt.input_ids], self._prompt.pictures)  # the prompt may have been shortened
            return Context(None, first, tuple(messages), None)
        given = chat.begin(with_reasoning(turn, messages), tools)
        return Context(None, given, tuple(messages), turn)

    def _extension(
        self, turn: Turn, messages: Sequence[Message], covered: int, tools: Sequence[ToolSchema]
    ) -> Rendered | None:
        """Return the ids that `messages[covered:]` append to those of `turn`; None if the turn cannot be extended."""
        assert turn.reply is not None, "a turn that messages find has a message"
        chat = self._chat()
        bridge = chat.bridge(turn.reply.message, messages[covered:], tools)
        if bridge is None:
            return None
        if self._rules.reasoning is Reasoning.branch:
            reasoned = _reasoned(turn)
            if reasoned and chat.hides_reasoning_of(messages, tools, reasoned):
                return None  # rendered again, as the template shows the history
        end_id, sampled = chat.end_id(tools), turn.completion.token_ids
        assert end_id is not None, "only a template with an end-of-turn token has bridges"
        if sampled and sampled[-1] == end_id:
            return bridge
        return Rendered([end_id, *bridge.ids], tuple(placed.shifted(1) for placed in bridge.pictures))

    def _seed(self, ids: Sequence[int], pictures: Sequence[PlacedPicture], own: int | None) -> int:
        """Return the seed of the next answer to a conversation. No two requests of the episode have the same.

        It depends on the prompt's seed, the group member, the caller's seed, the conversation, and the number of
        earlier requests with the same conversation. It does not depend on concurrent requests, so runs are
        reproducible.

        Args:
            ids: the conversation's token ids.
            pictures: its pictures.
            own: seed that the caller gave, or the prompt's.
        """
        digest = hashlib.blake2b(bytes_of_ids(ids, pictures), digest_size=8).digest()
        again = self._asked[digest]
        self._asked[digest] += 1
        return seed_from("chat", self._prompt.sampling.seed or 0, own or 0, self._prompt.member, digest.hex(), again)

    def _check_drift(
        self, context: Context, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> None:
        """Count a difference between an extended conversation's ids and those of its new rendering: of the text, if the
        template rewrites history, or of the tokens alone, if the tokenizer splits the same text in another way than the
        policy did.

        Raises:
            DriftError: there is one, and `rollout.chat.drift=strict`.
        """
        if self._rules.drift is DriftCheck.off or context.parent is None:
            return
        chat = self._chat()
        self._counts["drift_checks"] += 1
        try:
            anew = chat.begin(with_reasoning(context.parent, messages), tools)
        except ChatError:  # a template may fail on what ids can extend, as several calls in one message of Llama 3
            self._counts["drift_refused"] += 1
            return
        if list(ids) == anew.ids:
            return
        decode = chat.tokenizer.decode_all
        is_other_text = decode(ids) != decode(anew.ids)
        self._counts["drift_text" if is_other_text else "drift_tokens"] += 1
        if self._rules.drift is DriftCheck.strict:
            what = (
                "the template shows earlier messages otherwise" if is_other_text else "the same text has other tokens"
            )
            position = common_length(ids, anew.ids)
            shown = slice(position, position + SHOWN_TOKENS)
            raise DriftError(
                f"prompt {self._prompt.prompt_id}: the conversation differs from its rendering from scratch; from "
                f"token {position} on {what}: {decode(ids[shown])!r}, anew {decode(anew.ids[shown])!r}. "
                "rollout.chat.drift=tolerant counts such differences"
            )

    def _begun(self, parent: Turn | None, before: Turn | None, tokens: int) -> ChatRequest:
        """Return the conversation's state at the start of its next answer; an ended one if a limit leaves no room for
        it.

        Raises:
            ConversationEnded: it had reached a limit, and an earlier answer has reported that.
        """
        state = before.request if before else ChatRequest(self._rules.limits)
        if before is not None and state.calls_tools:
            seconds = time.monotonic() - before.answered_at
            self._counts["tool_s"] += seconds
            state = state.tools_returned(seconds)
        if before is not None:
            self._recorder.continued.add(before)
        if parent is None and before is not None:
            state = state.forked()
        if not state.over:
            state = state.begin(tokens)
        if state.over:
            if state.is_full and before is None and not self._unfit:
                self._unfit.append(f"its first prompt of {tokens:,} tokens does not fit in {state.over}")
            if not self._recorder.cut_off(before, tokens):
                facts = (tokens, self.max_context) if state.is_full else ()
                raise ConversationEnded(
                    f"the conversation is over: {state.over}; end it at finish_reason 'length'", *facts
                )
            self._counts[f"limit_{state.over.partition('=')[0].rpartition('.')[2]}"] += 1
            _log.info("prompt %s: a conversation of %d tokens ends at %s", self._prompt.prompt_id, tokens, state.over)
        return state


def _reasoned(turn: Turn) -> list[int]:
    """Return the positions of the answers in `turn`'s conversation whose reasoning is part of its ids."""
    positions, number = [], 0
    for each in turn.path:
        number += len(each.messages)
        if each.reply is not None and each.reply.reasoning:
            positions.append(number)
        number += 1
    return positions


def with_reasoning(turn: Turn | None, messages: Sequence[Message]) -> list[Message]:
    """Return `messages`, with recorded reasoning added to answers that the agent passes without it."""
    whole = list(messages)
    for position, message in enumerate(turn.conversation if turn else ()):
        reasoning = message.get("reasoning_content")
        if reasoning and not whole[position].get("reasoning_content"):
            whole[position] = {**whole[position], "reasoning_content": reasoning}
    return whole


def _read(message: Message) -> Message:
    """Return a message whose content is text, or text and pictures (`asyncrl.data.picture_parts`).

    Raises:
        ChatError: it has a part that is neither, or a picture cannot be used.
    """
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("role") != "assistant"):
        return message
    try:
        return with_content(message)
    except PictureError as error:
        raise ChatError(str(error)) from None


def _within(sampling: SamplingParams, state: ChatRequest) -> SamplingParams:
    """Return `sampling` with the number of new tokens limited to the room in the context."""
    left = state.tokens_left
    return sampling if left is None else replace(sampling, max_new_tokens=min(sampling.max_new_tokens, left))
