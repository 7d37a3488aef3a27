"""EvaluationWorker: a RolloutWorker of a launch that only evaluates."""

from __future__ import annotations

from asyncrl.manager.client import ManagerClient
from asyncrl.rollout.generation.rollout_client import RolloutClient
from asyncrl.rollout.process import RolloutWorker


class EvaluationWorker(RolloutWorker):
    """Answers its share of the evaluation sets. It has no training prompts and sends no trajectories."""

    trains = False

    async def _run(self, manager: ManagerClient, client: RolloutClient) -> None:
        self._evaluator = self._make_evaluator(client)
        server = self._request_server()
        try:
            self._register(server.endpoint)
            self.ready()
            await self.stop.wait()
        finally:
            self._evaluator.cancel()
            server.close()
