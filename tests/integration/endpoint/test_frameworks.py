"""Agents of the openai-agents SDK as people write them: told where the policy is, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from asyncrl.inference.openai.session import Session

AGENT = """
import asyncio, sys
import agents
from agents import Agent, ModelSettings, Runner, function_tool
from pydantic import BaseModel

@function_tool
def add(a: int, b: int) -> str:
    "Adds two numbers."
    return str(a + b)

if sys.argv[1] == "chat_completions":
    agents.set_default_openai_api("chat_completions")
agent = Agent(name="A", instructions="be brief", tools=[add], model="policy")

async def main():
    result = await Runner.run(agent, "2+2?")
    print(result.final_output)
    streamed = Runner.run_streamed(agent, "2+2?")
    kinds = [event.type async for event in streamed.stream_events()]
    print(streamed.final_output)
    result = await Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": "again"}])
    print(result.final_output)

asyncio.run(main())
"""


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
def test_an_agent_of_the_openai_agents_sdk_runs_unmodified(api: str, endpoint_in_thread: Session) -> None:
    session = endpoint_in_thread
    ended = subprocess.run(
        [sys.executable, "-c", AGENT, api],
        env=os.environ
        | {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["The answer is 4."] * 3
    policy: Any = session.client
    roles = [[message["role"] for message in each["messages"]] for each in policy.asked]
    first, second = ["system", "user"], ["system", "user", "assistant", "tool"]
    assert roles == [first, second, first, second, [*second, "assistant", "user"]]
    (call,) = policy.asked[1]["messages"][2]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a":2,"b":2}'}
    assert policy.asked[1]["messages"][3] == {"role": "tool", "tool_call_id": "call0", "content": "4"}
    assert policy.asked[0]["tools"][0]["function"]["description"] == "Adds two numbers."
