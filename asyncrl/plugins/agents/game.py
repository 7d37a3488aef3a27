"""An agent for games: the environment's observation is the user's turn, the policy's answer the action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from asyncrl.api import (
    Agent,
    ChatClient,
    Completion,
    Environment,
    GenerationRequest,
    Prompt,
    Sample,
    Tokenizer,
    answer_text,
    messages_of,
    without_thoughts,
)
from asyncrl.api.picture import PictureError
from asyncrl.api.trajectory import with_turn_rewards
from asyncrl.data.picture_parts import Content, joined, observed


class GameAgent(Agent):
    """Plays one game in up to `max_turns` actions. Each turn has the reward of its action; an answer that is cut off
    counts.

    The prompt explains the game, and the first observation follows it. An observation is text, or with a chat template
    a picture (uint8 [height, width, 3]) or a list of parts. If the row has a `seed`, all members of the group start
    the same game.

    Args:
        tokenizer: the run's tokenizer.
        chat: True if it has a chat template: observations are then the user's messages, otherwise text that is
            appended.
        max_turns: limit on actions, at least 1.
        separator: text between prompt, observation and action without a chat template.
    """

    def __init__(self, *, tokenizer: Tokenizer, chat: bool = False, max_turns: int = 16, separator: str = "\n") -> None:
        if max_turns < 1:
            raise ValueError(f"agent max_turns is {max_turns}: give at least 1")
        self._tokenizer, self._chat, self._max_turns, self._separator = tokenizer, chat, max_turns, separator

    async def run(self, prompt: Prompt, env: Environment, client: ChatClient) -> Sequence[Sample]:
        """Play one game. Return its conversations, mostly one."""
        observation, _ = await env.reset(seed=prompt.data.get("seed"), options={"data": prompt.data})
        dialogue: Dialogue
        if self._chat:
            dialogue = MessageDialogue(prompt, client)
        else:
            dialogue = TokenDialogue(prompt, client, self._tokenizer, self._separator)
        rewards: list[float] = []
        ended = False
        while not ended and len(rewards) < self._max_turns:
            action, answer = await dialogue.answer(observed(observation))
            if not answer.token_ids:
                break  # the context is full
            observation, reward, terminated, truncated, _ = await env.step(action)
            rewards.append(float(reward))
            ended = terminated or truncated
        if not rewards:
            return []
        cut_off = not terminated
        metrics = {"turns": float(len(rewards)), "return": sum(rewards)}
        samples = with_turn_rewards(client.samples(), rewards)
        return [replace(sample, truncated=cut_off, metrics=metrics) for sample in samples]


class Dialogue(Protocol):
    """A conversation."""

    async def answer(self, observation: Content) -> tuple[str, Completion]:
        """Return the policy's answer to `observation`, as text without thoughts and as tokens."""
        ...


class MessageDialogue:
    """A conversation in messages, which begins with the prompt's."""

    def __init__(self, prompt: Prompt, client: ChatClient) -> None:
        self._client, self._messages = client, messages_of(prompt)

    async def answer(self, observation: Content) -> tuple[str, Completion]:
        """See `Dialogue`."""
        last: dict[str, Any] = self._messages[-1]
        if last["role"] == "user":  # the prompt's own
            self._messages[-1] = {**last, "content": joined(last["content"], "\n\n", observation)}
        else:
            self._messages.append({"role": "user", "content": observation})
        reply = await self._client.chat(self._messages)
        self._messages.append(reply.message)
        return without_thoughts(reply.content), reply.completion


class TokenDialogue:
    """A conversation in text that is appended to the prompt.

    Args:
        separator: text around each observation.
        name: distinguishes several conversations of one episode.
    """

    def __init__(
        self, prompt: Prompt, client: ChatClient, tokenizer: Tokenizer, separator: str, name: str = ""
    ) -> None:
        self._prompt, self._client, self._tokenizer, self._separator = prompt, client, tokenizer, separator
        self._ids, self._turn, self._name = prompt.input_ids, 0, name

    async def answer(self, observation: Content) -> tuple[str, Completion]:
        """See `Dialogue`.

        Raises:
            PictureError: the observation is a picture.
        """
        if not isinstance(observation, str):
            raise PictureError("an observation is a picture, which needs a chat template (dataset.chat_template)")
        shown = self._tokenizer.encode(f"{self._separator}{observation}{self._separator}")
        self._ids = (*self._ids, *shown)
        name = f"{self._prompt.prompt_id}/{self._name}{self._turn}/{self._prompt.member}"
        request = GenerationRequest(name, self._ids, 1, self._prompt.sampling, self._prompt.pictures)
        (answer,) = (await self._client.generate(request)).completions
        action = without_thoughts(answer_text(self._tokenizer, self._ids, answer.token_ids))
        self._ids, self._turn = (*self._ids, *answer.token_ids), self._turn + 1
        return action, answer
