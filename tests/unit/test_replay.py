"""A replay sends kept rollouts in place of new ones: in their order, with their ages, each once its turn has come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.comm import names
from asyncrl.comm.name_files import FileResolver
from asyncrl.comm.push_pull import TrajectoryPusher, TrajectoryRejected
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager import messages as m
from asyncrl.manager.process import GserverManager
from asyncrl.manager.service import ManagerService
from asyncrl.observe.samples import rows_of, write_samples
from asyncrl.offline.replay import KeptRollouts, ReplayLoop, SampleSummary, summary_of
from asyncrl.rollout.process import RolloutWorker

BATCH, ETA, LIMIT_S = 2, 1, 300.0
KEY = names.model_version_key(names.ACTOR)


def keep(folder: Path, step: int, versions: dict[int, tuple[int, ...]], writer: str = "head-0") -> None:
    """Write a file of a step's rollouts: by order, the versions of their tokens after the prompt's."""
    rows: list[dict[str, Any]] = []
    for order, generated in versions.items():
        tokens = np.arange(1 + len(generated), dtype=np.int32)
        mask = np.array([0, *(1 for _ in generated)], np.uint8)
        logprobs = np.where(mask, np.float32(-0.5), np.float32(0.0))
        sample = Sample(tokens, mask, logprobs, np.array([-1, *generated], np.int32), 0.25 * order)
        rows += rows_of(Trajectory(f"kept{order}", f"e0-{order}", order, [sample]), step, str, {})
    write_samples(folder, step, writer, rows, max_bytes=1 << 30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Kept rollouts of three steps of two rollouts each, by two ranks; each has a token of each version in range."""
    folder = tmp_path / "samples"
    keep(folder, 1, {5: (0, 0)})
    keep(folder, 1, {2: (0, 0)}, writer="head-1")
    keep(folder, 2, {7: (0, 1), 3: (1, 1)})
    keep(folder, 3, {4: (1, 2), 6: (1, 1)})
    return folder


def seen(trajectory: Trajectory) -> tuple[int, list[int]]:
    """Return the order of a rollout, and the versions of its generated tokens."""
    (sample,) = trajectory.samples
    assert sample.versions[0] == -1, "of the prompt"
    return trajectory.order, sample.versions[1:].tolist()


def test_rollouts_come_as_they_were_trained(folder: Path) -> None:
    kept = KeptRollouts(folder, BATCH)
    taken = [kept.take(index) for index in range(6)]
    assert [seen(each) for each in taken] == [
        (2, [0, 0]),
        (5, [0, 0]),
        (3, [1, 1]),
        (7, [0, 1]),
        (4, [1, 2]),
        (6, [1, 1]),
    ]
    assert [each.samples[0].reward for each in taken[:2]] == [0.5, 1.25]
    assert taken[0].samples[0].behave_logprobs.tolist() == [0.0, -0.5, -0.5]


def test_in_other_batches_tokens_keep_their_ages(folder: Path) -> None:
    kept = KeptRollouts(folder, 1)
    assert [seen(kept.take(index))[1] for index in range(6)] == [[0, 0], [1, 1], [2, 2], [2, 3], [3, 4], [4, 4]]
    kept = KeptRollouts(folder, 6)
    assert [seen(kept.take(index))[1] for index in range(6)] == [[0, 0]] * 6, "no version is below 0"


def test_rollouts_that_no_step_trained_keep_their_version(tmp_path: Path) -> None:
    keep(tmp_path, 0, {order: (0,) for order in range(4)})
    kept = KeptRollouts(tmp_path, 1)
    assert [seen(kept.take(index)) for index in range(4)] == [(order, [0]) for order in range(4)]


def test_a_place_that_is_asked_for_early_or_again_has_the_same_rollout(folder: Path) -> None:
    """After a death of the brain it may ask again for what it had received since the last step."""
    kept = KeptRollouts(folder, BATCH)
    indices = [3, 2, 0, 1, 5, 2, 3, 4, 0]
    assert [seen(kept.take(index))[0] for index in indices] == [(2, 5, 3, 7, 4, 6)[index] for index in indices]


def test_a_summary_tells_how_much_there_is_and_how_old_it_was(folder: Path) -> None:
    assert summary_of(folder) == SampleSummary(rollouts=6, oldest_age=1, all_trained=True)
    keep(folder, 0, {9: (0,)})
    assert summary_of(folder) == SampleSummary(rollouts=7, oldest_age=1, all_trained=False)


class Gate:
    """The real gate of a replay of `steps`, and ranks that receive what is pushed."""

    def __init__(self, resolver: FileResolver, steps: int) -> None:
        config = ExperimentConfig(total_train_steps=steps, train_batch_size=BATCH)
        config.samples.replay = "/kept"
        manager: Any = SimpleNamespace(config=config, run_dir=Path("/nowhere"))
        order = GserverManager._order(manager)
        self.service = ManagerService(
            batch_size=BATCH, max_staleness=ETA, routing="round_robin", lease_s=60.0, order=order
        )
        self.service.begin(m.RunBegin())
        self.pushed: list[Trajectory] = []
        self.ended: list[m.FinishedRollout] = []
        self.refuses: str | None = None
        self.version = 0
        self._resolver, self._arrived = resolver, asyncio.Condition()

    async def allocate(self, rollouts: Sequence[str], *, timeout_s: float) -> m.AllocateReply:
        ended, self.ended = self.ended, []
        request = m.AllocateRequest(worker="rollout_worker/0", rollouts=list(rollouts), timeout_s=0.01, finished=ended)
        return await self.service.allocate_rollout(request)

    def finish(self, rollouts: Sequence[m.FinishedRollout]) -> None:
        self.ended += rollouts

    async def lost_servers(self, after: int, timeout_s: float) -> m.LostServersReply:
        request = m.LostServersRequest(worker="rollout_worker/0", after=after, timeout_s=timeout_s)
        return await self.service.lost_servers(request)

    async def push(self, trajectory: Trajectory) -> None:
        if self.refuses:
            raise TrajectoryRejected(self.refuses)
        each = m.ReceivedRollout(trajectory.rollout_id, trajectory.prompt_id, trajectory.order, 0, 3)
        assert (await self.service.received(m.ReceivedReport([each]))).refused == []
        assert trajectory.order // BATCH <= self.version, "ranks accept no token of a version that is not published"
        async with self._arrived:
            self.pushed.append(trajectory)
            self._arrived.notify_all()

    async def has(self, count: int) -> list[int]:
        """Return the orders of what the ranks have, once that is as many, and no more can come."""
        async with asyncio.timeout(LIMIT_S), self._arrived:
            await self._arrived.wait_for(lambda: len(self.pushed) >= count)
        for _ in range(50):
            await asyncio.to_thread(lambda: None)  # kept rollouts are read in threads
        return [trajectory.order for trajectory in self.pushed]

    async def train(self, version: int) -> None:
        """Train the step to `version`, and announce it."""
        trained = [
            m.TrainedRollout(each.rollout_id, each.prompt_id, each.order, {0: 2}, 1, 1, 0.5)
            for each in self.pushed[-BATCH:]
        ]
        await self.service.consumed(m.ConsumedReport(version, trained))
        self.version = version
        self.service.routes_changed(version)
        published = names.PublishedVersion(version, f"weights/v{version}").encode()
        await asyncio.to_thread(self._resolver.add, KEY, published, replace=True)


@pytest.fixture
async def replaying(folder: Path, tmp_path: Path) -> AsyncIterator[Callable[[int], Any]]:
    """`replaying(steps)` is a context in which the kept rollouts are replayed; its value is the gate."""
    with FileResolver(str(tmp_path / "names")) as resolver:

        @asynccontextmanager
        async def replay(steps: int) -> AsyncIterator[tuple[Gate, asyncio.Task[None]]]:
            gate = Gate(resolver, steps)
            loop = ReplayLoop(cast(Any, gate), gate.push, resolver, KeptRollouts(folder, BATCH), BATCH)
            task = asyncio.create_task(loop.run())
            try:
                yield gate, task
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        yield replay


async def test_a_steps_rollouts_are_sent_once_its_version_is_announced(replaying: Callable[[int], Any]) -> None:
    async with replaying(3) as (gate, task):
        assert sorted(await gate.has(2)) == [0, 1]
        assert gate.service.gate.counts().running == 2, "those of the next step wait for its version"
        assert not task.done()
        await gate.train(1)
        assert sorted(await gate.has(4)) == [0, 1, 2, 3]
        await gate.train(2)
        await gate.has(6)
        assert not task.done(), "all were accepted"
    by_index = sorted(gate.pushed, key=lambda each: each.order)
    assert [each.samples[0].reward for each in by_index] == [0.5, 1.25, 0.75, 1.75, 1.0, 1.5]
    assert [each.prompt_id for each in by_index] == [f"e0-{index}" for index in range(6)]
    assert len({each.rollout_id for each in by_index}) == 6
    assert not {each.rollout_id for each in by_index} & {f"kept{order}" for order in range(10)}, "the gate knows them"


async def test_a_replay_ends_with_its_last_step_whatever_else_is_kept(replaying: Callable[[int], Any]) -> None:
    async with replaying(2) as (gate, task):
        await gate.has(2)
        await gate.train(1)
        await gate.has(4)
        await gate.train(2)
        assert len(await gate.has(4)) == 4
        assert not task.done()
    counts = gate.service.gate.counts()
    assert (counts.submitted, counts.trained) == (4, 4)
    assert gate.service.rollouts.used_up


async def test_a_rollout_that_a_rank_refuses_ends_the_replay(replaying: Callable[[int], Any]) -> None:
    async with replaying(3) as (gate, task):
        gate.refuses = "its tokens are of version 9"
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(ExceptionGroup) as failed:
                await task
    assert failed.group_contains(TrajectoryRejected, match="of version 9")


async def test_a_file_that_holds_no_samples_ends_the_replay(replaying: Callable[[int], Any], folder: Path) -> None:
    (folder / "step-00000002.head-0.parquet").write_bytes(b"nothing")
    async with replaying(3) as (gate, task):
        await gate.has(2)
        await gate.train(1)
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(ExceptionGroup) as failed:
                await task
    assert failed.group_contains(ValueError, match="step-00000002")


async def test_a_worker_with_kept_samples_in_its_settings_replays_them(folder: Path) -> None:
    done: list[str] = []

    class Manager:
        async def close(self) -> None:
            done.append("closed")

    async def find_manager() -> Manager:
        return Manager()

    async def until_stopped(loop: Coroutine[Any, Any, Any], pusher: TrajectoryPusher) -> None:
        done.append(loop.__qualname__)
        loop.close()

    config = ExperimentConfig(train_batch_size=BATCH)
    config.samples.replay = str(folder)
    own: dict[str, Any] = {"find_manager": find_manager, "until_stopped": until_stopped}
    worker = SimpleNamespace(config=config, security=None, name="rollout_worker/0", resolver=None, **own)
    worker.ready = lambda: done.append("ready")
    await RolloutWorker.main(cast(Any, worker))
    assert done == ["ready", "ReplayLoop.run", "closed"]
