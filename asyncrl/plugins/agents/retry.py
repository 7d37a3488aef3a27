"""An example of several turns: after a wrong answer the policy reads the environment's feedback and tries again.

Feedback carries no loss, and all tries have the reward of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asyncrl.api import (
    Agent,
    ChatClient,
    Environment,
    GenerationRequest,
    Prompt,
    Sample,
    Tokenizer,
    answer_text,
    messages_of,
)


class RetryAgent(Agent):
    """Up to `max_turns` tries per answer; one that is cut off is the last.

    Args:
        tokenizer: the run's tokenizer.
        chat: True if it has a chat template: feedback is then the user's next message, otherwise text that is appended.
        max_turns: limit on tries, at least 1.
        turn_discount: factor on the reward for each turn beyond the first, so that an early right answer is worth most.
    """

    def __init__(
        self, *, tokenizer: Tokenizer, chat: bool = False, max_turns: int = 2, turn_discount: float = 0.5
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"agent max_turns is {max_turns}: give at least 1")
        self._tokenizer, self._chat = tokenizer, chat
        self._max_turns, self._turn_discount = max_turns, turn_discount

    async def run(self, prompt: Prompt, env: Environment, client: ChatClient) -> Sequence[Sample]:
        """Play one episode; return what the client recorded, with the last try's reward and the number of `turns` as a
        metric.
        """
        await env.reset(options={"data": prompt.data})
        converse = self._in_messages if self._chat else self._in_tokens
        reward, turns = await converse(prompt, env, client)
        samples = client.samples(reward * self._turn_discount ** (turns - 1))
        return [replace(sample, metrics={"turns": float(turns)}) for sample in samples]

    async def _in_messages(self, prompt: Prompt, env: Environment, client: ChatClient) -> tuple[float, int]:
        messages, turn = messages_of(prompt), 1
        while True:
            reply = await client.chat(messages)
            feedback, reward, solved, _, _ = await env.step(reply.text)
            if solved or reply.finish_reason == "length" or turn == self._max_turns:
                return float(reward), turn
            messages += [reply.message, {"role": "user", "content": feedback.strip()}]
            turn += 1

    async def _in_tokens(self, prompt: Prompt, env: Environment, client: ChatClient) -> tuple[float, int]:
        ids, turn = prompt.input_ids, 1
        while True:
            name = f"{prompt.prompt_id}/{turn - 1}/{prompt.member}"
            request = GenerationRequest(name, ids, 1, prompt.sampling, prompt.pictures)
            (answer,) = (await client.generate(request)).completions
            feedback, reward, solved, _, _ = await env.step(answer_text(self._tokenizer, ids, answer.token_ids))
            if solved or answer.finish_reason == "length" or turn == self._max_turns:
                return float(reward), turn
            ids = (*ids, *answer.token_ids, *self._tokenizer.encode(feedback))
            turn += 1
