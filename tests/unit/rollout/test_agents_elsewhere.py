"""Users' agents off the worker's event loop: whom they reach from there, and until when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from asyncrl.api import Agent, Environment, GenerationRequest, GenerationResult, Prompt, SamplingParams
from asyncrl.rollout.episode import run_group
from asyncrl.rollout.settings import UserCodeConfig
from asyncrl.rollout.user_code.episode_code import adapted_agent
from asyncrl.rollout.user_code.hosted import HostedEnvironment
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner

LIMIT_S = 300.0
REQUEST = GenerationRequest("r", (1,), 1, SamplingParams())
PROMPT = Prompt("p", 0, {}, (1,), 1, SamplingParams())


class Client:
    """A client that answers on the loop it was made on, with its own name."""

    def __init__(self) -> None:
        self.name, self.metrics, self._home = "own", dict[str, float](), asyncio.get_running_loop()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        assert asyncio.get_running_loop() is self._home
        return GenerationResult(self.name, ())

    def conversation(self, group: str) -> Client:
        return self._other(f"{self.name}/{group}")

    def policy(self, name: str) -> Client:
        return self._other(name)

    def _other(self, name: str) -> Client:
        other = Client.__new__(Client)
        other.name, other._home = name, self._home
        return other

    def close(self) -> None:
        pass


class World(Environment):
    policy = "a field of the user's"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "", {}

    def step(self, action: Any) -> Any:
        return threading.get_ident(), 1.0, True, False, {}

    async def look(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()


@pytest.fixture
async def runner() -> AsyncIterator[UserCodeRunner]:
    async with UserCodeRunner(UserCodeConfig(threads=4)) as made:
        yield made


async def play(agent: Agent, runner: UserCodeRunner, policy: Any = None) -> None:
    def env() -> Environment:
        return HostedEnvironment(World, "env World", LIMIT_S, runner)

    def client(policy: Any, own: Prompt) -> Any:
        return policy.policy if isinstance(policy.policy, Client) else policy

    async with asyncio.timeout(LIMIT_S):
        await run_group(adapted_agent(agent, runner), env, PROMPT, policy or Client(), client)


def clients_of(client: Any) -> list[Any]:
    return [client, client.conversation("judge"), client.policy("past"), client.policy("past").conversation("role")]


NAMES = ["own", "own/judge", "past", "past/role"]


async def test_the_clients_that_an_agent_is_handed_answer_on_the_workers_loop(runner: UserCodeRunner) -> None:
    reported: dict[str, list[str]] = {}

    class OnLoop(Agent):
        async def run(self, prompt: Prompt, env: Environment, client: Any) -> None:
            reported["loop"] = [(await each.generate(REQUEST)).request_id for each in clients_of(client)]

    class InThread(Agent):
        def run(self, prompt: Prompt, env: Environment, client: Any) -> None:  # type: ignore[override]
            reported["thread"] = [each.generate(REQUEST).request_id for each in clients_of(client)]

    class Group(Agent):
        def run_group(self, prompt: Prompt, make_env: Any, client: Any) -> Any:
            own = client.episode(prompt.of_member(0))
            reported["group"] = [each.generate(REQUEST).request_id for each in clients_of(own)]
            return []

    for agent in (OnLoop(), InThread(), Group()):
        await play(agent, runner)
    assert reported == {"loop": NAMES, "thread": NAMES, "group": NAMES}


async def test_an_environment_in_its_agents_thread_runs_there_and_keeps_its_own_names(runner: UserCodeRunner) -> None:
    home, seen = asyncio.get_running_loop(), dict[str, Any]()

    class InThread(Agent):
        def run(self, prompt: Prompt, env: Any, client: Any) -> None:  # type: ignore[override]
            env.reset()
            seen.update(own=threading.get_ident(), step=env.step("go")[0], policy=env.policy, looked=env.look())

    await play(InThread(), runner)
    assert seen == {"own": seen["step"], "step": seen["own"], "policy": World.policy, "looked": home}


async def test_a_thread_whose_rollout_has_ended_is_answered_no_more(runner: UserCodeRunner) -> None:
    reported, asked = list[BaseException](), asyncio.Event()
    resume, is_over = threading.Event(), threading.Event()

    class Silent(Client):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    class InThread(Agent):
        def run(self, prompt: Prompt, env: Environment, client: Any) -> None:  # type: ignore[override]
            for _ in range(2):
                try:
                    client.generate(REQUEST)
                except BaseException as error:
                    reported.append(error)
                resume.wait(LIMIT_S)
            is_over.set()

    playing = asyncio.create_task(play(InThread(), runner, Silent()))
    async with asyncio.timeout(LIMIT_S):
        await asked.wait()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        resume.set()
        assert await asyncio.to_thread(is_over.wait, LIMIT_S)
    assert isinstance(reported[0], CancelledError)
    assert "generate was called after the rollout had ended" in str(reported[1])
