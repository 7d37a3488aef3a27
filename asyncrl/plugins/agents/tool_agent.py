"""An agent that calls tools: it answers, reads the results of its calls, and continues until an answer has no call.

The calls of one turn run at the same time, or one after the other (`ordered_calls`). The model's tokens carry loss,
the tools' results do not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncrl.api import (
    Agent,
    ChatClient,
    Environment,
    Message,
    Prompt,
    Sample,
    Tokenizer,
    ToolCall,
    ToolResult,
    messages_of,
)
from asyncrl.data.picture_parts import Content, joined
from asyncrl.plugins.tools.toolbox import Toolbox

if TYPE_CHECKING:
    from asyncrl.plugins.agents.compaction import CompactionRules


class ToolAgent(Agent):
    """Plays one conversation with tools per member. The environment scores its last answer, `ChatReply.text`.

    A sample's reward is the sum of the environment's and the tools' (`tool/<name>`), each a separate part. A
    conversation ends when it reaches a limit, and is scored by its last answer; the limits are `max_turns` and those of
    `rollout.chat` (context, time of tools). Metrics: `tool/<name>/calls`, `errors`, `seconds`, and of the agent
    `turns`, `tool_calls`, `malformed_calls`.

    Args:
        tokenizer: the run's tokenizer; messages become tokens in the client.
        tools: the tools of the settings `tools` and `mcp`.
        max_turns: limit on answers in a conversation, at least 1. Calls in the last answer are not run.
        max_calls: limit on calls in one turn; for each further call the model reads that it was not run.
        ordered_calls: the calls of one turn run one after the other, as written; False: at the same time.
        malformed_penalty: deducted from the reward for each malformed call, as the part `malformed_calls`.
        compaction: fields of `CompactionRules` (asyncrl.plugins.agents.compaction), such as `{at: 0.75}`: a
            conversation that has become long is summarised, and continues from the summary. Its metrics are
            `compactions` and `cut_summaries`. None: it ends at the context's end.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        tools: Toolbox,
        max_turns: int = 8,
        max_calls: int = 16,
        ordered_calls: bool = False,
        malformed_penalty: float = 0.0,
        compaction: Mapping[str, Any] | None = None,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"agent max_turns is {max_turns}: give at least 1")
        if max_calls < 1:
            raise ValueError(f"agent max_calls is {max_calls}: give at least 1")
        self._tools, self._max_turns, self._max_calls = tools, max_turns, max_calls
        self._ordered_calls, self._malformed_penalty = ordered_calls, malformed_penalty
        self._compaction: CompactionRules | None = None
        if compaction is not None:
            from asyncrl.plugins.agents.compaction import CompactionRules  # only with compaction

            self._compaction = CompactionRules.of(compaction)

    async def run(self, prompt: Prompt, env: Environment, client: ChatClient) -> list[Sample]:
        """Play one conversation. Return its sample, or several if it is compacted or the template rewrites history."""
        await env.reset(options={"data": prompt.data})
        messages: list[Message] = [*messages_of(prompt)]
        schemas = self._tools.schemas
        compaction = self._compaction.begin(prompt, client, schemas) if self._compaction else None
        calls = malformed = 0
        async with self._tools.session(prompt.data) as session:
            for turn in range(1, self._max_turns + 1):
                if compaction:
                    messages = await compaction.shortened(messages)
                reply = await client.chat(messages, tools=schemas)
                malformed += reply.malformed_calls
                if not reply.tool_calls or reply.finish_reason == "length" or turn == self._max_turns:
                    break
                messages.append(reply.message)
                calls += len(reply.tool_calls)
                slots = asyncio.Semaphore(1 if self._ordered_calls else self._max_calls)  # its waiters go in order

                async def run(call: ToolCall, slots: asyncio.Semaphore = slots) -> ToolResult:
                    async with slots:
                        return await session.call(call)

                async with asyncio.TaskGroup() as tasks:
                    running = [tasks.create_task(run(call)) for call in reply.tool_calls[: self._max_calls]]
                results: list[Content] = [_content(task.result(), pictures=client.takes_pictures) for task in running]
                results += [f"Error: not run, {self._max_calls} calls are the most of one turn"] * (
                    len(reply.tool_calls) - len(results)
                )
                messages += [
                    {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
                    for call, content in zip(reply.tool_calls, results, strict=True)
                ]
            _, reward, _, _, _ = await env.step(reply.text)
            parts = {"answer": float(reward), **await session.rewards()}
        if malformed and self._malformed_penalty:
            parts["malformed_calls"] = -self._malformed_penalty * malformed
        metrics = {"turns": float(turn), "tool_calls": float(calls), "malformed_calls": float(malformed)}
        metrics |= compaction.metrics if compaction else {}
        cut = [*reply.prompt_ids, *reply.completion.token_ids] if reply.tool_calls else []  # it ends at `max_turns`
        return [
            replace(
                sample, reward_parts=parts, metrics=metrics, truncated=sample.truncated or sample.tokens.tolist() == cut
            )
            for sample in client.samples(sum(parts.values()))
        ]


def _content(result: ToolResult, *, pictures: bool) -> Content:
    """Return the part of a tool's result that the model reads; without `pictures`, names in their place."""
    if pictures:
        return joined(result.text, [{"type": "image", "image": picture} for picture in result.pictures])
    return "\n".join(filter(None, (result.text, *map(str, result.pictures))))
