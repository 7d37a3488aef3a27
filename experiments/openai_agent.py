"""An agent for the policy behind any OpenAI-compatible API, trained as it is. Copy this file."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

shared = AsyncOpenAI(base_url="http://unset", api_key="unset")  # one pool of connections for all episodes


async def run(prompt: Any, base_url: str, api_key: str) -> str:
    """One episode: ask the policy, return the answer, which the experiment's reward then scores.

    Return a number instead where the agent knows its reward. Each call of the policy is recorded; those that go on from
    each other become one sample.
    """
    policy = shared.with_options(base_url=base_url, api_key=api_key)
    answer = await policy.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": prompt.data["prompt"]}],
    )
    return answer.choices[0].message.content or ""
