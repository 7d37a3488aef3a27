"""An agent of qwen-agent: `agent.py TASK`."""

import json
import os
import subprocess
import sys

from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool


@register_tool("bash")
class Bash(BaseTool):
    description = "Run a command."
    parameters = ({"name": "command", "type": "string", "description": "the command", "required": True},)

    def call(self, params: str, **more: object) -> str:
        command = ["bash", "-c", json.loads(params)["command"]]
        return subprocess.run(command, capture_output=True, text=True).stdout


model = {
    "model": "policy",
    "model_server": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
    "generate_cfg": {"max_retries": 0},
}
agent = Assistant(llm=model, function_list=["bash"], system_message="You are a coder.")
for _answers in agent.run(messages=[{"role": "user", "content": sys.argv[1]}]):
    answers = _answers
print(answers)
