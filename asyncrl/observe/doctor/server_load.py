"""Measurements of generation servers over a window of time, for the doctor's rules."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.observe.history import History, Process
from asyncrl.observe.observer import Activity

SERVER, POLICY_SERVER = "generation_server", "policy_server"
"""Kinds of processes that generate: for the run's own policy, and for those in `policies`."""
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


def policy_of_server(history: History) -> dict[str, str]:
    """Return the policy of each process of the kind `policy_server`, by its name."""
    named = [each["name"] for each in history.setting("policies") or () for _ in range(int(each.get("servers", 1)))]
    return {f"{POLICY_SERVER}/{index}": policy for index, policy in enumerate(named)}


def _load(process: Process, history: History, policy: str, begin: float, end: float) -> ServerLoad:
    def mean(name: str) -> float | None:
        return process.mean(name, begin, end)

    def rate(name: str) -> float | None:
        return process.rate(name, begin, end)

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
        max_running=process.greatest("max_running", begin, end),
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
