"""Values that pass between an agent in a process and the worker arrive unchanged."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from asyncrl.api import (
    ChatClient,
    ChatFinish,
    ChatReply,
    Completion,
    Environment,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Prompt,
    Sample,
    SamplingParams,
    ToolCall,
)
from asyncrl.rollout.user_code_pool.agent_protocol import ChildAgent, answer, outcome_of
from asyncrl.rollout.user_code_pool.child import LENGTH, ChildReply, PolicyAnswer, packed
from tests import every_field

MINE = """
def run(prompt, env, client, *, chat):
    seen = {"prompt": prompt, "chat": chat}
    tools = [{"type": "function", "function": {"name": "area", "parameters": {}}}]
    messages = [{"role": "user", "content": "?"}]
    seen["reply"] = client.chat(messages, tools=tools, sampling=prompt.sampling, n=2)
    seen["ids"] = client.prompt_ids(messages)
    seen["result"] = client.generate(REQUEST)
    seen["session"] = client.endpoint()
    seen["reset"], seen["step"] = env.reset(seed=3, options={"data": {}}), env.step("go")
    seen["samples"] = client.samples(0.5)
    judge = client.conversation("judge")
    seen["judge"], seen["judge_session"] = judge.chat(messages), client.endpoint("judge")
    seen["past"] = client.policy("past").conversation("role").chat(messages)
    SEEN.update(seen)
    return seen["samples"]
"""
COMPLETION = Completion([3, 4], [-0.5, -0.25], [1, 2], FinishReason.stop)
CALL = ToolCall("c1", "area", {"width": 2.5})
OTHER = ChatReply({"role": "assistant"}, "b", None, (), 1, ChatFinish.length, (1,), COMPLETION)
SAID = {"role": "assistant", "content": "a"}
REPLY = ChatReply(SAID, "a", "because", (CALL,), 0, ChatFinish.tool_calls, (1, 2), COMPLETION, (OTHER,))
RESULT = GenerationResult("r", (COMPLETION,))
REQUEST = GenerationRequest("r", (1, 2), 1, SamplingParams(seed=7, stop=("x",)))
SAMPLE = replace(every_field.SAMPLE, routing=None)  # refused with an agent in a process
PROMPT = Prompt("p", 4, {"prompt": "?", "more": [1]}, (1, 2), 3, SamplingParams(seed=7, allowed_token_ids=(1, 2)), 2)


class Client:
    def __init__(self, role: str = "") -> None:
        self.asked: list[Any] = []
        self.judge: Client | None = None
        self.past: Client | None = None
        self.role = role
        self.opened = 0

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.asked.append(request)
        return RESULT

    async def chat(self, messages: Any, **others: Any) -> ChatReply:
        self.asked += [messages, others]
        return REPLY

    def prompt_ids(self, messages: Any) -> tuple[int, ...]:
        return (8, 9)

    def samples(self, reward: float = 0.0) -> list[Sample]:
        return [replace(SAMPLE, reward=reward), SAMPLE]

    def policy(self, name: str) -> Client:
        assert name == "past"
        self.past = self.past or Client(role="role")
        return self.past

    def conversation(self, group: str) -> Client:
        if self.role:
            assert group == self.role
            return self
        self.judge = self.judge or Client()
        assert group == "judge"
        return self.judge

    async def endpoint(self) -> Any:
        self.opened += 1
        return SimpleNamespace(base_url="http://x/v1", root_url="http://x", api_key="sk")


class Env(Environment):
    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return f"seed {seed}", {"options": options}

    async def step(self, action: Any) -> Any:
        return action, 1.0, True, False, {}


def over_the_pipe(message: Any) -> Any:
    return msgspec.msgpack.decode(packed(message)[LENGTH.size :], type=type(message))


@pytest.fixture
def child(tmp_path: Path, tiny_model: Path) -> Any:
    """`child(client)`: what the agent saw, and what its episode gave, as the worker reads it."""
    module = tmp_path / "mine.py"
    module.write_text(MINE)

    def play(client: Client) -> tuple[dict[str, Any], Any]:
        def ask(name: str, args: Any, kwargs: Any) -> Any:
            name, args, kwargs = over_the_pipe(ChildReply(asks=[name, args, kwargs])).asks
            return over_the_pipe(
                PolicyAnswer(asyncio.run(answer(Env(), cast(ChatClient, client), name, args, kwargs)))
            ).value

        agent = ChildAgent(f"{module}:run", {}, str(tiny_model), True, ask)
        seen: dict[str, Any] = {}
        agent._run.func.__globals__.update(SEEN=seen, REQUEST=REQUEST)
        prompt = over_the_pipe(PolicyAnswer(PROMPT)).value
        return seen, outcome_of(over_the_pipe(ChildReply(agent.run(prompt))).value)

    return play


def test_what_an_agent_in_a_process_is_given_is_what_the_worker_has(child: Any) -> None:
    client = Client()
    seen, outcome = child(client)
    assert (seen["prompt"], seen["chat"]) == (PROMPT, True)
    assert seen["reply"] == REPLY
    assert (seen["ids"], seen["result"]) == ((8, 9), RESULT)
    assert client.judge is not None
    assert (client.judge.asked, client.judge.opened) == ([[{"role": "user", "content": "?"}], {}], 1)
    assert (seen["judge"], seen["judge_session"].api_key) == (REPLY, "sk")
    assert (seen["past"], client.past.asked) == (REPLY, client.judge.asked)
    assert seen["session"] == SimpleNamespace(base_url="http://x/v1", root_url="http://x", api_key="sk")
    assert seen["reset"] == ("seed 3", {"options": {"data": {}}})
    assert seen["step"] == ("go", 1.0, True, False, {})
    messages, others, request = client.asked
    assert messages == [{"role": "user", "content": "?"}]
    assert (others["sampling"], others["n"]) == (PROMPT.sampling, 2)
    assert request == REQUEST
    assert every_field.differences(outcome[1], SAMPLE) == []
    assert every_field.differences(outcome[0], replace(SAMPLE, reward=0.5)) == []
