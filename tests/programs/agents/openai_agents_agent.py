"""An agent of openai-agents that has another agent as a tool: `agent.py TASK [chat_completions]`."""

import asyncio
import subprocess
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api


@function_tool
def bash(command: str) -> str:
    """Run a command."""
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout


set_default_openai_api("chat_completions" if sys.argv[2:] else "responses")
helper = Agent(name="helper", instructions="You help.", model="policy")
tools = [bash, helper.as_tool("ask_helper", "Asks the helper.")]
agent = Agent(name="coder", instructions="You are a coder.", model="policy", tools=tools)
print(asyncio.run(Runner.run(agent, sys.argv[1])).final_output)
