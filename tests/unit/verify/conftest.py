"""A run's folder as a small run leaves it: gate, ledger and file formats are the real ones, the rest is made up."""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.api import Sample, Trajectory
from asyncrl.comm.ended_rollouts.ledger_lines import PromptGoes, RunSettings
from asyncrl.manager.messages import GateBooks
from asyncrl.manager.rollouts.live_rollouts import RolloutTicket
from asyncrl.manager.rollouts.rollout_events import RolloutEvents
from asyncrl.manager.rollouts.staleness_gate import WORKER_LOST, StalenessGate
from asyncrl.master.books.ledger import Ledger
from asyncrl.master.data.sample_buffer import TrainBatch
from asyncrl.master.metrics.metric_rows import batch_statistics
from asyncrl.models.weights.versions.manifest import FileEntry, Manifest, TensorEntry, write_manifest
from asyncrl.observe.samples import forget_after, rows_of, write_samples
from asyncrl.plugins.datasets.queue.order import DataOrder
from asyncrl.plugins.datasets.queue.prompt_queue import NextTry, PromptQueue
from asyncrl.trainer.messages import RolloutRecord

ROWS, BATCH, ETA, WORKERS, SEED = 7, 4, 1, 2, 3


class Launch:
    """One launch of the run in `folder`: `steps` of them, then an end, or none where it is killed.

    Args:
        judge: the second sample of each rollout is of another trained policy, `judge`.
    """

    def __init__(
        self,
        folder: Path,
        state: Mapping[str, Any] | None = None,
        *,
        file_bytes: int = 1 << 20,
        judge: bool = False,
    ) -> None:
        self.folder = folder
        self.judge = judge
        self.now = 1000.0
        self.gate = StalenessGate(BATCH, ETA)
        self.events = RolloutEvents(now=lambda: self.now)
        settings = RunSettings(BATCH, ETA, "drop", WORKERS, SEED)
        self.ledger = Ledger(folder / "ledger", settings, now=lambda: self.now, file_bytes=file_bytes)
        self.version = state["version"] if state else 0
        self.used: list[str] = list(state["used"]) if state else []
        self.gate.resume(self.version, state["dropped"] if state else None)
        self.gate.advance(self.version)
        self.order = DataOrder(ROWS, SEED)
        self.ledger.begin(self.version, state["ledger"] if state else None, self.gate.books())
        retries = {order: (attempt, failures) for order, attempt, failures in self.ledger.recorded.retries.values()}
        self.queue = PromptQueue(ROWS, map(self.order.order_of, self.used), retries)
        self.seen = self.events.last_seq
        self.number = 0
        self.finished: list[tuple[RolloutTicket, int]] = []
        self.held: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = list(state["evaluations"]) if state else []
        self.saved = self.version if state else 0
        self.rows_dropped = dict(state["dropped"]) if state else {}
        write_books(folder, self.version, self.gate.books())

    def admit(self, worker: int) -> RolloutTicket | None:
        if not self.gate.capacity:
            return None
        turn = self.queue.next()
        self.number += 1
        name = f"r{self.ledger.lineage}-{self.number}"
        ticket = RolloutTicket(name, f"rollout_worker/{worker}", self.order.ref(turn.order).prompt_id, *turn)
        version = self.gate.start(ticket)
        assert version is not None
        self.events.admitted(ticket, version)
        return ticket

    def finish(self, ticket: RolloutTicket) -> None:
        version = self.gate.admitted_at(ticket.rollout_id)
        assert self.gate.finish(ticket.rollout_id)
        assert version is not None
        self.events.finished(ticket.rollout_id, 10)
        self.finished.append((ticket, version))

    def drop(self, ticket: RolloutTicket, reason: str, goes: PromptGoes, *, again: int = 0) -> None:
        assert self.gate.drop(ticket.rollout_id, reason)
        self.events.dropped(ticket.rollout_id, reason, goes, ticket.attempt + again)
        if goes is PromptGoes.given_up:
            self.queue.use(ticket.order)
            self.used.append(ticket.prompt_id)
        self.queue.leave(NextTry(ticket.order, ticket.attempt + again))

    def step(self, *, reported: bool = True, evaluated: bool = True) -> None:
        """Fill the gate's room, have some dropped at first, and train the oldest; a row waits for its evaluation."""
        running = []
        for worker in range(100):
            if (ticket := self.admit(worker % WORKERS)) is None:
                break
            running.append(ticket)
        if self.version == 0 and self.ledger.lineage == 0:
            self.drop(running.pop(), "zero_variance", PromptGoes.returned, again=1)
            self.drop(running.pop(), "invalid_prompt", PromptGoes.given_up)
            self.drop(running.pop(), WORKER_LOST, PromptGoes.returned)
            running += [ticket for worker in (0, 1, 0) if (ticket := self.admit(worker))]
        for ticket in running:
            self.finish(ticket)
        chosen = sorted(self.finished, key=lambda one: (one[1], one[0].order))[:BATCH]
        self.finished = [one for one in self.finished if one not in chosen]
        records = tuple(self._record(ticket, at) for ticket, at in sorted(chosen, key=lambda one: one[0].order))
        batch = TrainBatch(self.version, max(0, self.version - ETA), records)
        self.version += 1
        self.now += 5.0
        self.gate.train(self.version, [record.rollout_id for record in records])
        self.gate.advance(self.version)
        self.used += [record.prompt_id for record in records]
        for record in records:
            self.queue.use(record.order)
        if reported:
            self._report()
        self.ledger.step(batch, self.gate.books() if reported else None)
        books = self.gate.books()
        write_books(self.folder, self.version, books)
        failed = books.dropped.get("invalid_prompt", 0) - self.rows_dropped.get("invalid_prompt", 0)
        self.rows_dropped = dict(books.dropped)
        row = {"policy_version": self.version, **batch_statistics(batch), "restarts": 0}
        row["rollout/dropped_invalid_prompt"] = failed
        if self.judge:
            row["policy/judge/tokens/trained"] = float(sum(record.generated[1] for record in records))
        weights = {"model.safetensors": safetensors(self.version), "config.json": b"{}"}
        tensors = {"w": TensorEntry((2, 3), "F32", "model.safetensors")}
        write_folder(self.folder / "weights" / "actor" / f"v{self.version}", "actor", self.version, weights, tensors)
        self._keep_samples(records)
        if not evaluated:
            self.held.append({"step": self.version, "row": row})
            return
        measured = {"eval/held_out/accuracy": self.version / 10, "eval/held_out/prompts": 8.0}
        self.evaluations.append({"version": self.version} | measured)
        row = {"step": self.version} | row | measured
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def save(self) -> dict[str, Any]:
        """A checkpoint; what the next launch goes on from."""
        state = {
            "version": self.version,
            "used": list(self.used),
            "dropped": dict(self.gate.books().dropped),
            "ledger": self.ledger.saved(self.version, self.gate.books()),
            "evaluations": list(self.evaluations),
        }
        self.saved = self.version
        master = {
            "version": self.version,
            "ledger": state["ledger"],
            "buffer": {"used_prompts": packed(self.used)},
            "metrics_log": {"rows": self.held, "evaluations": self.evaluations},
            "dropped": state["dropped"],
        }
        text = json.dumps({"version": self.version, "master_state": master}).encode()
        folder = self.folder / "checkpoints" / f"v{self.version}"
        write_folder(folder, "checkpoint", self.version, {"state.json": text, "shard.safetensors": b"x" * 50})
        return state

    def end(self, total_steps: int = 0) -> None:
        if self.saved != self.version:
            self.save()
        for rollout_id in self.gate.abandon():
            self.events.abandoned(rollout_id)
        self._report()
        books = self.gate.books()
        self.ledger.end(self.version, books)
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
            "books": plain(books),
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

    def _report(self) -> None:
        self.events.forget(self.seen)
        self.ledger.take(self.events.unrecorded)
        self.seen = self.events.last_seq

    def _record(self, ticket: RolloutTicket, version: int) -> RolloutRecord:
        versions = {version: 3, self.version: 2} if version < self.version else {version: 5}
        rewards = (float(ticket.order % 2), 0.5)
        head = (ticket.rollout_id, ticket.prompt_id, ticket.order, 0, version)
        lengths = (versions, (5, 5), (3, 2), rewards, (False, False), (0, 1))
        if not self.judge:
            return RolloutRecord(*head, *lengths)
        generated = {"rollout/generated/actor": 3.0, "rollout/generated/judge": 4.0}
        return RolloutRecord(*head, *lengths, groups=("", "judge"), metrics=generated)


def packed(prompts: list[str]) -> dict[str, Any]:
    epochs: dict[str, str] = {}
    for epoch in {prompt.partition("-")[0] for prompt in prompts}:
        bits = np.zeros(16, np.uint8)
        bits[[int(prompt.partition("-")[2]) for prompt in prompts if prompt.startswith(f"{epoch}-")]] = 1
        epochs[epoch[1:]] = base64.b64encode(zlib.compress(np.packbits(bits, bitorder="little").tobytes())).decode()
    return {"count": len(set(prompts)), "epochs": epochs, "others": []}


def plain(books: GateBooks) -> dict[str, Any]:
    return {name: getattr(books, name) for name in GateBooks.__struct_fields__}


def write_books(folder: Path, step: int, books: GateBooks) -> None:
    (folder / "books.json").write_text(json.dumps({"step": step, "books": plain(books)}))


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
    """Three steps, a checkpoint after the second, a kill, a launch that goes on to the fifth step and ends."""
    folder = begin_run(tmp_path / "run")
    first = Launch(folder)
    first.step()
    first.step()
    state = first.save()
    first.step()
    first.ledger.close()
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows[:2]))  # as the next launch does
    shutil.rmtree(folder / "weights" / "actor" / "v3")
    forget_after(folder / "samples", 2, "head-0")
    second = Launch(folder, state)
    for _ in range(3):
        second.step()
    second.save()
    second.end()
    shutil.rmtree(folder / "samples")  # they would take most of an audit's time
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("samples: {every: 1}", "samples: {every: 0}"))
    return folder
