"""Measurements for the doctor's rules: means over a window of a run's newest steps, and of its generation servers.

The laws are those of operational analysis (Denning and Buzen 1978), which assume nothing about distributions:

- throughput: a step of B rollouts every `step_s` seconds is B / step_s rollouts a second;
- Little's law: rollouts alive are admissions a second times seconds of a rollout;
- use of a stage: its busy time over the window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import log
from statistics import median
from typing import Any

from asyncrl.comm.ended_rollouts import DropReason
from asyncrl.comm.names import GENERATION_SERVER, POLICY_SERVER
from asyncrl.inference.settings import COLOCATE_ALL, COLOCATE_NONE
from asyncrl.observe.history import History, Rollout, Row
from asyncrl.observe.observer import Activity
from asyncrl.observe.status import FEWEST_STEPS, Process

WINDOW_STEPS = 50
"""Number of newest steps that are measured."""
LITTLE_WAITING = 0.15
"""A trainer that waits less than this share of the time sets the pace itself."""
SCARCE_CORES = 0.2
"""Share of the time without a core, of that in which threads could run, from which on cores are all taken."""
GUESSED = 2.5
"""A server counts as being at its limit if its batch is full to one part in this number."""
FEW_EVALUATIONS = 0.1
FEWEST_LOADS = 8
LEAST_SPREAD = 0.2
"""Difference of the logarithms of the number of running samples below which saturation is unknown."""
TRAINER_PARTS = ("switch", "train", "publish", "memory_checkpoint", "wait_eval")
CALLS = {
    "generate_s": "generation",
    "reward_s": "reward",
    "env_s": "environment",
    "tool_s": "tool",
    "agent_wait_s": "a slot for user code",
    "env_wait_s": "a slot for user code",
    "process_wait_s": "a slot for user code",
    "thread_wait_s": "a slot for user code",
}
"""Metrics of a rollout's seconds, and the names of the activities."""
SETTINGS = (
    "generation.backend",
    "manager.update_mode",
    "manager.weight_transport",
    "rollout.pacing",
    "trainer.ppo_minibatches",
    "trainer.tokens_per_micro_batch",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Means over a window of steps. Times are in seconds per step unless stated otherwise.

    Attributes:
        parts: of a step: waiting for a batch, training, publishing and so on.
        rollout_s: from admitted to finished; `calls` has these seconds by activity.
        waited_s: from finished to the end of the step that trained it.
        slots, busy_slots: number of rollouts that may run at a time, and mean number that did.
        servers: servers of the run's own policy; `policy_servers` are the servers of `policies`.
        idle_s: time in which the full gate let no rollout run.
        worker_no_core: seconds, per second, in which threads of the RolloutWorker whose event loop is latest were ready
            and had no core.
        evaluations: share of the versions that are evaluated; `evaluating` is the share of the servers' samples that
            are an evaluation's.
        greatest_age: of a trained token, in versions.
        stale: share of the admitted rollouts that were dropped as too old.
        saturation: 0 if twice the samples give twice the tokens a second, 1 if they give no more; None if the number of
            samples hardly varied.
        takes_turns: all servers are colocated, so that nothing is generated while a step is
            trained.
        workers: number of RolloutWorkers, which share the slots.
        no_core: share of the time in which threads of the run could run and had no core.
        rank_tokens: of a batch, on each training rank.
        on_gpu: the ranks train on GPUs.
        settings: of the run, those of `SETTINGS`, which advice depends on; None if not known.
    """

    steps: tuple[int, int]
    step_s: float
    batch: int
    eta: int
    group: int
    parts: Mapping[str, float]
    idle_s: float
    rollout_s: float
    waited_s: float
    calls: Mapping[str, float]
    slots: int
    busy_slots: float
    servers: tuple[ServerLoad, ...]
    worker_loop_late_s: float | None
    worker_late_s: float | None
    worker_no_core: float | None
    evaluations: float
    evaluating: float
    saturation: float | None
    greatest_age: float
    stale: float
    takes_turns: bool
    policy_servers: tuple[ServerLoad, ...] = ()
    workers: int = 1
    no_core: float = 0.0
    rank_tokens: float = 0.0
    on_gpu: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cores_are_taken(self) -> bool:
        """True if the run's processes wait for cores so often that more processes would not make it faster."""
        return self.no_core > SCARCE_CORES

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of measurements that the run's files lack, for people."""
        return () if self.servers else ("generation servers (no lines of them in observed/)",)

    @property
    def wait_s(self) -> float:
        """Seconds of a step in which the trainer waits for rollouts."""
        return self.parts["wait_for_batch"]

    @property
    def wait(self) -> float:
        """Share of a step in which the trainer waits for rollouts."""
        return self.wait_s / self.step_s

    @property
    def trainer_s(self) -> float:
        """Seconds of a step in which the trainer (MasterWorker and ModelWorkers) is busy."""
        return max(0.0, self.step_s - self.wait_s)

    @property
    def idle(self) -> float:
        """Share of the time in which the gate is full and nothing runs."""
        return self.idle_s / self.step_s

    @property
    def busy(self) -> float:
        """Share of the slots that are taken."""
        return self.busy_slots / self.slots if self.slots else 0.0

    @property
    def all_servers(self) -> tuple[ServerLoad, ...]:
        """The servers of all policies, those of the run's own first."""
        return (*self.servers, *self.policy_servers)

    @property
    def fleets(self) -> dict[str, Fleet]:
        """The servers by policy, as of `ServerLoad.policy`."""
        named = dict.fromkeys(server.policy for server in self.all_servers)
        return {policy: Fleet(tuple(each for each in self.all_servers if each.policy == policy)) for policy in named}

    @property
    def own(self) -> Fleet:
        """The servers of the run's own policy."""
        return Fleet(self.servers)

    @property
    def queues(self) -> bool:
        """True if samples queue in servers, so that more rollouts at a time would only wait there."""
        return any(fleet.queues for fleet in self.fleets.values())

    def step_if(
        self,
        *,
        trainer_s: float | None = None,
        user_s: float | None = None,
        generation_s: float | None = None,
        slots: int | None = None,
        queues: bool | None = None,
        server: float = 1.0,
    ) -> float:
        """Return the seconds of a step at best, if the given figures had these values.

        A step takes as long as the slowest of three: the trainer; B rollouts of `rollout_s` in the given slots; and
        the servers, as far as they are at their limit. `server` scales the servers' work for a step. If generation and
        training do not overlap, a step takes the trainer's time plus the longer of the other two.
        """
        generation = self.calls.get("generation", 0.0) if generation_s is None else generation_s
        user = max(0.0, self.rollout_s - self.calls.get("generation", 0.0)) if user_s is None else user_s
        supply_s = self.batch * (generation + user) / max(1, self.slots if slots is None else slots)
        limit = (1.0 if self.queues else self._limit) if queues is None else 1.0 if queues else self.saturation or 0.0
        overlaps = self.eta > 0 and not self.takes_turns
        generating_s = self.step_s if overlaps else self.wait_s
        servers_s = limit * server * generating_s if self.wait >= LITTLE_WAITING else 0.0
        training_s = self.trainer_s if trainer_s is None else trainer_s
        if not overlaps:
            return training_s + max(supply_s, servers_s)
        return max(training_s, supply_s, servers_s)

    @property
    def _limit(self) -> float:
        """Return how close the servers are to their limit; if not measured, estimate it from the batch size."""
        if self.saturation is not None:
            return self.saturation
        running, most = self.own.total("running"), self.own.total("max_running")
        return min(1.0, GUESSED * running / most) if running and most else 0.0


def measure(history: History) -> Measured | None:
    """Measure the newest steps; None if fewer than `FEWEST_STEPS` have both a row and a ledger line."""
    rows = window(history)
    if len(rows) < FEWEST_STEPS:
        return None
    first, last = int(rows[0]["step"]), int(rows[-1]["step"])
    steps = [history.steps[int(row["step"])] for row in rows]
    begin, end = steps[0].at - rows[0].get("time/step_s", 0.0), steps[-1].at
    step_s = max(_mean(row["time/step_s"] for row in rows), 1e-9)
    parts = {name: _mean(row.get(f"time/{name}_s", 0.0) for row in rows) for name in ("wait_for_batch", *TRAINER_PARTS)}
    parts["other"] = max(0.0, step_s - sum(parts.values()))
    rollout_s = _mean(step.rollout_s for step in steps)
    settings = history.ledger.settings
    workers, ranks = (
        [each for each in history.processes.values() if each.kind == kind]
        for kind in ("rollout_worker", "model_worker")
    )
    latest = max(workers, key=lambda worker: _gauge_mean(worker, "loop_late_s", begin, end) or 0.0, default=None)
    servers, policy_servers = (server_loads(history, kind, begin, end) for kind in (GENERATION_SERVER, POLICY_SERVER))
    admitted, dropped = history.ledger.dropped_since(first)
    slots = int(history.setting("rollout.max_concurrent", 0)) * int(history.setting("rollout.workers", 1))
    return Measured(
        steps=(first, last),
        step_s=step_s,
        batch=settings.train_batch_size if settings else 0,
        eta=settings.max_head_offpolicyness if settings else 0,
        group=int(history.setting("group_size", 1)),
        parts=parts,
        idle_s=_mean(row.get("time/generation_idle_s", 0.0) for row in rows),
        rollout_s=rollout_s,
        waited_s=_mean(step.waited_s for step in steps),
        calls=_calls(rows, rollout_s),
        slots=slots,
        busy_slots=_alive(history.rollouts.values(), begin, end)
        or sum(step.admitted for step in steps) / max(end - begin, 1e-9) * rollout_s,  # Little's law
        servers=servers,
        worker_loop_late_s=_worst_mean(workers, "loop_late_s", begin, end),
        worker_late_s=_worst_mean(workers, "late_s", begin, end),
        worker_no_core=latest.rate("no_core_s", begin, end) if latest else None,
        evaluations=_mean(any(name.startswith("eval/") for name in row) for row in rows),
        evaluating=_evaluating(history, servers, begin, end),
        saturation=_saturation(history, begin, end),
        greatest_age=max(row.get("staleness/max", 0.0) for row in rows),
        stale=dropped.get(DropReason.stale, 0) / max(1, admitted),
        takes_turns=str(history.setting("generation.colocated", COLOCATE_NONE))
        in (COLOCATE_ALL, str(len(servers) or None)),
        policy_servers=policy_servers,
        workers=int(history.setting("rollout.workers", 1)),
        no_core=_no_core(history, begin, end),
        rank_tokens=_mean(row.get("tokens/batch", 0.0) for row in rows) / max(1, len(ranks)),
        on_gpu=any("gpu_bytes" in each.last for each in ranks),
        settings={name: history.setting(name) for name in SETTINGS},
    )


def window(history: History) -> list[Row]:
    """Return the rows of the newest steps that the ledger has too.

    The first fifth of the run, in which it warms up, is left out.
    """
    rows = [row for step, row in sorted(history.rows.items()) if step in history.steps and "time/step_s" in row]
    warm = rows[max(1, len(rows) // 5) :] if len(rows) > FEWEST_STEPS else rows
    return warm[-WINDOW_STEPS:]


def _no_core(history: History, begin: float, end: float) -> float:
    """Return the share of the time in which the run's threads could run, but had no core."""
    had, lacked = (
        sum(process.rate(name, begin, end) or 0.0 for process in history.processes.values())
        for name in ("cpu_s", "no_core_s")
    )
    return lacked / (had + lacked) if had + lacked else 0.0


def _calls(rows: list[Row], rollout_s: float) -> dict[str, float]:
    """Return the seconds of a rollout by activity, each limited to the duration of the rollout."""
    calls: Counter[str] = Counter()
    for metric, what in CALLS.items():
        calls[what] += _mean(row.get(f"rollout/{metric}", 0.0) for row in rows)  # type: ignore[assignment]
    return {what: min(seconds, rollout_s) for what, seconds in calls.items()}


def _alive(rollouts: Iterable[Rollout], begin: float, end: float) -> float:
    """Return the mean number of rollouts that ran at a time, among those that are still known."""
    running_s = 0.0
    for rollout in rollouts:
        until = rollout.finished_at or rollout.ended_at or end
        running_s += max(0.0, min(until, end) - max(rollout.admitted_at, begin))
    return running_s / max(end - begin, 1e-9)


def _evaluating(history: History, servers: tuple[ServerLoad, ...], begin: float, end: float) -> float:
    """Return the share of the servers' samples over the window that belong to evaluations, estimated from the
    additional samples while an evaluation runs.
    """
    spans = [
        (max(span["begin"], begin), min(span["end"], end))
        for process in history.processes.values()
        for span in process.spans
        if span["span"] == "evaluation" and span["end"] > begin and span["begin"] < end
    ]
    lasted = sum(high - low for low, high in spans) / max(end - begin, 1e-9)
    if lasted < FEW_EVALUATIONS or not servers:
        return 0.0
    among: list[float] = []
    outside: list[float] = []
    for at, running, _ in _loads(history, begin, end):
        (among if any(low <= at <= high for low, high in spans) else outside).append(running)
    if not among:
        return 0.0
    usual = _mean(outside) if outside else _alive(history.rollouts.values(), begin, end)
    if not outside:
        usual *= int(history.setting("group_size", 1))
    more = max(0.0, _mean(among) - usual)
    return float(min(1.0, lasted * more / max(_mean(among), 1e-9)))


def _loads(history: History, begin: float, end: float) -> list[tuple[float, float, float]]:
    """Return time, running samples and tokens per second from each line of the servers."""
    return [
        (line["at"], line["running"], line["tokens_per_s"])
        for process in history.processes.values()
        if process.kind == GENERATION_SERVER
        for line in process.between(begin, end)
        if line.get("running") and line.get("tokens_per_s")
    ]


def _saturation(history: History, begin: float, end: float) -> float | None:
    """One minus the elasticity of tokens a second with the number of running samples, between the medians of the least
    and the most loaded quarter of the lines.

    The warm-up counts too: with few samples it shows the speed of a single sample.
    """
    loads = sorted((log(running), log(rate)) for _, running, rate in _loads(history, begin - (end - begin), end))
    quarter = len(loads) // 4
    if quarter < FEWEST_LOADS // 4:
        return None
    (low_n, low_rate), (high_n, high_rate) = (
        (median(n for n, _ in part), median(rate for _, rate in part)) for part in (loads[:quarter], loads[-quarter:])
    )
    if high_n - low_n < LEAST_SPREAD:
        return None
    elasticity: float = (high_rate - low_rate) / (high_n - low_n)
    return min(1.0, max(0.0, 1.0 - elasticity))


def _gauge_mean(process: Process, gauge: str, begin: float, end: float) -> float | None:
    """Return the mean of `gauge` over the lines between two times; None if no line has it."""
    values = [line[gauge] for line in process.between(begin, end) if gauge in line]
    return sum(values) / len(values) if values else None


def _worst_mean(processes: list[Process], gauge: str, begin: float, end: float) -> float | None:
    means = [mean for each in processes if (mean := _gauge_mean(each, gauge, begin, end)) is not None]
    return max(means, default=None)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


QUEUE_SHARE = 0.25
"""Samples queue in the servers if they are more than this share of the running ones."""


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A generation server over the window; figures that its engine does not report are None.

    `tokens_s` are generated a second. `busy`, `cpu` and `no_core` are shares of the time in engine steps, on a
    processor, and ready without one; the last two are sums over threads and may exceed 1. `updating` is the share of
    time in weight updates.
    """

    name: str
    stage: str
    serves: bool
    """True if it served at some time."""
    running: float | None
    queued: float | None
    max_running: float | None
    kv_share: float | None
    retracted_s: float | None
    tokens_s: float | None
    busy: float | None
    cpu: float | None
    no_core: float | None
    late_s: float | None
    silent: float
    updating: float
    policy: str = ""
    """One of `policies`; empty: the run's own policy."""

    @property
    def tokens_per_sample(self) -> float | None:
        """Tokens a second for each running sample."""
        if not self.tokens_s or not self.running:
            return None
        return self.tokens_s / self.running


@dataclass(frozen=True, slots=True)
class Fleet:
    """The servers that generate with one policy."""

    servers: tuple[ServerLoad, ...]

    @property
    def name(self) -> str:
        """The servers in a few words."""
        policy = self.servers[0].policy if self.servers else ""
        return f"the servers of policy {policy}" if policy else "the servers"

    @property
    def samples(self) -> float:
        """Samples that run in them or wait there."""
        return sum((server.running or 0.0) + (server.queued or 0.0) for server in self.servers)

    def total(self, name: str) -> float | None:
        """Return the sum of the servers' figure `name`; None if one of them does not report it."""
        values = [getattr(server, name) for server in self.servers]
        return sum(values) if values and None not in values else None

    @property
    def queues(self) -> bool:
        """True if samples queue in its servers."""
        running, queued = self.total("running"), self.total("queued")
        return running is not None and queued is not None and queued > QUEUE_SHARE * max(1.0, running)


def server_loads(history: History, kind: str, begin: float, end: float) -> tuple[ServerLoad, ...]:
    """Measure the servers of a kind that wrote lines from `begin` to `end`, in seconds since 1970."""
    policies = policy_of_server(history)
    return tuple(
        _load(each, history, policies.get(each.name, ""), begin, end)
        for each in history.processes.values()
        if each.kind == kind and each.between(begin, end)
    )


def _load(process: Process, history: History, policy: str, begin: float, end: float) -> ServerLoad:
    mean, rate = partial(_gauge_mean, process, begin=begin, end=end), partial(process.rate, begin=begin, end=end)
    updating_s = sum(
        max(0.0, min(span["end"], end) - max(span["begin"], begin))
        for each in history.processes.values()
        for span in each.spans
        if span["span"] == "update" and span.get("lane") == process.name
    )
    lines = process.between(begin, end)
    return ServerLoad(
        name=process.name,
        stage=lines[-1]["stage"],
        serves=any(line.get("activity", Activity.serves) == Activity.serves for line in lines),
        running=mean("running"),
        queued=mean("queued"),
        max_running=max((line["max_running"] for line in lines if "max_running" in line), default=None),
        kv_share=mean("kv_share"),
        retracted_s=rate("retracted_total"),
        tokens_s=rate("generated_total"),
        busy=rate("busy_s"),
        cpu=rate("cpu_s"),
        no_core=rate("no_core_s"),
        late_s=mean("late_s"),
        silent=sum("silent" in line for line in lines) / len(lines) if lines else 0.0,
        updating=updating_s / max(end - begin, 1e-9),
        policy=policy,
    )


def policy_of_server(history: History) -> dict[str, str]:
    """Return the policy of each process of the kind `policy_server`, by its name."""
    named = [each["name"] for each in history.setting("policies") or () for _ in range(int(each.get("servers", 1)))]
    return {f"{POLICY_SERVER}/{index}": policy for index, policy in enumerate(named)}
