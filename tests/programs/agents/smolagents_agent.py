"""An agent of smolagents, which calls tools or, with `code`, writes Python: `agent.py TASK [code]`."""

import os
import subprocess
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def bash(command: str) -> str:
    """Run a command.

    Args:
        command: the command
    """
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout


model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
kind = CodeAgent if sys.argv[2:] else ToolCallingAgent
print(kind(tools=[bash], model=model).run(sys.argv[1]))
