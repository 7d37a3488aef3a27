"""A run's folder as a small run leaves it: gate, ledger and file formats are the real ones, the rest is made up."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncrl.api import Sample, Trajectory
from asyncrl.comm.ended_rollouts import RolloutCounts, RunSettings
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager.messages import (
    DroppedRollout,
    FinishedRollout,
    GateCheckpoint,
    GrantedRollout,
    HeldReport,
    HeldRollout,
    ReceivedRollout,
)
from asyncrl.manager.rollouts.rollout_state import Ledger, RolloutState
from asyncrl.manager.rollouts.staleness_gate import LiveRollout
from asyncrl.master.data.sample_buffer import TrainBatch, trained_rollout
from asyncrl.master.metrics_log import batch_statistics
from asyncrl.observe.samples import forget_after, rows_of, write_samples
from asyncrl.trainer.messages import RolloutRecord
from asyncrl.weights.manifest import FileEntry, Manifest, TensorEntry, write_manifest

ROWS, BATCH, ETA, WORKERS, SEED = 7, 4, 1, 2, 3


@dataclass(frozen=True)
class State:
    """State of a step, from which another lineage continues, from memory or from disk."""

    version: int = 0
    gate: GateCheckpoint = GateCheckpoint()
    evaluations: tuple[dict[str, Any], ...] = ()


class Launch:
    """A lineage of the run in `folder`, which continues from `state`: steps, then an end, or none if it is killed.

    Args:
        received: live rollouts that the ranks have.
        held: live rollouts that the workers have.
        judge: the second sample of each rollout is of another trained policy, `judge`.

    Attributes:
        kept: the state of the last step.
    """

    def __init__(
        self,
        folder: Path,
        state: State = State(),
        *,
        received: Iterable[ReceivedRollout] = (),
        held: Iterable[HeldReport] = (),
        file_bytes: int = 1 << 20,
        judge: bool = False,
    ) -> None:
        self.folder = folder
        self.judge = judge
        self.now = 1000.0
        settings = RunSettings(BATCH, ETA, "drop", WORKERS, SEED)
        self.ledger = Ledger(folder / "ledger", settings, now=lambda: self.now, file_bytes=file_bytes)
        self.version = state.version
        self.rollouts = RolloutState(
            BATCH,
            ETA,
            DataOrder(ROWS, SEED),
            self.ledger,
            lambda: self.now,
            version=state.version,
            checkpoint=state.gate,
            ended=self.ledger.begin(state.version, state.gate),
        )
        self.rollouts.rebuild(received, held)
        self.gate = self.rollouts.gate
        self.gate.advance(self.version)
        self.number = 0
        self.kept = state
        self.rows: list[dict[str, Any]] = []
        self.evaluations = list(state.evaluations)
        self.saved = self.version if state.version else 0
        self.rows_dropped = dict(state.gate.dropped)
        write_counts(folder, self.version, self.gate.counts())

    @property
    def running(self) -> list[LiveRollout]:
        """The running rollouts, in the order in which they began."""
        tickets = (self.gate.live.running(rollout_id) for rollout_id in self.gate.live)
        return [ticket for ticket in tickets if ticket is not None]

    def admit(self, worker: int) -> LiveRollout | None:
        name = f"rollout_worker/{worker}"
        if not self.gate.capacity or (turn := self.rollouts.next_for(name)) is None:
            return None
        self.number += 1
        rollout_id = f"r{self.ledger.lineage}-{self.number}"
        self.rollouts.admit(rollout_id, name, turn)
        return self.gate.live.get(rollout_id)

    def finish(self, ticket: LiveRollout) -> None:
        assert self.rollouts.receive(ticket.rollout_id, 10)

    def fail(self, ticket: LiveRollout, reason: str, *, again: bool = False) -> None:
        """Its worker drops the rollout, for good or to try its prompt `again` later, as a filter does."""
        self.rollouts.finish(FinishedRollout(ticket.rollout_id, False, reason, again, again))

    def drop(self, ticket: LiveRollout, reason: str) -> None:
        self.rollouts.drop([DroppedRollout(ticket.rollout_id, reason)])

    def fill(self) -> None:
        """Admit rollouts while the gate has room."""
        for worker in range(100):
            if self.admit(worker % WORKERS) is None:
                return

    def step(self, *, evaluated: bool = True, slow: Collection[int] = ()) -> None:
        """Fill the gate's room, have some dropped at first, and train the oldest; prompts at the places `slow`
        still run. A row that is not `evaluated` waits for that.
        """
        self.fill()
        if self.version == 0 and self.ledger.lineage == 0:
            *_, lost, invalid, equal = self.running
            self.fail(equal, "zero_variance", again=True)
            self.fail(invalid, "invalid_prompt")
            self.drop(lost, "worker_died")
            self.fill()
        for ticket in self.running:
            if ticket.order not in slow:
                self.finish(ticket)
        live = [live for rollout_id in self.gate.live if (live := self.gate.live.get(rollout_id)) is not None]
        finished = [one for one in live if one.finished]
        chosen = sorted(finished, key=lambda one: (one.version, one.order))[:BATCH]
        records = tuple(self._record(one, one.version) for one in sorted(chosen, key=lambda one: one.order))
        batch = TrainBatch(self.version, max(0, self.version - ETA), records)
        self.version += 1
        self.now += 5.0
        trained = [trained_rollout(record) for record in records]
        self.rollouts.train(self.version, trained)
        self.gate.advance(self.version)
        counts = self.gate.counts()
        write_counts(self.folder, self.version, counts)
        failed = counts.dropped.get("invalid_prompt", 0) - self.rows_dropped.get("invalid_prompt", 0)
        self.rows_dropped = dict(counts.dropped)
        row = {"policy_version": self.version, **batch_statistics(batch), "restarts": 0}
        row["rollout/dropped_invalid_prompt"] = failed
        if self.judge:
            row["policy/judge/tokens/trained"] = float(sum(record.generated[1] for record in records))
        weights = {"model.safetensors": safetensors(self.version), "config.json": b"{}"}
        tensors = {"w": TensorEntry((2, 3), "F32", "model.safetensors")}
        write_folder(self.folder / "weights" / "actor" / f"v{self.version}", "actor", self.version, weights, tensors)
        self._keep_samples(records)
        if evaluated:
            measured = {"eval/held_out/accuracy": self.version / 10, "eval/held_out/prompts": 8.0}
            self.evaluations.append({"version": self.version} | measured)
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": self.version} | row | measured) + "\n")
        else:
            self.rows.append({"step": self.version, "row": row})
        self.kept = State(self.version, self.rollouts.checkpoint(), tuple(self.evaluations))

    def save(self) -> State:
        """Write a checkpoint of the last step; return its state."""
        self.saved = self.version
        master = {
            "version": self.version,
            "gate": msgspec.to_builtins(self.kept.gate),
            "metrics_log": {"rows": self.rows, "evaluations": self.evaluations},
        }
        text = json.dumps({"version": self.version, "master_state": master}).encode()
        folder = self.folder / "checkpoints" / f"v{self.version}"
        write_folder(folder, "checkpoint", self.version, {"state.json": text, "shard.safetensors": b"x" * 50})
        return self.kept

    def held(self, *tickets: LiveRollout) -> HeldReport:
        """A report of the worker that runs these rollouts."""
        held = []
        for ticket in tickets:
            version = self.gate.admitted_at(ticket.rollout_id)
            assert version is not None
            head = (ticket.rollout_id, ticket.prompt_id, ticket.order, 0, ticket.attempt, ticket.failures, version)
            held.append(HeldRollout(GrantedRollout(*head)))
        return HeldReport(tickets[0].owner, held=held)

    def received(self) -> list[ReceivedRollout]:
        """The rollouts that the ranks have."""
        live = [live for rollout_id in self.gate.live if (live := self.gate.live.get(rollout_id)) is not None]
        return [
            ReceivedRollout(one.rollout_id, one.prompt_id, one.order, one.version, 10) for one in live if one.finished
        ]

    def end(self, total_steps: int = 0) -> None:
        if self.saved != self.version:
            self.save()
        counts = self.rollouts.end(self.version)
        self.ledger.close()
        newest: dict[str, Any] = {}
        if self.evaluations:
            last = self.evaluations[-1]
            newest["held_out"] = {name.rpartition("/")[2]: value for name, value in last.items()}
        config = self.folder / "config.yaml"
        config.write_text(config.read_text() + f"total_train_steps: {total_steps or self.version}\n")
        summary = {
            "steps": self.version,
            "total_steps": total_steps or self.version,
            "books": plain(counts),
            "eval": newest,
            "evaluations": self.evaluations,
            "evaluations_failed": [],
        }
        (self.folder / "summary.json").write_text(json.dumps(summary))

    def _keep_samples(self, records: Sequence[RolloutRecord]) -> None:
        """Keep all samples that the last step trained, if there is pyarrow."""
        if importlib.util.find_spec("pyarrow") is None:
            return
        rows: dict[str, list[Any]] = {}
        for record in records:
            versions = sorted(record.version_tokens)
            of_samples = (record.generated, (versions[0], versions[-1]), record.rewards, record.groups or ("", ""))
            samples = [
                Sample(
                    tokens=np.arange(5, dtype=np.int32),
                    loss_mask=np.array([0] * (5 - count) + [1] * count, np.uint8),
                    behave_logprobs=np.array([0.0] * (5 - count) + [-0.5] * count, np.float32),
                    versions=np.array([-1] * (5 - count) + [version] * count, np.int32),
                    reward=reward,
                    episode=episode,
                    group=group,
                )
                for episode, (count, version, reward, group) in enumerate(zip(*of_samples, strict=True))
            ]
            for policy in {*record.groups} or {""}:
                own = [sample for sample in samples if sample.group == policy or not record.groups]
                trajectory = Trajectory(record.rollout_id, record.prompt_id, record.order, own, {})
                writer = f"head-0-{policy}" if policy else "head-0"
                rows.setdefault(writer, []).extend(rows_of(trajectory, self.version, str, {}))
        for writer, kept in rows.items():
            write_samples(self.folder / "samples", self.version, writer, kept, max_bytes=1 << 30)

    def _record(self, ticket: LiveRollout, version: int) -> RolloutRecord:
        versions = {version: 3, self.version: 2} if version < self.version else {version: 5}
        generated = {"rollout/generated/actor": 3.0, "rollout/generated/judge": 4.0}
        return RolloutRecord(
            ticket.rollout_id,
            ticket.prompt_id,
            ticket.order,
            head=0,
            oldest_version=version,
            version_tokens=versions,
            lengths=(5, 5),
            generated=(3, 2),
            rewards=(float(ticket.order % 2), 0.5),
            truncated=(False, False),
            episodes=(0, 1),
            metrics=generated if self.judge else {},
            groups=("", "judge") if self.judge else (),
        )


def plain(counts: RolloutCounts) -> dict[str, Any]:
    return msgspec.structs.asdict(counts)


def write_counts(folder: Path, step: int, counts: RolloutCounts) -> None:
    (folder / "books.json").write_text(json.dumps({"step": step, "books": plain(counts)}))


def safetensors(version: int) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes([version]) * 24


def write_folder(
    folder: Path,
    role: str,
    version: int,
    files: Mapping[str, bytes],
    tensors: Mapping[str, TensorEntry] | None = None,
) -> None:
    if folder.exists():  # of a launch that was forgotten
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    entries = {name: FileEntry.of([data]) for name, data in files.items()}
    write_manifest(folder, Manifest(role, version, entries, dict(tensors or {})))


def begin_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "data_record.json").write_text(json.dumps({"rows": ROWS}))
    (folder / "config.yaml").write_text(
        f"train_batch_size: {BATCH}\nmax_head_offpolicyness: {ETA}\non_stale: drop\nseed: {SEED}\n"
        f"rollout: {{workers: {WORKERS}}}\neval: {{interval: 1}}\nsamples: {{every: 1}}\n"
    )
    return folder


@pytest.fixture
def recorded_run(tmp_path: Path) -> Path:
    """Three steps, a checkpoint after the second, a kill; a lineage that goes on from disk to the fourth step, a death
    of the brain; a lineage that goes on from memory to the fifth step and ends.
    """
    folder = begin_run(tmp_path / "run")
    run_of_three_lineages(folder)
    shutil.rmtree(folder / "samples")  # they would take most of an audit's time
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("samples: {every: 1}", "samples: {every: 0}"))
    return folder


def run_of_three_lineages(folder: Path) -> None:
    first = Launch(folder)
    first.step()
    first.step()
    state = first.save()
    first.step()
    first.ledger.close()
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows[:2]))  # as the next launch does
    shutil.rmtree(folder / "weights" / "actor" / "v3")
    if (folder / "samples").exists():
        forget_after(folder / "samples", 2, "head-0")
    second = Launch(folder, state)
    second.step()
    second.step()
    third = after_death(second)
    third.step()
    third.save()
    third.end()


def after_death(before: Launch) -> Launch:
    """The lineage after a death of the brain, soon after the last step of `before`.

    Since that step a rollout was dropped, and others were admitted: one arrived, and its worker reported the end; one
    runs; one was with a worker that died too.
    """
    stale = before.gate.live.get(before.received()[-1].rollout_id)
    assert stale is not None
    before.drop(stale, "stale")
    arrived, runs, _ = [ticket for worker in (0, 1, 0) if (ticket := before.admit(worker)) is not None]
    before.finish(arrived)
    held = before.held(runs)
    before.ledger.close()
    return Launch(before.folder, before.kept, received=before.received(), held=[held])
