"""ModelWorkers as processes: trajectories come in, calls are answered, weights and checkpoints go out."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.comm import names
from asyncrl.comm.name_resolve import make_resolver
from asyncrl.comm.push_pull import TrajectoryPusher, TrajectoryRejected
from asyncrl.comm.request_reply import Done, PeerGone, R, RemoteError, Request, RequestClient
from asyncrl.comm.security import RunSecret
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import SECRET_FILE, write_run_config
from asyncrl.data.tokenizers import CharTokenizer
from asyncrl.master.graph import load_graph
from asyncrl.master.step import Assignment, Dealing, assign, plan_step
from asyncrl.runtime.supervisor import STOP_SIGNAL
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.trainer.messages import (
    AskPulse,
    CollectWeights,
    CommitCheckpoint,
    Discard,
    EndStep,
    FinishShare,
    LoadCheckpoint,
    LoadedCheckpoint,
    PollBuffer,
    Publish,
    RolloutRecord,
    RunCall,
    SaveCheckpoint,
    ScoreAhead,
)
from asyncrl.trainer.parallel.placement import Placement, WorkerGrid
from asyncrl.weights.logprob_probe import read_probe
from asyncrl.weights.manifest import verify

from ..conftest import StartWorker
from ..warm import WarmProcess

LIMIT_S = 300.0
"""Time limit in seconds of waits for what must come, among it the start of a process that imports torch."""
GROUPS, MINIBATCHES = 8, 2


def trajectories(step: int) -> list[Trajectory]:
    """The rollouts of a step; the same whatever runs them."""
    rng = np.random.default_rng(step)
    made = []
    for order in range(GROUPS):
        samples = []
        for episode in range(4):
            length = int(rng.integers(6, 30))
            mask = (np.arange(length) >= 4).astype(np.uint8)
            samples.append(
                Sample(
                    tokens=rng.integers(0, 17, length).astype(np.int32),
                    loss_mask=mask,
                    behave_logprobs=(-2.8 * mask).astype(np.float32),
                    versions=np.where(mask, step, -1).astype(np.int32),
                    reward=float(rng.random() < 0.5),
                    episode=episode,
                )
            )
        made.append(Trajectory(f"step{step}-{order}", f"e0-{step * GROUPS + order}", order, tuple(samples)))
    return made


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        vocab_size=17,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
    CharTokenizer().save(folder)
    return folder


class Workers:
    """The ModelWorkers of a run, as the master and one RolloutWorker see them."""

    def __init__(
        self, config: ExperimentConfig, run_dir: Path, processes: list[subprocess.Popen[str] | WarmProcess]
    ) -> None:
        self.config, self.run_dir, self.processes = config, run_dir, processes
        secret = RunSecret.load(run_dir / SECRET_FILE).sockets()
        resolver = self.resolver = make_resolver("file", str(run_dir / "name_resolve"))
        self.clients, pullers = [], []
        for index in range(len(processes)):
            address = names.WorkerAddress.decode(resolver.wait(names.worker_key("model_worker", index), LIMIT_S))
            self.clients.append(RequestClient(address.endpoint, secret, name=f"model_worker/{index}"))
            pullers.append(resolver.wait(names.puller_key(index), LIMIT_S))
        self.pushers = [
            TrajectoryPusher([puller], secret, identity=f"test/{index}") for index, puller in enumerate(pullers)
        ]
        self.cursors = [0] * len(processes)
        self.master = 0

    async def all(self, request: Request[R]) -> list[R]:
        return await asyncio.gather(*(client.call(request, timeout_s=LIMIT_S) for client in self.clients))

    def announce(self, version: int) -> None:
        """As the master does once it is published."""
        published = names.PublishedVersion(version, "somewhere").encode()
        self.resolver.add(names.model_version_key("actor"), published, replace=True)

    async def push(self, step: int) -> None:
        """Rollouts land on the ranks in turn, but not where they are trained."""
        self.announce(step)
        for number, trajectory in enumerate(trajectories(step)):
            await self.pushers[number % len(self.pushers)].push(trajectory, LIMIT_S)

    async def records(self) -> list[RolloutRecord]:
        received: list[RolloutRecord] = []
        for index, client in enumerate(self.clients):
            polled = await client.call(PollBuffer(self.cursors[index], LIMIT_S), timeout_s=2 * LIMIT_S)
            self.cursors[index] = polled.cursor
            received += polled.rollouts
        return sorted(received, key=lambda record: record.order)

    async def train(self, step: int, *, ahead: str | None = None) -> dict[str, Any]:
        """`ahead`: the role that scores all rollouts but the first before the step, as the reference."""
        await self.push(step)
        records = await self.records()
        assert len(records) == GROUPS
        if ahead is not None:
            await self.score_ahead(records[1:], step, ahead)
        assignment = assign(records, len(self.clients), Dealing(MINIBATCHES, seed=1), version=step)
        await self.begin(assignment, step, MINIBATCHES)
        stats: dict[str, Any] = {}
        for call in load_graph(self.config).order():
            request = RunCall(call.name, call.role, call.function, call.reads, call.writes, dict(call.args))
            replies = await self.all(request)
            assert all(reply == replies[0] for reply in replies)
            stats |= replies[0].stats
        assert min(ended.memory_bytes for ended in await self.all(EndStep())) > 2**20
        return stats

    async def score_ahead(self, records: list[RolloutRecord], step: int, role: str) -> None:
        held = (tuple(each.rollout_id for each in records if each.head == head) for head in range(len(self.clients)))
        call = RunCall("ref_inf", role, "ref_inf", ("tokens", "loss_mask"), ("ref_logprobs",), {})
        (before, *_) = await self.all(AskPulse())
        await self.all(ScoreAhead(step, tuple(held), (call,)))
        (after, *_) = await self.all(AskPulse())
        assert after.pieces > before.pieces, "a sign of life"

    async def begin(self, assignment: list[Assignment], step: int, minibatches: int) -> None:
        """Tell each rank its part of the plan."""
        placed = Placement({"actor": WorkerGrid(data=len(self.clients))})
        reported = plan_step([assignment], placed, version=step, min_version=0, minibatches=minibatches)
        calls = zip(self.clients, reported, strict=True)
        await asyncio.gather(*(client.call(request, timeout_s=LIMIT_S) for client, request in calls))

    async def publish(self, version: int) -> str:
        return (await self.all(Publish("actor", version, to_disk=True)))[0].path

    def published(self) -> list[str]:
        return [folder.name for folder in (self.run_dir / "weights" / "actor").glob("v*")]

    async def save(self, path: Path, state: dict[str, Any], *, in_memory: bool = False) -> None:
        """As the master does, to the end."""
        await self.all(SaveCheckpoint(str(path), state["version"], state, in_memory))
        await self.finish_saving(path, in_memory=in_memory)

    async def finish_saving(self, path: Path, *, in_memory: bool) -> None:
        shares = await self.all(FinishShare(str(path), in_memory))
        files = {name: entry for share in shares for name, entry in share.files.items()}
        order = CommitCheckpoint(str(path), files, keep=1, in_memory=in_memory)
        await self.clients[0].call(order, timeout_s=LIMIT_S)

    async def close(self) -> list[int]:
        """Stop the workers as the launcher does; returns their exit codes."""
        for pusher in self.pushers:
            await pusher.close(1.0)
        for client in self.clients:
            client.close()
        self.resolver.close()
        for process in self.processes:
            process.send_signal(STOP_SIGNAL)
        return [await asyncio.to_thread(process.wait, LIMIT_S) for process in self.processes]


pytestmark = pytest.mark.slow
StartWorkers = Callable[..., Any]


@pytest.fixture
def start(model_dir: Path, tmp_path: Path, start_worker: StartWorker) -> StartWorkers:
    """`async with start(ranks, trial) as workers`: ModelWorkers of a run whose folder is named after the trial."""

    @asynccontextmanager
    async def running(ranks: int, trial: str) -> AsyncIterator[Workers]:
        run_dir = tmp_path / trial
        run_dir.mkdir(exist_ok=True)
        config = ExperimentConfig(train_batch_size=GROUPS, group_size=4, total_train_steps=8)
        config.model.path = str(model_dir)
        config.trainer.parallel, config.trainer.ppo_minibatches = f"d{ranks}", MINIBATCHES
        config.trainer.tokens_per_micro_batch = 100
        config.optimizer.lr, config.algorithm.kl_coef = 1e-3, 0.1
        config.system.start_timeout_s = LIMIT_S
        write_run_config(config, run_dir)
        if not (run_dir / SECRET_FILE).exists():
            RunSecret.create(run_dir / SECRET_FILE)
        shutil.rmtree(run_dir / "name_resolve", ignore_errors=True)  # as the launcher does: killed workers left entries
        processes = [start_worker("model_worker", index, run_dir) for index in range(ranks)]
        try:
            yield Workers(config, run_dir, processes)
        finally:
            for process in processes:
                process.kill()
                process.wait(LIMIT_S)

    return running


async def test_two_ranks_compute_what_one_does_publish_it_and_resume_as_one(start: StartWorkers) -> None:
    async with start(1, "straight") as workers:
        assert await workers.all(LoadCheckpoint("none")) == [LoadedCheckpoint(None)]
        expected = [(await workers.train(step))["ppo/loss_per_minibatch"] for step in range(3)]
        single = AutoModelForCausalLM.from_pretrained(await workers.publish(3))
        expected.append((await workers.train(3))["ppo/loss_per_minibatch"])
        assert await workers.close() == [0]
    assert np.abs(expected).max() > 1e-3

    state = {"version": 2, "used": ["e0-1", "e0-2"]}
    async with start(2, "resumed") as workers:
        losses = [(await workers.train(step, ahead="ref"))["ppo/loss_per_minibatch"] for step in range(2)]
        path = workers.run_dir / "checkpoints" / "v2"
        await workers.save(path, state)
        losses.append((await workers.train(2))["ppo/loss_per_minibatch"])
        np.testing.assert_allclose(losses, expected[:3], rtol=0, atol=1e-5)
        published = await workers.publish(3)
        assert verify(Path(published)).version == 3
        sharded = AutoModelForCausalLM.from_pretrained(published)
        probe = read_probe(Path(published))
        assert probe is not None
        for each in probe.sequences:
            tokens = torch.tensor([each.token_ids])
            with torch.no_grad():
                scored = sharded(tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
            np.testing.assert_allclose(each.logprobs[1:], scored, rtol=0, atol=1e-5)
        for a, b in zip(single.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)  # AdamW turns a last-bit difference into part of a step
        assert await workers.all(CollectWeights("actor", ())) == [Done(), Done()]
        assert workers.published() == []

    async with start(1, "resumed") as workers:  # the two ranks were killed
        assert await workers.all(LoadCheckpoint(str(path.parent))) == [LoadedCheckpoint(state)]
        stats = await workers.train(2)
        await workers.save(path.with_name("v3"), state | {"version": 3})
        assert await workers.close() == [0]
    assert stats["ppo/loss_per_minibatch"] == pytest.approx(expected[2], abs=1e-5)

    async with start(2, "resumed") as workers:
        loaded = LoadedCheckpoint(state | {"version": 3})
        assert await workers.all(LoadCheckpoint(str(path.parent))) == [loaded, loaded]
        stats = await workers.train(3, ahead="ref")
        own = await workers.train(4, ahead="actor")  # it has no distance to itself, so what was scored ahead is used
    assert stats["ppo/loss_per_minibatch"] == pytest.approx(expected[3], abs=1e-5)
    assert own["kl/reference"] < 0.5 * stats["kl/reference"]


async def test_metadata_is_told_until_acknowledged_and_failing_calls_are_reported(start: StartWorkers) -> None:
    async with start(1, "errors") as workers:
        client = workers.clients[0]
        empty = await client.call(PollBuffer(0, 0.0), timeout_s=LIMIT_S)
        assert (empty.cursor, empty.rollouts) == (0, ())
        poll = asyncio.create_task(client.call(PollBuffer(0, LIMIT_S), timeout_s=2 * LIMIT_S))
        await workers.pushers[0].push(trajectories(0)[0], LIMIT_S)
        polled = await poll
        assert [(record.rollout_id, record.head) for record in polled.rollouts] == [("step0-0", 0)]
        assert polled.rollouts[0].distinct > 0, "ranks share prefixes, so they are balanced by distinct tokens"
        assert await client.call(PollBuffer(0, LIMIT_S, at_least=2), timeout_s=LIMIT_S) == polled, "nothing is gathered"
        gathering = PollBuffer(0, LIMIT_S, at_least=2, gather_s=LIMIT_S)
        poll = asyncio.create_task(client.call(gathering, timeout_s=2 * LIMIT_S))
        await workers.pushers[0].push(trajectories(0)[1], LIMIT_S)
        polled = await poll
        assert [record.rollout_id for record in polled.rollouts] == ["step0-0", "step0-1"]
        after = await client.call(PollBuffer(polled.cursor, 0.0), timeout_s=LIMIT_S)
        assert after.rollouts == ()

        with pytest.raises(TrajectoryRejected, match="version 1, the newest is 0"):
            await workers.pushers[0].push(trajectories(1)[0], LIMIT_S)
        await workers.push(0)  # the first of these is there already
        await workers.all(Discard(tuple(f"step0-{order}" for order in range(3))))
        with pytest.raises(RemoteError, match="should hold rollout"):
            await workers.begin([Assignment("step0-0", 0, 0, (0,))], 0, 1)
        with pytest.raises(RemoteError, match="outside a step"):
            await workers.all(RunCall("x", "actor", "actor_train", (), (), {}))
        assert await workers.close() == [0]


async def test_a_rank_that_waits_for_a_peer_in_a_collective_ends_when_it_is_asked_to(start: StartWorkers) -> None:
    """The peer is stopped, as one whose host is cut off: it answers nobody, and its connections stand."""
    async with start(2, "stopped") as workers:
        waiting, peer = workers.processes
        peer.send_signal(signal.SIGSTOP)
        placed = Placement({"actor": WorkerGrid(data=2)})
        dealt = [Assignment("at the peer", src=1, dst=0, minibatches=(0,))]
        step, _ = plan_step([dealt], placed, version=0, min_version=0, minibatches=1)
        beginning = asyncio.create_task(workers.clients[0].call(step, timeout_s=LIMIT_S))
        observed = workers.run_dir / "observed" / "model_worker-0.jsonl"
        while "computes begin_step" not in observed.read_text():  # noqa: ASYNC110  # what is waited for is in another process
            await asyncio.sleep(0.05)
        waiting.send_signal(STOP_SIGNAL)
        assert await asyncio.to_thread(waiting.wait, LIMIT_S) == 0
        status = workers.resolver.get(names.status_key("model_worker", 0))
        assert names.WorkerStatus.decode(status).state == "done"
        with pytest.raises((PeerGone, RemoteError)):
            await beginning
        peer.send_signal(signal.SIGCONT)
        assert await workers.close() == [0, 0]


async def test_a_trajectory_of_the_process_before_is_taken_once_if_its_acknowledgement_was_lost(
    start: StartWorkers, tmp_path: Path
) -> None:
    (tmp_path / "again").mkdir()
    memory_checkpoint = MemoryCheckpoint(tmp_path / "again")
    memory_checkpoint.begin()  # as the launcher does
    try:
        async with start(1, "again") as workers:
            await workers.push(0)
        async with start(1, "again") as workers:
            (polled,) = await workers.all(PollBuffer(0, 0.0))
            assert len(polled.rollouts) == GROUPS, "restored"
            assignment = assign(list(polled.rollouts), 1, Dealing(MINIBATCHES, seed=1), version=0)
            await workers.begin(assignment, 0, MINIBATCHES)
            await workers.push(0)  # as senders do that got no acknowledgement
            (after,) = await workers.all(PollBuffer(polled.cursor, 0.0))
            assert after.rollouts == ()
            assert await workers.close() == [0]
    finally:
        memory_checkpoint.remove()
