"""The doctor: explains a run's speed, finds its problems, and suggests settings.

One set of rules serves the command `doctor RUN`, the dashboard's banner and the Python API. The rules read a `History`,
so they work on live, finished and dead runs alike, from their files alone. No process of a run imports them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.observe.doctor.bottleneck import balanced, bottlenecks
from asyncrl.observe.doctor.finding import Finding, Level
from asyncrl.observe.doctor.health import problems
from asyncrl.observe.doctor.measured import Measured, measure
from asyncrl.observe.doctor.stalled import findings_of_stops, without_processors
from asyncrl.observe.history import History
from asyncrl.observe.status import FEWEST_STEPS

LEAST_SHOWN = 0.01
"""Share of the time below which a part is not shown."""
PARTS = {
    "switch": "switching",
    "train": "training",
    "publish": "publishing weights",
    "memory_checkpoint": "keeping the step",
    "wait_eval": "waiting for evaluations",
    "other": "other",
}


@dataclass(frozen=True, slots=True)
class RunStage:
    """A stage's share of use (None if not measured), and its figures."""

    name: str
    use: float | None
    figures: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, the most severe first; `measured` is None if the run has too few steps."""

    findings: Sequence[Finding]
    measured: Measured | None
    not_measured: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as plain values, without what was measured."""
        return {
            "findings": [{**asdict(each), "link": each.link, "gain": each.gain} for each in self.findings],
            "stages": [asdict(stage) for stage in self.stages],
            "not_measured": list(self.not_measured),
        }

    @property
    def stages(self) -> Sequence[RunStage]:
        """The stages of the run, with the share of time in which each is in use."""
        return () if self.measured is None else stages(self.measured)


def examine(history: History) -> Diagnosis:
    """Examine a run by its files."""
    measured = measure(history)
    found = [*findings_of_stops(history), *problems(history, measured)]
    missing: tuple[str, ...] = ()
    if measured is None:
        found += without_processors(history)
        missing = (f"speed: fewer than {FEWEST_STEPS} steps",)
    else:
        even = balanced(measured)
        found += list(bottlenecks(measured)) if even is None else [even]
        missing = measured.missing
    order = {Level.problem: 0, Level.bottleneck: 1, Level.notice: 2}
    findings = sorted(found, key=lambda finding: order[finding.level])
    return Diagnosis(findings, measured, missing)


def stages(m: Measured) -> list[RunStage]:
    """Return the stages of a run with the share of time in which each is in use."""
    listed = [
        RunStage("trainer", 1 - m.wait, f"{m.trainer_s:.2f} of {m.step_s:.2f} s a step; {_parts(m)}"),
        RunStage(
            "gate full", m.idle, f"{m.idle_s:.2f} s a step; η = {m.eta} lets {(m.eta + 1) * m.batch} rollouts live"
        ),
        RunStage("slots", m.busy, f"{m.busy_slots:.0f} of {m.slots} taken, {m.rollout_s:.2f} s a rollout"),
    ]
    listed += [
        RunStage(f"  {what}", seconds / m.rollout_s if m.rollout_s else 0.0, f"{seconds:.2f} s of a rollout")
        for what, seconds in m.calls.items()
        if seconds > 0.001
    ]
    for server in m.all_servers:
        name = f"{server.name} ({server.policy})" if server.policy else server.name
        if server.running is None:
            listed.append(RunStage(name, None, "tells no figures"))
            continue
        most = server.max_running
        figures = f"{server.running:.0f} of {most or 0:.0f} samples, {server.queued or 0:.0f} queued"
        if server.kv_share is not None:
            figures += f", KV cache {100 * server.kv_share:.0f} %"
        if server.tokens_s is not None:
            figures += f", {server.tokens_s:,.0f} tokens/s"
        if server.updating >= LEAST_SHOWN:
            figures += f", {100 * server.updating:.0f} % of the time in weight updates"
        listed.append(RunStage(name, server.running / most if most else None, figures))
    age = f"at most {m.greatest_age:.0f} versions, η = {m.eta}"
    if m.stale:
        age += f"; {100 * m.stale:.0f} % of the rollouts dropped as too old"
    listed.append(
        RunStage("age of tokens", min(1.0, m.greatest_age / m.eta) if m.eta else float(m.greatest_age > 0), age)
    )
    return listed


def _parts(m: Measured) -> str:
    """Return how the trainer's seconds of a step are divided, as text."""
    shown = {name: seconds for name, seconds in m.parts.items() if name in PARTS and seconds >= LEAST_SHOWN * m.step_s}
    return ", ".join(f"{PARTS[name]} {seconds:.2f}" for name, seconds in shown.items())
