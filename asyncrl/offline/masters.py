"""The processes that lead a run without a trainer.

- EvaluationMaster evaluates a fixed model on all sets.
- Recorder saves rollouts in a run without training (`python -m asyncrl.launch rollout`).

The Recorder takes the place of MasterWorker and ModelWorkers: it reports the saved prompts to the GserverManager, and
the RolloutWorkers send their trajectories to it. It leads the run, which ends when as many rollouts are saved as
training for the same number of steps would take. A launch that continues leaves out the saved prompts; rollouts that
had not been written to a file are generated again.
"""

from __future__ import annotations

import asyncio
import json
import math
import queue
import time
from functools import partial
from pathlib import Path

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm import names
from asyncrl.comm.http_client import HttpError
from asyncrl.comm.push_pull import TrajectoryPuller
from asyncrl.comm.request_reply import RequestClient
from asyncrl.comm.waits import RunningClock
from asyncrl.config.run_dir import METRICS_FILE, SAMPLES_DIR
from asyncrl.config.variants import EvaluationSet, evaluation_sets
from asyncrl.data.prompt_queue import UsedPrompts
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.manager.client import ManagerClient, ManagerGone
from asyncrl.manager.messages import (
    CloseGate,
    EndReport,
    GateCheckpoint,
    ReceivedReport,
    ReceivedRollout,
    RunBegin,
    StatusRequest,
)
from asyncrl.master.data.stall import RolloutSigns
from asyncrl.master.evaluations import evaluation_statistics
from asyncrl.master.peers import NameBoard, Stalled, connect, router_of_peers
from asyncrl.master.policy_versions import evaluate
from asyncrl.master.run_state import write_counts
from asyncrl.observe.samples import read_samples, rows_of, sample_files, write_samples
from asyncrl.runtime.process.waiting import StopRequested, or_stop
from asyncrl.runtime.process.worker import AsyncWorker

VERSION = 0
"""The policy version of a model that is not trained."""
ROLLOUTS_PER_FILE = 64
LONGEST_WAIT_S = 2.0
"""Between two files, and so the most work that is lost with the process."""


class EvaluationMaster(AsyncWorker):
    """Writes a line into `metrics.jsonl` for each set, as it ends: `set`, its metrics, and `left_out`, the rows that
    were not answered; or `set` and `failed`, the reason why it has no metrics.
    """

    async def main(self) -> None:
        """Evaluate each set, then end, which ends the launch."""
        router = router_of_peers(self, self.config.rollout.workers)
        try:
            workers = await connect(self, names.EVALUATION_WORKER, self.config.rollout.workers, router)
            await self.registered(names.gen_server_key(0), names.GENERATION_SERVER)
        except StopRequested:
            router.close()
            return
        self.ready()
        try:
            with (self.run_dir / METRICS_FILE).open("w", encoding="utf-8") as lines:
                for each in evaluation_sets(self.config):
                    lines.write(json.dumps({"set": each.name, **await self._evaluate(workers, each)}) + "\n")
                    lines.flush()
        except StopRequested:
            self.log.info("asked to stop")
        finally:
            for worker in workers:
                worker.close()
            router.close()

    async def _evaluate(self, workers: list[RequestClient], each: EvaluationSet) -> dict[str, float | str]:
        evaluating = evaluate(workers, each.name, VERSION, self.config.system.stall_timeout_s)
        try:
            result = await or_stop(evaluating, self.stop, math.inf)
        except StopRequested:
            raise
        except Exception as error:
            self.log.warning("the evaluation on %s failed", each.name, exc_info=error)
            return {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}
        return {**evaluation_statistics(each.name, result), "left_out": result.left_out}


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
            await manager.call(RunBegin(checkpoint=GateCheckpoint(used=used)))
            self.ready()
            await self._record(manager, NameBoard(self.resolver))
            await manager.call(CloseGate())
            write_counts(self.run_dir, 0, await manager.call(EndReport(0)))
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
                arrived = ReceivedReport(list(map(_received, batch)))
                refused = (await manager.call(arrived)).refused if batch else []
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
                        f"{wanted} are kept; {(await manager.call(StatusRequest())).describe()}{signs.describe()}"
                    )
        finally:
            ticking.cancel()

    async def _rollouts_live(self, manager: ManagerClient, signs: RolloutSigns) -> bool:
        try:
            return signs.take(self._kept, await manager.call(StatusRequest()))
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
