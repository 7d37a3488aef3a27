"""An agent of the OpenHands SDK: `agent.py TASK`."""

import os
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr

key = SecretStr(os.environ["OPENAI_API_KEY"])
model = LLM(usage_id="agent", model="openai/policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=key)
agent = Agent(llm=model, tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)])
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(sys.argv[1])
conversation.run()
