"""EvaluationMaster: evaluates a fixed model on all sets, in a launch without a trainer."""

from __future__ import annotations

import json
import math

from asyncrl.comm import names
from asyncrl.comm.request_reply import RequestClient
from asyncrl.config.evaluation_sets import EvaluationSet, evaluation_sets
from asyncrl.config.run_dir import METRICS_FILE
from asyncrl.master.metrics.evaluations import evaluation_statistics
from asyncrl.master.peers.connections import connect, router_of_peers
from asyncrl.master.peers.policy_versions import evaluate
from asyncrl.runtime.process.waiting import StopRequested, or_stop
from asyncrl.runtime.process.worker import AsyncWorker

VERSION = 0
"""The policy version of a model that is not trained."""


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
