"""Recorder: saves rollouts in a run without training (`python -m asyncrl.launch rollout`).

It takes the place of MasterWorker and ModelWorkers: it reports the saved prompts to the GserverManager, and the
RolloutWorkers send their trajectories to it. It leads the run, which ends when as many rollouts are saved as training
for the same number of steps would take. A launch that continues leaves out the saved prompts; rollouts that had not
been written to a file are generated again.
"""

from __future__ import annotations

import asyncio
import queue
import time
from functools import partial
from pathlib import Path

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm import names
from asyncrl.comm.http.calls import HttpError
from asyncrl.comm.push_pull import TrajectoryPuller
from asyncrl.comm.waits import RunningClock
from asyncrl.config.run_dir import SAMPLES_DIR
from asyncrl.manager.client import ManagerClient, ManagerGone
from asyncrl.manager.messages import GateCheckpoint, ReceivedRollout, RunBegin
from asyncrl.master.data.stall import RolloutSigns
from asyncrl.master.peers.connections import NameBoard
from asyncrl.master.peers.rank_clients import Stalled
from asyncrl.master.run_state import write_books
from asyncrl.observe.samples import read_samples, rows_of, sample_files, write_samples
from asyncrl.plugins.datasets.queue.used_prompts import UsedPrompts
from asyncrl.plugins.datasets.tokenizers import load_tokenizer
from asyncrl.runtime.process.waiting import StopRequested
from asyncrl.runtime.process.worker import AsyncWorker

ROLLOUTS_PER_FILE = 64
LONGEST_WAIT_S = 2.0
"""Between two files, and so the most work that is lost with the process."""


class Recorder(AsyncWorker):
    """Takes the place of the trainer, and saves rollouts as files."""

    stop_limit_s = None

    async def main(self) -> None:
        """Keep rollouts until there are enough, or a stop is requested."""
        self._folder = self.run_dir / SAMPLES_DIR
        self._decode = load_tokenizer(str(self.config.model.path)).decode
        self._arrived: queue.SimpleQueue[Trajectory] = queue.SimpleQueue()
        kept = {
            row["rollout"]: row["prompt"] for row in read_samples(sample_files(self._folder), ["rollout", "prompt"])
        }
        self._kept, self._files = len(kept), len(sample_files(self._folder))
        try:
            url = await self.registered(names.MANAGER_KEY, names.GSERVER_MANAGER)
        except StopRequested:
            return
        find = partial(self.resolver.get, names.MANAGER_KEY)
        manager = ManagerClient(url, self.name, self.http_security, find=find)
        puller = TrajectoryPuller(self.config.system.host, self.security, on_message=self._arrived.put)
        try:
            lease_s = self.config.system.lease_s
            self.resolver.add(names.puller_key(0), puller.endpoint, lease_s=lease_s, replace=True)
            used = UsedPrompts(kept.values()).to_json()
            await manager.begin_run(RunBegin(checkpoint=GateCheckpoint(used=used)))
            self.ready()
            await self._record(manager, NameBoard(self.resolver))
            await manager.close_gate()
            write_books(self.run_dir, 0, await manager.end_run(0))
        finally:
            puller.close()
            await manager.close()

    async def _record(self, manager: ManagerClient, board: NameBoard) -> None:
        wanted = self.config.total_train_steps * self.config.train_batch_size
        clock, limit_s = RunningClock(), self.config.system.stall_timeout_s
        signs = RolloutSigns((self.config.max_head_offpolicyness + 1) * self.config.train_batch_size)
        ticking = asyncio.create_task(clock.keep())
        progress_at = clock()
        try:
            while self._kept < wanted and not self.stop.is_set():
                batch = await asyncio.to_thread(self._gather, min(ROLLOUTS_PER_FILE, wanted - self._kept))
                refused = await manager.received(list(map(_received, batch))) if batch else []
                batch = [trajectory for trajectory in batch if trajectory.rollout_id not in refused]
                if batch:
                    await asyncio.to_thread(self._write, batch)
                    self.log.info("%d of %d rollouts kept", self._kept, wanted)
                    progress_at = clock()
                elif board.producers_start() or await self._rollouts_live(manager, signs):
                    progress_at = clock()
                elif clock() - progress_at > limit_s:
                    raise Stalled(
                        f"no sign of life of a rollout for {limit_s:g} s (system.stall_timeout_s): {self._kept} of "
                        f"{wanted} are kept; {await manager.describe()}{signs.describe()}"
                    )
        finally:
            ticking.cancel()

    async def _rollouts_live(self, manager: ManagerClient, signs: RolloutSigns) -> bool:
        try:
            return signs.take(self._kept, await manager.status())
        except (HttpError, ManagerGone) as error:
            self.log.info("it is not known what the rollouts do: %s", error)
            return False

    def _gather(self, most: int) -> list[Trajectory]:
        batch: list[Trajectory] = []
        until = time.monotonic() + LONGEST_WAIT_S
        while len(batch) < most and (left_s := until - time.monotonic()) > 0:
            try:
                batch.append(self._arrived.get(timeout=left_s))
            except queue.Empty:
                break
        return batch

    def _write(self, batch: list[Trajectory]) -> Path:
        rows = [row for trajectory in batch for row in rows_of(trajectory, 0, self._decode, {})]
        self._files += 1
        self._kept += len(batch)
        return write_samples(self._folder, 0, f"part-{self._files:06d}", rows, max_bytes=0)


def _received(trajectory: Trajectory) -> ReceivedRollout:
    tokens = sum(len(sample.tokens) for sample in trajectory.samples)
    return ReceivedRollout(trajectory.rollout_id, trajectory.prompt_id, trajectory.order, 0, max(1, tokens))
