"""Programs outside the run open sessions at a door, over the real gate, ledger and rollout loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from simulator.simulated_code import FakeComponents

from asyncrl.api import (
    Completion,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Prompt,
    SamplingParams,
    Trajectory,
)
from asyncrl.chat.template import ChatFormat
from asyncrl.comm.ended_rollouts import RolloutCounts, RunSettings
from asyncrl.data.prompt_queue import DataOrder, PromptRef
from asyncrl.manager import messages as m
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.rollouts.rollout_state import Ledger
from asyncrl.manager.service import ManagerService
from asyncrl.rollout.loop import RolloutLoop
from asyncrl.rollout.online.agent import OnlineAgent
from asyncrl.rollout.online.door import Door
from asyncrl.rollout.rollout_client import RolloutClient
from asyncrl.rollout.settings import ConversationConfig, RolloutConfig
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code.conversations import ServedEpisodeClient
from asyncrl.verify.audit.ledger_files import read_ledger, surviving
from asyncrl.verify.audit.ledger_rules import Replay

ROWS, WORKER, KEY = 1000, "rollout_worker/0", "sk-run"
MESSAGES = {"model": "policy", "messages": [{"role": "user", "content": "the"}]}


class Run:
    """A worker with a door, a manager with its ledger, and a trainer of one number: B rollouts make a version."""

    def __init__(
        self, chat: ChatFormat, folder: Path, batch: int, eta: int, group: int, times: dict[str, float]
    ) -> None:
        self.batch, self.group, self.folder = batch, group, folder
        self.ledger = Ledger(folder, RunSettings(batch, eta, "wait", 1, 0, shuffle=False))
        order = DataOrder(ROWS, 0, shuffle=False)
        self.service = ManagerService(
            batch_size=batch, max_staleness=eta, routing="least_requests", lease_s=1e9, order=order, ledger=self.ledger
        )
        self.version = self.asked = 0
        self.pushed: dict[str, Trajectory] = {}
        self.untrained: list[Trajectory] = []
        self.reporting: set[asyncio.Task[Any]] = set()
        self.error: Exception | None = None
        """Of the policy."""
        self.generating = asyncio.Event()
        self.generating.set()
        agent = OnlineAgent(**times)
        rules = [ConversationConfig(header="x-side", group="side")]
        self.door = agent.door = Door(sessions=agent.sessions, key=KEY, batch_size=batch, conversations=rules)

        def make_client(policy: Any, prompt: Prompt) -> ServedEpisodeClient:
            return ServedEpisodeClient(policy, prompt, chat, endpoint=lambda: self.door)

        def train_prompt(ref: PromptRef, version: int) -> Prompt:
            return Prompt(ref.prompt_id, ref.order, {}, (1,), group, SamplingParams(max_new_tokens=8))

        components = FakeComponents(agent, train_prompt, make_client=make_client)
        parts = (cast(UserComponents, components), cast(ManagerClient, self), cast(RolloutClient, self), self.push)
        self.loop = RolloutLoop(*parts, RolloutConfig(max_concurrent=256), door=self.door)

    async def begin(self) -> None:
        await self.service.begin_run(m.RunBegin())
        self.service.await_workers({})
        self.serve(0)
        self.url = await self.door.listen()
        self.working = asyncio.create_task(self.loop.run())
        self.http = aiohttp.ClientSession()

    async def end(self) -> None:
        """What is left is abandoned; the audit, which knows none of this code, finds nothing in the ledger."""
        assert not self.working.done()
        self.working.cancel()
        await asyncio.gather(self.working, *self.reporting, return_exceptions=True)
        await self.door.close()
        await self.http.close()
        await self.service.close_gate(m.CloseGate())
        assert (await self.service.end_run(m.EndReport(self.version))).balanced
        self.ledger.close()
        found: list[str] = []

        def find(place: str, what: str) -> None:
            found.append(f"{place}: {what}")

        trained = Replay(ROWS, find).run(surviving(read_ledger(self.folder, find), find)).trained
        assert (found, trained) == ([], self.version * self.batch)

    # What the loop calls: manager, servers, ranks.

    async def allocate(self, rollouts: Sequence[str], *, timeout_s: float) -> m.AllocateReply:
        request = m.AllocateRequest(worker=WORKER, rollouts=list(rollouts), timeout_s=timeout_s)
        return await self.service.allocate_rollout(request)

    def finish(self, rollouts: Sequence[m.FinishedRollout]) -> None:
        task = asyncio.create_task(self.service.finish_rollout(m.FinishRequest(worker=WORKER, finished=list(rollouts))))
        self.reporting.add(task)
        task.add_done_callback(self.reporting.discard)

    async def call(self, request: Any) -> Any:
        if isinstance(request, m.StatusRequest):
            return m.StatusReply(self.service.gate_state(), [], None, [WORKER])
        return await self.service.wait_expiring(request)

    async def generate(
        self, request: GenerationRequest, rollout_id: str, *, route: m.Route | None = None
    ) -> GenerationResult:
        self.asked += 1
        await self.generating.wait()
        if self.error is not None:
            raise self.error
        completion = Completion([11, 12], [-0.5, -0.5], [self.version] * 2, FinishReason.stop)
        return GenerationResult(request.request_id, (completion,) * request.n)

    async def push(self, trajectory: Trajectory) -> None:
        tokens = sum(len(sample.tokens) for sample in trajectory.samples)
        oldest = min(int(sample.versions.max()) for sample in trajectory.samples)
        head = (trajectory.rollout_id, trajectory.prompt_id, trajectory.order)
        received = m.ReceivedRollout(*head, oldest, tokens)
        assert (await self.service.received(m.ReceivedReport([received]))).refused == []
        self.pushed[trajectory.rollout_id] = trajectory
        self.untrained.append(trajectory)

    def serve(self, version: int) -> None:
        self.service.router.update(0, "http://server", version, True)
        self.service.routes_changed(version)

    async def train(self) -> None:
        """A step, as soon as B rollouts are there and none would expire (`on_stale=wait`)."""
        while len(self.untrained) < self.batch or self.service.gate.is_blocked(self.version):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        batch, self.untrained = self.untrained[: self.batch], self.untrained[self.batch :]
        trained = []
        for each in batch:
            versions = [version for sample in each.samples for version in sample.versions.tolist() if version >= 0]
            counts = {version: versions.count(version) for version in set(versions)}
            reward = sum(sample.reward for sample in each.samples) / len(each.samples)
            head = (each.rollout_id, each.prompt_id, each.order, counts)
            episodes = len({sample.episode for sample in each.samples})
            trained.append(m.TrainedRollout(*head, episodes, len(each.samples), reward))
        self.version += 1
        await self.service.consumed(m.ConsumedReport(self.version, trained))
        self.serve(self.version)

    @property
    def counts(self) -> RolloutCounts:
        return self.service.gate.counts()

    # What a client calls.

    async def call_door(
        self, url: str, key: str, body: object = None, *, method: str = "POST", side: bool = False
    ) -> tuple[int, dict[str, Any], Any]:
        headers = {"Authorization": f"Bearer {key}"} | ({"x-side": "yes"} if side else {})
        async with self.http.request(method, url, headers=headers, json=body) as answer:
            return answer.status, await answer.json(), answer.headers

    async def open(self, key: str = KEY) -> tuple[int, dict[str, Any]]:
        status, answer, _ = await self.call_door(f"{self.url}/v1/sessions", key)
        return status, answer

    async def session(self) -> Client:
        status, answer = await self.open()
        assert status == 200, answer
        (given,) = answer["sessions"]
        return Client(self, given)


class Client:
    """A program outside the run, with a session."""

    def __init__(self, run: Run, given: dict[str, Any]) -> None:
        self.run, self.given = run, given
        self.url, self.key = given["base_url"], given["api_key"]

    async def ask(self, *, side: bool = False) -> tuple[int, str]:
        status, answer, _ = await self.run.call_door(f"{self.url}/chat/completions", self.key, MESSAGES, side=side)
        return status, answer["error"]["code"] if "error" in answer else answer["choices"][0]["message"]["content"]

    async def reward(self, reward: object, **more: object) -> tuple[int, str | None]:
        status, answer, _ = await self.run.call_door(f"{self.url}/reward", self.key, {"reward": reward, **more})
        return status, answer["error"]["code"] if "error" in answer else None

    async def delete(self) -> int:
        return (await self.run.call_door(self.url, self.key, method="DELETE"))[0]

    async def play(self, reward: float = 1.0) -> None:
        assert (await self.ask())[0] == 200
        assert await self.reward(reward) == (200, None)


@pytest_asyncio.fixture
async def make_run(chat: ChatFormat, tmp_path: Path) -> AsyncIterator[Any]:
    runs: list[Run] = []

    async def begin(batch: int = 2, eta: int = 1, group: int = 1, **times: float) -> Run:
        runs.append(Run(chat, tmp_path, batch, eta, group, times))
        await runs[-1].begin()
        return runs[-1]

    yield begin
    for run in runs:
        await run.end()


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what happens is the other end's
            await asyncio.sleep(0.01)


async def test_a_session_is_played_rewarded_once_and_trained(make_run: Any) -> None:
    run = await make_run(batch=1)
    client = await run.session()
    assert (client.given["version"], client.given["lease_s"]) == (0, 300.0)
    assert await client.reward(1.0) == (409, "nothing_to_reward")
    assert (await client.ask())[0] == 200
    huge = {"reward": 1e300, "metrics": {"reward": 0.0}}
    wrong = {"reward": "good"}, {"reward": 1.0, "turns": [1.0]}, {"reward": 1.0, "metrics": {"tests": "all"}}, huge
    for body in wrong:
        status, answer, _ = await run.call_door(f"{client.url}/reward", client.key, body)
        assert status == 400, answer
    assert await client.reward(0.5, metrics={"tests": 3}) == (200, None)
    assert await client.reward(0.5, metrics={"tests": 3}) == (200, None), "the reply was lost"
    assert await client.reward(1.0, metrics={"tests": 3}) == (409, "other_reward")
    assert await client.ask() == (410, "session_rewarded")
    assert await client.delete() == 410
    await run.train()
    (trajectory,) = run.pushed.values()
    (sample,) = trajectory.samples
    assert (sample.reward, sample.metrics, int(sample.loss_mask.sum())) == (0.5, {"tests": 3.0}, 2)
    assert (run.counts.trained, run.counts.submitted) == (1, 1)


async def test_wrong_keys_and_unknown_sessions_are_refused_and_counted_by_name(make_run: Any) -> None:
    run = await make_run()
    assert (await run.open("sk-other"))[0] == 401
    client = await run.session()
    assert (await run.open(client.key))[0] == 401, "a session's key opens no other"
    for url, key in ((client.url, "sk-other"), (f"{run.url}/s/none/v1", client.key), (client.url, KEY)):
        status, _, _ = await run.call_door(f"{url}/reward", key, {"reward": 1.0})
        assert status == (404 if "none" in url else 401)
    assert run.door.refused == {"wrong_run_key": 2, "invalid_api_key": 2, "session_not_found": 1}
    assert run.door.figures()["online_refused_total"] == 5


async def test_the_gate_is_asked_only_for_clients_that_wait_and_they_wait_for_so_long(make_run: Any) -> None:
    run = await make_run(batch=1, eta=0, wait_s=0.3)
    await asyncio.sleep(0.1)
    assert run.counts.submitted == 0
    client = await run.session()
    status, answer, headers = await run.call_door(f"{run.url}/v1/sessions", KEY)
    assert (status, answer["error"]["code"], headers["Retry-After"]) == (429, "no_room", "1")
    assert run.counts.submitted == 1
    waiting = asyncio.create_task(run.session())
    await until(lambda: run.door.figures()["online_clients"] == 1)
    assert await client.delete() == 200
    assert await client.delete() == 200
    assert await (await waiting).delete() == 200
    await until(lambda: run.counts.dropped == {"agent_rejected": 2})


async def test_a_client_that_leaves_while_it_waits_costs_one_rollout_at_most(make_run: Any) -> None:
    run = await make_run(batch=1, eta=0, wait_s=30.0)
    client = await run.session()
    leaving = asyncio.create_task(run.open())
    await until(lambda: run.door.figures()["online_clients"] == 1)
    await asyncio.sleep(0.1)  # the gate is asked by now
    leaving.cancel()
    await until(lambda: run.door.figures()["online_clients"] == 0)
    await client.delete()
    await until(lambda: run.counts.dropped == {"agent_rejected": 1, "client_left": 1})
    await (await run.session()).play()
    await run.train()


async def test_sessions_that_hang_cost_their_leases_and_nothing_else(make_run: Any) -> None:
    run = await make_run(batch=100, eta=0, lease_s=2.0)
    hanging = await asyncio.gather(*(run.session() for _ in range(100)))
    await until(lambda: run.counts.dropped == {"session_silent": 100})
    assert await hanging[0].ask() == (410, "session_silent")
    assert await hanging[1].reward(1.0) == (410, "session_silent")
    assert run.pushed == {}
    await (await run.session()).play()
    await until(lambda: len(run.pushed) == 1)
    assert (run.counts.dropped, run.counts.running) == ({"session_silent": 100}, 0)


async def test_a_lease_does_not_run_out_while_the_policy_answers(make_run: Any) -> None:
    run = await make_run(batch=1, lease_s=1.0)
    client = await run.session()
    run.generating.clear()
    asking = asyncio.create_task(client.ask())
    await asyncio.sleep(2.0)
    run.generating.set()
    assert (await asking)[0] == 200
    assert await client.reward(1.0) == (200, None)


async def test_a_session_that_keeps_a_step_waiting_ends(make_run: Any) -> None:
    """B = 1, η = 1: the first session is of version 0, and the second step would make it expire."""
    run = await make_run(batch=1, eta=1, hold_s=0.4)
    slow = await run.session()
    assert (await slow.ask())[0] == 200
    await (await run.session()).play()
    await run.train()
    await asyncio.sleep(0.6)
    assert (await slow.ask())[0] == 200, "nothing waits for it yet"
    await (await run.session()).play()
    step = asyncio.create_task(run.train())
    await until(lambda: run.counts.dropped == {"session_over_age": 1})
    await step
    assert await slow.ask() == (410, "session_over_age")
    assert await slow.reward(1.0) == (410, "session_over_age")


async def test_a_group_is_trained_without_its_silent_member(make_run: Any) -> None:
    run = await make_run(batch=1, group=3, lease_s=3.0)
    _, answer = await run.open()
    first, second, _ = [Client(run, given) for given in answer["sessions"]]
    assert (await first.ask())[0] == 200
    run.generating.clear()
    asking = asyncio.create_task(first.ask())
    await until(lambda: run.asked == 2)
    assert await first.reward(1.0) == (200, None)
    assert await asking == (410, "session_rewarded"), "though the group goes on"
    run.generating.set()
    await second.play(0.0)
    await run.train()
    (trajectory,) = run.pushed.values()
    assert [(sample.episode, sample.reward) for sample in trajectory.samples] == [(0, 1.0), (1, 0.0)]
    assert trajectory.metrics["rollout/lost_episodes: online session silent"] == 1.0


@pytest.mark.parametrize("side", [False, True])
async def test_a_session_whose_policy_failed_is_not_trained_whatever_its_client_says(
    side: bool, make_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = await make_run(batch=1)
    run.loop._tries = type(run.loop._tries)(3)
    client = await run.session()
    assert (await client.ask())[0] == 200
    run.error = RuntimeError("no server")
    assert await client.ask(side=side) == (500, "policy_failed")
    assert await client.reward(1.0) == (200, None)
    await until(lambda: run.counts.dropped == {"failed": 1})
    assert [each.message.partition("is lost: ")[2] for each in caplog.records if "episode 0" in each.message] == [
        "agent OnlineAgent raised RuntimeError"
    ], "at once: the session is over"
    run.error = None
    await (await run.session()).play()
    await run.train()


async def test_a_session_ends_with_the_time_of_its_rollout_and_a_call_hears_it(make_run: Any) -> None:
    run = await make_run(batch=1)
    run.loop._tries = type(run.loop._tries)(1, 1, 0.3)
    client = await run.session()
    run.generating.clear()
    assert await client.ask() == (410, "session_closed")
    await until(lambda: run.counts.dropped == {"timeout": 1})
    run.generating.set()


def test_the_key_is_the_owners_and_the_same_for_all_workers(tmp_path: Path) -> None:
    from asyncrl.rollout.online.agent import run_key

    key = run_key(tmp_path / "online")
    assert run_key(tmp_path / "online") == key
    assert [file.name for file in (tmp_path / "online").iterdir()] == ["key"]
    assert (tmp_path / "online" / "key").stat().st_mode & 0o777 == 0o600


async def test_an_agent_without_a_door_says_so(chat: ChatFormat) -> None:
    with pytest.raises(RuntimeError, match="no door"):
        await OnlineAgent().roll_out(cast(Any, None), cast(Any, None), cast(Any, SimpleNamespace()))
