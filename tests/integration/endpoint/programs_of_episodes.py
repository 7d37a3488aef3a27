"""Episodes of programs against the real endpoint, with a policy that always gives the same answer."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.api import (
    Completion,
    FinishReason,
    GenerationClient,
    GenerationRequest,
    GenerationResult,
    Prompt,
    Sample,
    SamplingParams,
    Tokenizer,
)
from asyncrl.chat.template import ChatFormat
from asyncrl.inference.openai.endpoint import Endpoint
from asyncrl.plugins.agents.command import CommandAgent
from asyncrl.rollout.episode import run_group
from asyncrl.rollout.user_code.conversations import ServedEpisodeClient

ANSWER = "the answer is 4"
ASK = """
import json, os, sys, time, urllib.request

def ask(text):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["KEY"], "Content-Type": "application/json"}
    asked = urllib.request.Request(os.environ["BASE"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

"""
"""Beginning of a program."""
ADDRESS = {"BASE": "{base_url}", "KEY": "{api_key}"}


@dataclass
class Episodes:
    """Plays episodes of programs.

    Attributes:
        scored: what the environment was given to score.
        fails: the policy answers with an error.
    """

    endpoint: Endpoint
    chat: ChatFormat
    tokenizer: Tokenizer
    scored: list[str] = field(default_factory=list)
    fails: bool = False

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if self.fails:
            raise RuntimeError("no server is left")
        ids = [*self.tokenizer.encode(ANSWER), self.tokenizer.eos_token_id or 0]
        answer = Completion(ids, [-1.0] * len(ids), [0] * len(ids), FinishReason.stop)
        return GenerationResult(request.request_id, (answer,))

    async def reset(self, **_: object) -> tuple[str, Mapping[str, Any]]:
        return "", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        self.scored.append(action)
        return "", float(len(action)), True, False, {}

    async def close(self) -> None:
        """Of an environment."""

    async def play(self, agent: CommandAgent, **row: Any) -> Sequence[Sample]:
        """One episode, as a RolloutWorker plays it; raises the error of one that is lost."""
        prompt = Prompt("p", 0, {"prompt": "2 + 2 = ?", **row}, (), 1, SamplingParams(max_new_tokens=40, seed=1))
        env: Any = self

        def client(policy: GenerationClient, prompt: Prompt) -> ServedEpisodeClient:
            return ServedEpisodeClient(policy, prompt, self.chat, endpoint=lambda: self.endpoint)

        samples, _ = await run_group(agent, lambda: env, prompt, self, client)
        return samples


def agent_of(program: str, **args: Any) -> CommandAgent:
    """An agent whose program is this text, in Python; its reward is 1 unless given."""
    given: dict[str, Any] = {
        "command": [sys.executable, "-I", "agent.py", "{row.prompt}"],
        "files": {"agent.py": ASK + program, **args.pop("files", {})},
        "env": ADDRESS | args.pop("env", {}),
        "reward": f"{__file__}:one",
    }
    return CommandAgent(**given | args)


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for what another process brings about."""
    ends_at = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.02)


def dies(program: str, temporary: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start a worker that does `program`, in Python, with temporary files in a folder; return it and its first line."""
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(temporary)})
    assert worker.stdout is not None
    with worker.stdout:
        return worker, worker.stdout.readline().strip()


def one(prompt: Prompt, folder: Path) -> float:
    """The reward of any folder."""
    return 1.0
