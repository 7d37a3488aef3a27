"""Rows of metrics: one per train step, and one for the model before training.

The step that makes version s has row s: `step` = `policy_version` = s and the statistics of the rollouts it trained. If
version s was evaluated, the row has the metrics of each set, for example `eval/<set>/reward_mean`
(`evaluation_statistics`). A set without a result has `eval/<set>/failed` = 1, or `eval/<set>/cut_short` = 1 if the run
was stopped meanwhile. If the initial model is evaluated, row 0 has only that. The evaluation runs while training
continues, so its row is held until it ends, and so are later rows: every row is written once, in order.

Held rows are part of a checkpoint, so that a resumed run also has every row exactly once. An evaluation that a restart
cuts off is repeated if the servers still have that version or get it again; otherwise it counts as failed.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.comm.ended_rollouts import DROPPED, LOST_EPISODES, DropReason, is_filter_reason
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import METRICS_FILE, RESTARTS_FILE, SAMPLES_DIR
from asyncrl.data.prompt_queue import epoch_of
from asyncrl.master.data.sample_buffer import Collector, Reports, SampleBuffer, TrainBatch
from asyncrl.master.evaluations import Evaluations, Outcomes, Row, evaluation_statistics
from asyncrl.observe.metrics.sinks import MetricsWriter
from asyncrl.observe.tail import read_rows
from asyncrl.runtime.run_log import notice, restarts_in, seconds_in
from asyncrl.trainer.messages import EndedStep

if TYPE_CHECKING:
    from asyncrl.observe.metrics.sample_tables import SampleTables

_log = logging.getLogger(__name__)

DROPPED_GROUPS = "/dropped_groups"
"""Suffix of the metric with which a filter call of the graph counts dropped groups."""


def batch_statistics(batch: TrainBatch) -> Row:
    """Return statistics of a batch's rollouts: rewards of episodes, lengths of samples, ages of trained tokens, the
    epoch.

    `rollout/len_...` counts a sample's generated tokens, `rollout/context_len_...` all others: prompt, environment,
    tools. The rollouts' own metrics are averaged over the rollouts that have them; lost episodes are added up.
    """
    rewards = np.array([reward for record in batch.records for reward in record.episode_rewards])
    generated = np.array([length for record in batch.records for length in record.generated])
    lengths = np.array([length for record in batch.records for length in record.lengths])
    truncated = np.array([flag for record in batch.records for flag in record.truncated])
    flat = sum(
        not record.has_signal or (len(record.episode_rewards) == 1 and not record.groups) for record in batch.records
    )
    by_version: Counter[int] = Counter()
    for record in batch.records:
        by_version.update(record.version_tokens)
    ages = {batch.version - version: count for version, count in by_version.items() if version >= batch.min_version}
    tokens = max(1, sum(ages.values()))
    own: defaultdict[str, list[float]] = defaultdict(list)
    for record in batch.records:
        for name, value in record.metrics.items():
            own[name].append(value)
    lost = {name: sum(own.pop(name)) for name in list(own) if name.startswith(LOST_EPISODES)}
    return (
        {name: sum(values) / len(values) for name, values in own.items()}
        | lost
        | {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/min": float(rewards.min()),
            "reward/max": float(rewards.max()),
            "reward/frac_zero_std": flat / len(batch.records),
            "rollout/samples_per_episode": len(generated) / len(rewards),
            "rollout/len_mean": float(generated.mean()),
            "rollout/len_min": float(generated.min()),
            "rollout/len_max": float(generated.max()),
            "rollout/context_len_mean": float((lengths - generated).mean()),
            "rollout/context_len_max": float((lengths - generated).max()),
            "rollout/truncated": float(truncated.mean()),
            "staleness/max": float(max(ages, default=0)),
            "staleness/mean": sum(age * count for age, count in ages.items()) / tokens,
            "data/epoch": float(max(epoch_of(record.prompt_id) for record in batch.records)),
            "tokens/trained": float(sum(ages.values())),
            "tokens/batch": float(sum(record.tokens for record in batch.records)),
        }
    )


def buffered_s(batch: TrainBatch, now: float) -> Row:
    """Return the mean time since the trainer received a rollout of `batch`, at `now` in seconds since 1970."""
    waited = [max(0.0, now - record.received_at) for record in batch.records if record.received_at]
    return {"rollout/buffered_s": sum(waited) / len(waited)} if waited else {}


def of_ranks(ended: Sequence[EndedStep]) -> Row:
    """Return the use that the training ranks made of their devices: the most memory, and means of what is counted."""
    row: Row = {"rank/memory_bytes": max(rank.memory_bytes for rank in ended)}
    speeds = [rank.flops_per_s for rank in ended if rank.flops_per_s is not None]
    shares = [rank.mfu for rank in ended if rank.mfu is not None]
    if len(speeds) == len(shares) == len(ended):
        row |= {"rank/tflops_per_s": sum(speeds) / len(speeds) / 1e12, "rank/mfu": sum(shares) / len(shares)}
    return row


@dataclass(slots=True)
class _Held:
    row: Row
    awaits_evaluation: bool


class RowQueue:
    """Rows in the order of their steps, each held until its evaluation has ended. Pure."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._early: dict[int, Row] = {}

    def add(self, step: int, row: Row, *, awaits_evaluation: bool = False) -> None:
        """Add the row of `step`; the evaluation of that version may have ended already."""
        early = self._early.pop(step, None)
        self._held[step] = _Held(row | (early or {}), awaits_evaluation and early is None)

    def evaluated(self, version: int, statistics: Row) -> None:
        """Add `statistics` to the row of `version`, whose evaluation has ended."""
        held = self._held.get(version)
        if held is None:
            self._early[version] = statistics
        else:
            held.row |= statistics
            held.awaits_evaluation = False

    def pop_ready(self) -> list[tuple[int, Row]]:
        """Return the rows that are complete, in order."""
        ready = []
        for step, held in list(self._held.items()):
            if held.awaits_evaluation:
                break
            ready.append((step, held.row))
            del self._held[step]
        return ready

    def awaited(self) -> int | None:
        """Return the first step whose row waits for its evaluation."""
        return next((step for step, held in self._held.items() if held.awaits_evaluation), None)

    def state(self) -> list[dict[str, Any]]:
        """Return the held rows as JSON values, for a checkpoint."""
        return [{"step": step, "row": held.row} for step, held in self._held.items()]


@dataclass(slots=True)
class _Totals:
    """Running totals as of the last row; the next row has the differences."""

    at: float
    tokens: int = 0
    samples: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    idle_s: float = 0.0

    @property
    def filtered(self) -> int:
        """Number of rollouts that filters dropped."""
        return sum(count for reason, count in self.dropped.items() if is_filter_reason(reason))


class MetricsLog:
    """Rows of metrics of one run.

    Attributes:
        evaluations: those that ended, failed or are due.
    """

    def __init__(self, config: ExperimentConfig, run_dir: Path, collector: Collector, buffer: SampleBuffer) -> None:
        self.evaluations = Evaluations(config)
        self._config, self._run_dir, self._collector, self._buffer = config, run_dir, collector, buffer
        self._rows = RowQueue()
        self._metrics: MetricsWriter | None = None
        self._tables: SampleTables | None = None
        self._started_at = 0.0
        self._totals = _Totals(0.0)

    def open(
        self,
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
        first_step, samples = version + 1 if version else 0, self._config.samples
        notify = partial(notice, self._run_dir)
        self._metrics = MetricsWriter.open(self._run_dir / METRICS_FILE, self._config, first_step, notify)
        if samples.every and samples.tables:
            from asyncrl.observe.metrics.sample_tables import SampleTables

            self._tables = SampleTables(self._run_dir / SAMPLES_DIR, samples.tables, version)
        self._started_at = now
        self._totals = _Totals(now, dropped=dropped, idle_s=idle_s)
        if version == 0 and self.evaluations.due(0):
            self._rows.add(0, {"policy_version": 0}, awaits_evaluation=True)
        if version == 0 or state is None:
            return
        self.evaluations.restore(state)
        written = {row["step"]: row for row in read_rows(self._run_dir / METRICS_FILE)}
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

    def step(self, version: int, batch: TrainBatch, measured: Row, reports: Reports, now: float) -> None:
        """Add the row of the step that made `version` from `batch`; `measured` are its statistics and times."""
        row = self.row(version, batch, measured, reports, now)
        self._totals = self._totals_at(reports, now)
        self._rows.add(version, row, awaits_evaluation=bool(self.evaluations.due(version)))
        self._write_ready()

    def row(self, version: int, batch: TrainBatch, measured: Row, reports: Reports, now: float) -> Row:
        """Return the row of the step that made `version`, as far as it is known by now."""
        before, after = self._totals, self._totals_at(reports, now)
        step_s = max(now - before.at, 1e-9)
        of_batch, restarts = batch_statistics(batch), read_rows(self._run_dir / RESTARTS_FILE)
        row = {"policy_version": version, **of_batch, **measured}
        row |= {
            "tokens/trained": of_batch["tokens/trained"],  # of all trained policies, which is what the ledger has
            "time/step_s": step_s,
            "time/elapsed_s": now - self._started_at,
            "time/generation_idle_s": after.idle_s - before.idle_s,
            "throughput/gen_tokens_per_s": (after.tokens - before.tokens) / step_s,
            "throughput/train_tokens_per_s": _computed(row) / max(row["time/train_s"], 1e-9),
            "buffer/size": len(self._buffer),
            "restarts": restarts_in(restarts).total(),
            "time/restarts_s": seconds_in(restarts),
        }
        row |= {
            DROPPED + reason: after.dropped.get(reason, 0) - before.dropped.get(reason, 0)
            for reason in sorted({DropReason.stale, *(each for each in DropReason if each.failure), *after.dropped})
        }
        if after.samples > before.samples:
            row["rollout/received_len_mean"] = (after.tokens - before.tokens) / (after.samples - before.samples)
        filtered_in_graph = [count for name, count in measured.items() if name.endswith(DROPPED_GROUPS)]
        if filtered_in_graph or self._config.rollout.filters:
            row["filter" + DROPPED_GROUPS] = after.filtered - before.filtered + sum(filtered_in_graph)
        return row

    def _totals_at(self, reports: Reports, now: float) -> _Totals:
        tokens, samples = self._collector.generated_tokens, self._collector.generated_samples
        return _Totals(now, tokens, samples, reports.counts.dropped, reports.idle_s)

    def awaits_evaluation(self) -> int | None:
        """Return the oldest version whose row waits for its evaluation."""
        return self._rows.awaited()

    def evaluated(self, version: int, outcomes: Outcomes, seconds: Mapping[str, float]) -> None:
        """Record the evaluation of `version`, with each set's result or the reason why it has none."""
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
        """Write the remaining samples."""
        if self._metrics is not None:
            self._show_samples(self._metrics, self._metrics.last_step + 1)
            self._metrics.close()

    def _write_ready(self) -> None:
        """Write the rows that are complete, with the samples that earlier steps kept."""
        if self._metrics is not None:
            for step, row in self._rows.pop_ready():
                self._metrics.write(step, row)
            self._show_samples(self._metrics, self._metrics.last_step)

    def _show_samples(self, metrics: MetricsWriter, before: int) -> None:
        """Write tables of the samples that steps before `before` kept; files that cannot be read are logged and
        skipped.
        """
        try:
            for step, table in self._tables.new(before) if self._tables else ():
                metrics.samples(step, table)
        except (OSError, ValueError) as error:
            _log.warning("kept samples could not be shown: %s", error)


def _computed(row: Row) -> float:
    """Return the number of tokens that the step's training computed, of all policies; of a train function of the user's
    that does not count them, those of the batch.
    """
    counts = [value for name, value in row.items() if name.endswith("tokens/computed")]
    return float(sum(counts)) if counts else float(row["tokens/batch"])
