"""Agent programs as people start them, and what the scripted policy answers them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launchers import install_programs

FOLDER = Path(os.environ.get("ASYNCRL_PROGRAMS", Path(__file__).parents[2] / ".programs"))
"""Where `python -m asyncrl.launch install programs` has installed them."""
HERE = "openai-agents"
"""The package that the tests' own environment has."""
TASK = "Create the file made.txt with the word hello in it."
MADE = "hello"
DONE = "The file made.txt has the word hello."


@dataclass(frozen=True)
class Program:
    """A program at one of the APIs. In its texts `{root}`, `{base}` and `{key}` are the session's `root_url`,
    `base_url` and `api_key`, `{folder}` is its working folder, `{task}` what it is to do, and `{agent}` the file in
    `agents/` with the package's name.

    Attributes:
        package: its name in `launchers/install_programs.py`.
        api: path of the API.
        command: arguments after the executable.
        answers: what the policy says in turn, where it is asked to go on with the task.
        main: text in the prompts of that conversation, and in no other one.
        sends: what is in its requests that matters to a policy; names in backquotes are in the recorded request.
        env: what points it at the endpoint, and keeps it from asking a user.
        quiet: further environment of the tests, in which other hosts cannot be reached.
        files: files that it reads, by their path in the working folder.
        kind: what tells it from the package's other programs.
        retells: whether its history has calls as text and not as calls.
    """

    package: str
    api: str
    command: str
    answers: tuple[str, ...]
    main: str
    sends: str
    env: Mapping[str, str] = field(default_factory=dict)
    quiet: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""
    retells: bool = False

    @property
    def name(self) -> str:
        return f"{self.package}-{self.kind}" if self.kind else self.package

    @property
    def version(self) -> str:
        if self.package == HERE:
            return importlib.metadata.version(HERE)
        return install_programs.PROGRAMS[self.package].version

    @property
    def executable(self) -> Path:
        """Where it is started, if it is installed."""
        return Path(sys.executable) if self.package == HERE else install_programs.executable(FOLDER, self.package)

    @property
    def start(self) -> str:
        """The command of a shell that starts it; of an agent on a framework, only the environment."""
        settings = [f"{name}={value}" for name, value in self.env.items()]
        command = [] if "{agent}" in self.command else [self.executable.name, self.command]
        return " ".join([*settings, *command])


def call(name: str, **arguments: object) -> str:
    """A call of a tool as the parser `hermes` reads it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def two_calls(tool: str, argument: str = "command", **more: object) -> tuple[str, str]:
    """Make the file, and look at it."""
    making, looking = f"echo {MADE} > made.txt", "cat made.txt"
    return f"I make it.\n{call(tool, **{argument: making}, **more)}", call(tool, **{argument: looking}, **more)


def offers(tool: str) -> str:
    """What the prompts have to which `tool` is offered."""
    return f'"name": "{tool}"'


CHAT, RESPONSES, MESSAGES = "/chat/completions", "/responses", "/messages"
OPENAI = {"OPENAI_BASE_URL": "{base}", "OPENAI_API_KEY": "{key}"}
LITELLM = {"OPENAI_API_BASE": "{base}", "OPENAI_API_KEY": "{key}"}
OWN_PRICES = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
CODEX = '{name="asyncrl",base_url="{base}",env_key="ASYNCRL_KEY",wire_api="responses"}'
OPENCODE = {
    "provider": {
        "asyncrl": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{base}", "apiKey": "{key}"},
            "models": {"policy": {}},
        }
    }
}


def pi(api: str, name: str, url: str = "{base}", kind: str = "") -> Program:
    """Pi at an API, which it calls `name`."""
    provider = {"baseUrl": url, "api": name, "apiKey": "{key}", "models": [{"id": "policy"}]}
    return Program(
        "pi",
        api,
        "--provider asyncrl --model policy -p '{task}'",
        (*two_calls("bash"), DONE),
        offers("bash"),
        "messages and tools",
        env={"PI_CODING_AGENT_DIR": "{folder}/.pi"},
        files={".pi/models.json": json.dumps({"providers": {"asyncrl": provider}})},
        kind=kind,
    )


PROGRAMS = (
    Program(
        "claude-code",
        MESSAGES,
        "-p '{task}' --dangerously-skip-permissions",
        (*two_calls("Bash", description="Work on the file"), DONE),
        offers("Bash"),
        "`context_management` and `output_config`, which are ignored; messages of the role `system`",
        env={
            "ANTHROPIC_BASE_URL": "{root}",
            "ANTHROPIC_AUTH_TOKEN": "{key}",
            "ANTHROPIC_MODEL": "policy",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        },
        quiet={"HTTPS_PROXY": ""},  # with a proxy it does not look whether there is a server
    ),
    Program(
        "codex",
        RESPONSES,
        f"exec -c model_provider=asyncrl -c 'model_providers.asyncrl={CODEX}' -m policy "
        "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox '{task}'",
        (*two_calls("exec_command", "cmd"), DONE),
        offers("exec_command"),
        "`client_metadata`; the tools `namespace` and `web_search`, which are left out",
        env={"ASYNCRL_KEY": "{key}"},
    ),
    Program(
        "opencode",
        CHAT,
        "run -m asyncrl/policy '{task}'",
        (*two_calls("bash", description="Work on the file"), DONE),
        offers("bash"),
        "a title, as a second conversation",
        quiet={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        files={"opencode.json": json.dumps(OPENCODE)},
    ),
    pi(CHAT, "openai-completions"),
    pi(RESPONSES, "openai-responses", kind="responses"),
    pi(MESSAGES, "anthropic-messages", "{root}", kind="messages"),
    Program(
        "qwen-code",
        CHAT,
        "--auth-type openai --yolo -p '{task}'",
        (*two_calls("run_shell_command", is_background=False), DONE),
        offers("run_shell_command"),
        "a first answer that is not the policy's",
        env={**OPENAI, "OPENAI_MODEL": "policy"},
        quiet={"HTTPS_PROXY": ""},  # it would ask for the endpoint there, too
    ),
    Program(
        "mini-swe-agent",
        CHAT,
        "-m openai/policy -t '{task}' -y --exit-immediately",
        (*two_calls("bash"), call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")),
        offers("bash"),
        "messages and one tool",
        env={**LITELLM, "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
        quiet=OWN_PRICES,
    ),
    Program(
        "openhands",
        CHAT,
        "{agent} '{task}'",
        (*two_calls("terminal"), call("finish", message=DONE)),
        offers("terminal"),
        "`reasoning_effort`, which is ignored",
        env=OPENAI,
        quiet=OWN_PRICES,
    ),
    Program(
        "aider",
        CHAT,
        "--model openai/policy --yes-always --message '{task}'",
        (f"I make it.\n\nmade.txt\n```\n{MADE}\n```\n",),
        "file listing",
        "no tools: files in the text; `temperature` 0: the answers of a group are equal; a commit message, as a second "
        "conversation",
        env=LITELLM,
        quiet={**OWN_PRICES, "AIDER_ANALYTICS": "false", "AIDER_CHECK_UPDATE": "false"},
    ),
    Program(
        "openai-agents",
        RESPONSES,
        "{agent} '{task}'",
        (*two_calls("bash"), call("ask_helper", input="Is it made?"), DONE),
        "You are a coder.",
        "an agent that is a tool, as a second conversation",
        env={**OPENAI, "OPENAI_AGENTS_DISABLE_TRACING": "1"},
    ),
    Program(
        "openai-agents",
        CHAT,
        "{agent} '{task}' chat_completions",
        (*two_calls("bash"), call("ask_helper", input="Is it made?"), DONE),
        "You are a coder.",
        "an agent that is a tool, as a second conversation",
        env={**OPENAI, "OPENAI_AGENTS_DISABLE_TRACING": "1"},
        kind="chat",
    ),
    Program(
        "smolagents",
        CHAT,
        "{agent} '{task}'",
        (*two_calls("bash"), call("final_answer", answer=DONE)),
        offers("bash"),
        "`tool_choice` `required`; calls are retold in the text, so each step is a sample",
        env=OPENAI,
        retells=True,
    ),
    Program(
        "smolagents",
        CHAT,
        "{agent} '{task}' code",
        (
            f"I make it.\n<code>\nprint(bash('echo {MADE} > made.txt'))\n</code>",
            "<code>\nprint(bash('cat made.txt'))\n</code>",
            f"<code>\nfinal_answer('{DONE}')\n</code>",
        ),
        "bash",
        "no tools: Python in the text, whose end is written anew, so each step is a sample",
        env=OPENAI,
        kind="code",
        retells=True,
    ),
    Program(
        "qwen-agent",
        CHAT,
        "{agent} '{task}'",
        (*two_calls("bash"), DONE),
        "bash",
        "no tools: calls and results in the text; a `seed`, which is ignored",
        env=OPENAI,
        retells=True,
    ),
)
