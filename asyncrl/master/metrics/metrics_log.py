"""Rows of metrics, one per train step and one for the model before training.

A row is held until the evaluation of its version has ended (`RowQueue`); held rows are part of a checkpoint, so that a
resumed run also has every row exactly once. An evaluation that a restart cuts off is repeated if the servers still have
that version or get it again; otherwise it counts as failed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.comm.ended_rollouts.drop_reasons import FAILURES, DropReason, is_filter_reason
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import METRICS_FILE, RESTARTS_FILE, SAMPLES_DIR
from asyncrl.manager.client import GateStatus
from asyncrl.master.data.collector import Collector
from asyncrl.master.data.sample_buffer import SampleBuffer, TrainBatch
from asyncrl.master.metrics.evaluation_statistics import evaluation_statistics
from asyncrl.master.metrics.evaluations import Evaluations
from asyncrl.master.metrics.metric_rows import Row, RowQueue, batch_statistics
from asyncrl.master.peers.policy_versions import Outcomes
from asyncrl.observe.history.tail import JsonlTail, read_rows
from asyncrl.observe.metrics.sample_tables import SampleTables
from asyncrl.observe.metrics.sinks import MetricsWriter
from asyncrl.runtime.process.remarks import remark
from asyncrl.runtime.trials.restart_log import restarts_in, seconds_in

_log = logging.getLogger(__name__)

DROPPED_GROUPS = "/dropped_groups"
"""Suffix of the metric with which a filter call of the graph counts dropped groups."""


@dataclass(slots=True)
class _Totals:
    """Running totals as of the last row; the next row has the differences."""

    at: float
    tokens: int = 0
    samples: int = 0
    stale: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    idle_s: float = 0.0

    @property
    def filtered(self) -> int:
        """Number of rollouts that filters dropped."""
        return sum(count for reason, count in self.dropped.items() if is_filter_reason(reason))


class _Restarts:
    """Restarts of single processes and of all together, over all launches, as the launcher logs them."""

    def __init__(self, log: JsonlTail) -> None:
        self._log, self._number, self._seconds = log, 0, 0.0

    def figures(self) -> Row:
        """Return the number of restarts so far, and the seconds that they took."""
        lines = self._log.read()
        self._number += restarts_in(lines).total()
        self._seconds += seconds_in(lines)
        return {"restarts": self._number, "time/restarts_s": self._seconds}


class _Files:
    """The run's files of metrics, open after a step; each row is written with the samples that earlier steps kept."""

    def __init__(self, run_dir: Path, config: ExperimentConfig, version: int, first_step: int) -> None:
        self._metrics = MetricsWriter.open(run_dir / METRICS_FILE, config, first_step, partial(remark, run_dir))
        samples = config.samples
        shown = samples.every and samples.tables
        self._tables = SampleTables(run_dir / SAMPLES_DIR, samples.tables, version) if shown else None

    def write(self, rows: Iterable[tuple[int, Row]]) -> None:
        """Write `rows` of steps."""
        for step, row in rows:
            self._metrics.write(step, row)
        self._show_samples(self._metrics.last_step)

    def close(self) -> None:
        """Write the remaining samples."""
        self._show_samples(self._metrics.last_step + 1)
        self._metrics.close()

    def _show_samples(self, before: int) -> None:
        """Write tables of the samples that steps before `before` kept; files that cannot be read are logged and
        skipped.
        """
        try:
            for step, table in self._tables.new(before) if self._tables else ():
                self._metrics.samples(step, table)
        except (OSError, ValueError) as error:
            _log.warning("kept samples could not be shown: %s", error)


class MetricsLog:
    """Rows of metrics of one run.

    Args:
        collector, buffer: the sources of counters in the rows.

    Attributes:
        evaluations: those that ended, failed or are due.
    """

    def __init__(self, config: ExperimentConfig, collector: Collector, buffer: SampleBuffer) -> None:
        self.evaluations = Evaluations(config)
        self._config = config
        self._collector = collector
        self._buffer = buffer
        self._rows = RowQueue()
        self._files: _Files | None = None
        self._restarts: _Restarts | None = None
        self._started_at = 0.0
        self._totals = _Totals(0.0)

    def open(
        self,
        run_dir: Path,
        version: int,
        now: float,
        dropped: Mapping[str, int],
        state: dict[str, Any] | None = None,
        served: int = 0,
        idle_s: float = 0.0,
    ) -> None:
        """Begin to write after step `version`; `state` is that of its checkpoint, and ignored if the version is 0.

        `dropped` counts the rollouts dropped so far, by reason. `served` is the version that can be evaluated now.
        `idle_s` is the time so far in which the gate let no rollout run.
        """
        first_step = version + 1 if version else 0
        self._files = _Files(run_dir, self._config, version, first_step)
        self._restarts = _Restarts(JsonlTail(run_dir / RESTARTS_FILE))
        self._started_at = now
        stale = self._buffer.dropped[DropReason.stale]
        self._totals = _Totals(now, stale=stale, dropped=dropped, idle_s=idle_s)
        if version == 0 and self.evaluations.due(0):
            self._rows.add(0, {"policy_version": 0}, awaits_evaluation=True)
        if version == 0 or state is None:
            return
        self.evaluations.restore(state)
        written = {row["step"]: row for row in read_rows(run_dir / METRICS_FILE)}
        for step, row in ((held["step"], held["row"]) for held in state["rows"]):
            if step in written:  # it was written after the checkpoint
                self.evaluations.take_in(step, written[step])
                continue
            cut_off = not any(name.startswith("eval/") for name in row)
            if cut_off and step < served:
                for name in self.evaluations.due(step):
                    row |= self.evaluations.fail(step, name, "cut off by a restart")
            self._rows.add(step, row, awaits_evaluation=cut_off and step >= served and bool(self.evaluations.due(step)))
        self._write_ready()

    def step(self, version: int, batch: TrainBatch, measured: Row, gate: GateStatus, now: float) -> None:
        """Add the row of the step that made `version` from `batch`; `measured` are its statistics and times."""
        row = self.row(version, batch, measured, gate, now)
        self._totals = self._totals_at(gate, now)
        self._rows.add(version, row, awaits_evaluation=bool(self.evaluations.due(version)))
        self._write_ready()

    def row(self, version: int, batch: TrainBatch, measured: Row, gate: GateStatus, now: float) -> Row:
        """Return the row of the step that made `version`, as far as it is known by now."""
        before, after = self._totals, self._totals_at(gate, now)
        step_s = max(now - before.at, 1e-9)
        of_batch = batch_statistics(batch)
        row = {"policy_version": version, **of_batch, **measured}
        row |= {
            "tokens/trained": of_batch["tokens/trained"],  # of all trained policies, which is what the ledger has
            "time/step_s": step_s,
            "time/elapsed_s": now - self._started_at,
            "time/generation_idle_s": after.idle_s - before.idle_s,
            "throughput/gen_tokens_per_s": (after.tokens - before.tokens) / step_s,
            "throughput/train_tokens_per_s": _computed(row) / max(row["time/train_s"], 1e-9),
            "rollout/dropped_stale": after.stale - before.stale,
            "buffer/size": len(self._buffer),
        }
        assert self._restarts is not None, "open() comes first"
        row |= self._restarts.figures()
        row |= {
            f"rollout/dropped_{reason}": after.dropped.get(reason, 0) - before.dropped.get(reason, 0)
            for reason in sorted({*FAILURES, *after.dropped} - {DropReason.stale})  # the buffer counts that one
        }
        if after.samples > before.samples:
            row["rollout/received_len_mean"] = (after.tokens - before.tokens) / (after.samples - before.samples)
        filtered_in_graph = [count for name, count in measured.items() if name.endswith(DROPPED_GROUPS)]
        if filtered_in_graph or self._config.rollout.filters:
            row["filter" + DROPPED_GROUPS] = after.filtered - before.filtered + sum(filtered_in_graph)
        return row

    def _totals_at(self, gate: GateStatus, now: float) -> _Totals:
        tokens, samples = self._collector.generated_tokens, self._collector.generated_samples
        return _Totals(now, tokens, samples, self._buffer.dropped[DropReason.stale], gate.dropped, gate.idle_s)

    def awaits_evaluation(self) -> int | None:
        """Return the oldest version whose row waits for its evaluation."""
        return self._rows.awaited()

    def evaluated(self, version: int, outcomes: Outcomes, seconds: Mapping[str, float]) -> None:
        """Record the evaluation of `version`, with each set's result or the reason why it has none.

        Args:
            seconds: the time that each set took.
        """
        measured: Row = {}
        failed: Row = {}
        for name, outcome in outcomes.items():
            if isinstance(outcome, str):
                failed |= self.evaluations.fail(version, name, outcome)
                continue
            statistics = evaluation_statistics(name, outcome)
            measured |= statistics | {f"eval/{name}/seconds": seconds[name]}
            _log.info("evaluation of version %d on %s: %s", version, name, statistics)
            if (outcome.min_version, outcome.max_version) != (version, version):
                answered = f"{outcome.min_version} to {outcome.max_version}"
                _log.warning("the evaluation of version %d on %s was answered by versions %s", version, name, answered)
        if measured:
            self.evaluations.add(version, measured)
        self._rows.evaluated(version, measured | failed)
        self._write_ready()

    def state(self, version: int, row: Row | None = None) -> dict[str, Any]:
        """Return the part of a checkpoint of `version`, whose `row` is given if it has not been added yet."""
        newest = [] if row is None else [{"step": version, "row": row}]
        return {"rows": self._rows.state() + newest, **self.evaluations.state()}

    def close(self) -> None:
        """Write the remaining rows."""
        if self._files is not None:
            self._files.close()

    def _write_ready(self) -> None:
        if self._files is not None:
            self._files.write(self._rows.pop_ready())


def _computed(row: Row) -> float:
    """Return the number of tokens that the step's training computed, of all policies; of a train function of the user's
    that does not count them, those of the batch.
    """
    counts = [value for name, value in row.items() if name.endswith("tokens/computed")]
    return float(sum(counts)) if counts else float(row["tokens/batch"])
