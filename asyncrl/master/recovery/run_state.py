"""The run's state at one policy version: the master's part of a checkpoint."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.comm.typed import convert
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.messages import GateCheckpoint
from asyncrl.master.data.buffer_order import ConfiguredOrder
from asyncrl.master.data.sample_buffer import SampleBuffer, TrainBatch
from asyncrl.master.metrics.metric_rows import Row
from asyncrl.master.metrics.metrics_log import MetricsLog
from asyncrl.master.metrics.win_rates import WinRates
from asyncrl.master.peers.reports import Reports


class RunState:
    """The state that a checkpoint holds. All of it is of one version: `trained` moves it by one step.

    Args:
        data_record: checksum of the record of the training data; None if the trial has none.
        metrics_log: its part is read when it is opened.

    Attributes:
        version: version of the policy: number of complete steps.
        recorded: newest version whose step is in the metrics and the ledger.
        buffer: the received rollouts.
        used_up: fewer prompts of the run's epochs are left than make a step.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        buffer: SampleBuffer,
        order: ConfiguredOrder,
        reports: Reports,
        metrics_log: MetricsLog,
        win_rates: WinRates,
        data_record: str | None = None,
    ) -> None:
        self.version = self.recorded = 0
        self.used_up = False
        self.buffer = buffer
        self._config, self._order, self._reports = config, order, reports
        self._metrics_log, self._win_rates, self._data_record = metrics_log, win_rates, data_record

    def trained(self, batch: TrainBatch) -> None:
        """Count the complete step of `batch`."""
        self.buffer.mark_trained(batch)
        self.version += 1
        self._win_rates.trained(self.version, batch.records)

    def state(self, row: Row | None = None) -> dict[str, Any]:
        """Return the state as JSON values; `row`: metrics of the newest step, if they are not in the log yet."""
        return {
            "version": self.version,
            "gate": msgspec.to_builtins(self._reports.checkpoint),
            "buffer": self.buffer.state(),
            "metrics_log": self._metrics_log.state(self.version, row),
            "buffer_order": self._order.state(),
            "win_rates": self._win_rates.state(),
            "data_record": self._data_record,
        }

    async def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.version = self.recorded = state["version"]
        self.buffer.restore(state["buffer"])
        self.buffer.expire(self.version)
        await self._order.restore(state.get("buffer_order"))
        self._win_rates.restore(state.get("win_rates"))
        self._reports.restore(self.version * self._config.train_batch_size, convert(state["gate"], GateCheckpoint))

    @property
    def complete(self) -> bool:
        """True if all steps are trained, or no prompt is left for another one."""
        return self.used_up or self.version >= self._config.total_train_steps
