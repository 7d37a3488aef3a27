"""A run in virtual time that leaves the files of a real one: gate, slots, one server, user code, trainer.

The server shares its speed among the samples that it runs, up to a batch and a cache; user code takes time and no
resource; the trainer takes B finished rollouts at a time. Time goes on in small equal pieces.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.comm.ended_rollouts import (
    Admitted,
    Begin,
    Finished,
    Line,
    RolloutCounts,
    RunSettings,
    Step,
    Trained,
)

PIECE_S = 0.02
LOOK_S = 2.0
BEGAN = 1_000_000.0


@dataclass(frozen=True)
class Knobs:
    """Everything that the run depends on; seconds, samples, tokens."""

    batch: int = 16
    group: int = 4
    eta: int = 2
    slots: int = 24
    tokens: int = 60
    speed: float = 4000.0
    """Tokens a second that the server decodes at most, and `sample_speed` for a single sample."""
    sample_speed: float = 80.0
    max_running: int = 256
    max_tokens: int = 40_000
    reward_s: float = 0.01
    env_s: float = 0.0
    train_s: float = 0.3
    publish_s: float = 0.05
    update_s: float = 0.05
    colocated: bool = False
    """The server sleeps while a step is trained and published."""
    eval_samples: int = 0
    """Answers of the evaluation of each version, which the server decodes beside the rollouts."""
    steps: int = 24
    seed: int = 0


@dataclass
class _Rollout:
    name: str
    order: int
    version: int
    at: float
    phase: str = "queue"
    left: float = 0.0
    generate_s: float = 0.0
    finished: float = 0.0
    tokens: int = 0
    """Of all its answers."""


@dataclass
class VirtualRun:
    """See the module's docstring; `play` plays it and writes its files into `folder`."""

    knobs: Knobs
    folder: Path
    now: float = BEGAN
    version: int = 0
    rollouts: list[_Rollout] = field(default_factory=list)
    finished: list[_Rollout] = field(default_factory=list)
    ledger: list[Line] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    server: list[dict[str, Any]] = field(default_factory=list)
    admitted: int = 0
    trained: int = 0
    generated: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    evaluation_began: float = 0.0
    rate: float = 0.0
    master: list[dict[str, Any]] = field(default_factory=list)
    updating_until: float = 0.0
    sleeps: bool = False
    evaluation_left: float = 0.0
    """Tokens of each of its answers; all are decoded at the same time."""

    def play(self) -> float:
        """Play all steps; returns the mean seconds of the later steps."""
        k = self.knobs
        self.random = random.Random(k.seed)
        settings = RunSettings(k.batch, k.eta, "drop", 1, 0)
        self.ledger.append(
            Begin(lineage=0, version=0, after=0, settings=settings, carried=None, line=1, at=self.now, seal="0")
        )
        ends = [self.now]
        while self.version < k.steps:
            times = {"wait_for_batch": self._pass(lambda: len(self.finished) >= k.batch)}
            batch, self.finished = self.finished[: k.batch], self.finished[k.batch :]
            times |= {name: self._work(seconds) for name, seconds in (("train", k.train_s), ("publish", k.publish_s))}
            self.version += 1
            self.trained += k.batch
            times["wait_eval"] = self._pass(lambda: self.evaluation_left <= 0)
            self.evaluation_left = float(k.tokens) if k.eval_samples else 0.0
            self.evaluation_began = self.now
            self.updating_until = self.now + k.update_s
            lane = "generation_server/0"
            self.master.append({"span": "update", "begin": self.now, "end": self.updating_until, "lane": lane})
            ends.append(self.now)
            self._write_step(batch, times, ends[-1] - ends[-2])
        self._write()
        late = ends[len(ends) // 4 :]
        return (late[-1] - late[0]) / max(1, len(late) - 1)

    def _work(self, seconds: float) -> float:
        until = self.now + seconds
        self.sleeps = self.knobs.colocated
        took = self._pass(lambda: self.now >= until)
        self.sleeps = False
        return took

    def _pass(self, done: Any) -> float:
        began = self.now
        while not done():
            self._piece()
            assert self.now - began < 3600, "the virtual run stands still"
        return self.now - began

    def _piece(self) -> None:
        k = self.knobs
        limit = (k.eta + self.version + 1) * k.batch
        full = self.trained + len(self.finished) + len(self.rollouts) >= limit
        while len(self.rollouts) < k.slots and self.trained + len(self.finished) + len(self.rollouts) < limit:
            one = _Rollout(f"r{self.admitted}", self.admitted, self.version, self.now)
            one.left = k.tokens * self.random.lognormvariate(-0.18, 0.6)
            one.tokens = max(1, round(one.left * k.group))
            self.rollouts.append(one)
            worker = "rollout_worker/0"
            self.ledger.append(Admitted(one.name, f"e0-{one.order}", one.order, 0, worker, one.version, self.now))
            self.admitted += 1
        if full and not self.rollouts:
            self.idle_s += PIECE_S
        self._decode()
        for one in self.rollouts:
            if one.phase in ("env", "reward"):
                one.left -= PIECE_S
                if one.left <= 0:
                    one.phase, one.left = ("reward", k.reward_s) if one.phase == "env" else ("done", 0.0)
        for one in [one for one in self.rollouts if one.phase == "done"]:
            self.rollouts.remove(one)
            one.finished = self.now
            self.finished.append(one)
            self.ledger.append(Finished(one.name, one.tokens, self.now))
        self.now += PIECE_S
        if int(self.now / LOOK_S) != int((self.now - PIECE_S) / LOOK_S):
            self._look()

    def _decode(self) -> None:
        k = self.knobs
        running = sum(one.phase == "generate" for one in self.rollouts) * k.group
        for one in self.rollouts:
            if one.phase != "queue":
                continue
            if running + k.group > k.max_running or (running + k.group) * 2 * k.tokens > k.max_tokens:
                break
            one.phase = "generate"
            running += k.group
        for one in self.rollouts:
            one.generate_s += PIECE_S if one.phase in ("queue", "generate") else 0.0
        evaluating = k.eval_samples if self.evaluation_left > 0 else 0
        running += evaluating
        if not running or self.now < self.updating_until or self.sleeps:
            return
        each = min(k.sample_speed, k.speed / running) * PIECE_S
        self.rate = each * running / PIECE_S
        self.busy_s += PIECE_S
        self.generated += each * running
        if evaluating:
            self.evaluation_left -= each
            if self.evaluation_left <= 0:
                span = {"span": "evaluation", "begin": self.evaluation_began, "end": self.now, "version": self.version}
                self.master.append(span)
        for one in self.rollouts:
            if one.phase == "generate":
                one.left -= each
                if one.left <= 0:
                    one.phase, one.left = "env", k.env_s

    def _look(self) -> None:
        k = self.knobs
        running = sum(one.phase == "generate" for one in self.rollouts) * k.group
        running += k.eval_samples if self.evaluation_left > 0 else 0
        queued = sum(one.phase == "queue" for one in self.rollouts) * k.group
        self.server.append(
            {
                "at": self.now, "pid": 1, "stage": "serves", "since": BEGAN, "cpu_s": self.busy_s, "no_core_s": 0.0,
                "rss": 1 << 29, "host_free": 1 << 34, "late_s": 0.01, "loop_late_s": 0.01,
                "max_running": k.max_running, "max_tokens": k.max_tokens, "running": running, "queued": queued,
                "kv_share": running * 2 * k.tokens / k.max_tokens, "tokens_per_s": self.rate,
                "generated_total": self.generated,
                "retracted_total": 0.0, "busy_s": self.busy_s,
            }
        )  # fmt: skip

    def _write_step(self, batch: list[_Rollout], times: dict[str, float], step_s: float) -> None:
        k = self.knobs
        for one in batch:
            head = (one.name, f"e0-{one.order}", one.order, 0, self.version)
            self.ledger.append(Trained(*head, {one.version: one.tokens}, k.group, k.group, 0.5))
        self.ledger.append(Step(lineage=0, step=self.version, counts=RolloutCounts(), line=1, at=self.now, seal="0"))
        idle_s, self.idle_s = self.idle_s, 0.0
        self.rows.append(
            {
                "step": self.version,
                "time/step_s": step_s,
                **{f"time/{name}_s": seconds for name, seconds in times.items()},
                "time/generation_idle_s": idle_s,
                "rollout/generate_s": sum(one.generate_s for one in batch) / len(batch),
                "rollout/reward_s": k.reward_s,
                "rollout/env_s": k.env_s,
                "reward/mean": 0.5,
                "reward/std": 0.5,
                "reward/frac_zero_std": 0.1,
                "staleness/max": float(max(self.version - 1 - one.version for one in batch)),
                **({"eval/held_out/accuracy": 0.5} if k.eval_samples else {}),
            }
        )

    def _write(self) -> None:
        k = self.knobs
        config = {
            "total_train_steps": k.steps,
            "group_size": k.group,
            "rollout": {"max_concurrent": k.slots, "workers": 1},
            "generation": {"colocated": "all" if k.colocated else "none", "servers": 1},
        }
        for name in ("ledger", "observed"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "config.yaml").write_text(json.dumps(config))
        (self.folder / "summary.json").write_text(json.dumps({"steps": k.steps}))
        lines = b"".join(msgspec.json.encode(line) + b"\n" for line in self.ledger)
        (self.folder / "ledger" / "000001.jsonl").write_bytes(lines)
        files = {
            "metrics.jsonl": self.rows,
            "observed/generation_server-0.jsonl": self.server,
            "observed/master_worker-0.jsonl": self.master,
        }
        for file, rows in files.items():
            (self.folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
