"""Agents of the openai-agents SDK as people write them: told where the policy is, and nothing else."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from asyncrl.inference.openai.endpoint import Session

AGENT = """
import asyncio, sys
import agents
from agents import Agent, ModelSettings, Runner, function_tool
from pydantic import BaseModel

@function_tool
def add(a: int, b: int) -> str:
    "Adds two numbers."
    return str(a + b)

agent = Agent(name="A", instructions="be brief", tools=[add], model="policy")

async def use(api):
    agents.set_default_openai_api(api)
    result = await Runner.run(agent, "2+2?")
    print(result.final_output)
    streamed = Runner.run_streamed(agent, "2+2?")
    kinds = [event.type async for event in streamed.stream_events()]
    print(streamed.final_output)
    result = await Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": "again"}])
    print(result.final_output)

async def main():
    for api in ("responses", "chat_completions"):
        await use(api)

asyncio.run(main())
"""


def test_an_agent_of_the_openai_agents_sdk_runs_unmodified_with_either_api(
    endpoint_in_thread: Session, warm_python: str
) -> None:
    session = endpoint_in_thread
    ended = subprocess.run(
        [warm_python, "-c", AGENT],
        env=os.environ
        | {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["The answer is 4."] * 6
    policy: Any = session.client
    roles = [[message["role"] for message in each["messages"]] for each in policy.asked]
    first, second = ["system", "user"], ["system", "user", "assistant", "tool"]
    assert roles == [first, second, first, second, [*second, "assistant", "user"]] * 2
    for begin in (0, 5):
        asked = policy.asked[begin : begin + 5]
        (call,) = asked[1]["messages"][2]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a":2,"b":2}'}
        assert asked[1]["messages"][3] == {"role": "tool", "tool_call_id": "call0", "content": "4"}
        assert asked[0]["tools"][0]["function"]["description"] == "Adds two numbers."
