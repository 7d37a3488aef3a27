"""`python -m asyncrl.launch doctor RUN --plan DEVICES`: the fastest split of devices, and η, by a formula.

Rates come from the run's files, over the doctor's window of newest steps:

    servers    lines in `observed/`: n running samples get n / t(n) tokens a second, so a decode step takes
               t(n) = step_s + sequence_s · n. Both are a least-squares fit; prefilling is inside.
    training   rows of `metrics.jsonl`: `time/train_s` = fixed_s + token_s · (tokens of the batch)
    answers    a log-normal with the mean and the maximum of `rollout/len_*`, or with the ledger's tokens per rollout
    rest       seconds of a rollout outside of generation; publishing, checkpoints and evaluations of a step; seconds of
               the servers' weight updates

A step of B rollouts takes as long as the slowest of what limits it (the asymptotic bounds of operational analysis,
Denning and Buzen 1978, section 8):

    training                        T
    S servers with n samples each   B · G · mean · t(n) / (S · n) + U
    P rollouts at a time            B · R / P + U, where one takes R = longest of G answers · t(n) + user code
    (η + 1) · B rollouts alive      (R + T + U) / (η + 1)

With η = 0 nothing overlaps: a step is the batch's generation, the update U and T. A server keeps its number of devices,
and the training ranks keep their tensor and pipeline axes: the numbers of servers and of data-parallel ranks change.
The run as it was is predicted, too: its error shows how far to trust the others. What the files do not determine is
replaced by a conservative value, which the plan lists.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, median, pstdev

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.launch.commands import refuse
from asyncrl.observe.doctor.bottleneck import STARVED
from asyncrl.observe.doctor.measured import Measured, measure, window
from asyncrl.observe.history import History
from asyncrl.observe.status import Process
from asyncrl.runtime.settings import EXIT_OK
from asyncrl.trainer.parallel.placement import Layout

ETAS = (0, 1, 2, 4, 8)
MOST_SPLITS = 9
WORTH = 1.1
"""A larger η must make a step faster by this factor to be worth the older tokens."""
FEWEST_LOADS = 4
"""Least number of readings of the servers that determines their speed."""
LEAST_SPREAD = 1.3
"""With a smaller ratio of the greatest to the smallest load a fit cannot separate `step_s` and `sequence_s`."""
ROUNDS = 10
"""Enough for a load and its seconds to agree; each halves the difference at least."""
FAR_OFF = 0.25
"""With a larger relative error of the prediction for the run as it was, the plan warns that it is unreliable."""
SHOWN = 12
ASSUMED = (
    "train time beyond its fixed part falls with the number of data-parallel ranks; publishing and checkpoints do not",
    "servers are alike, and each has as many cores or GPUs as those that were measured",
    "answers stay as long as they were, and user code as fast",
)
NO_CORES = (
    "Threads of servers waited for a free core. The plan is for hosts whose cores are free: on a full host, more "
    "processes do not add up."
)


class NotMeasured(ValueError):
    """The run's files lack a figure that the plan needs; the message names it."""


@dataclass(frozen=True, slots=True)
class Rates:
    """A run's rates, in seconds, samples and tokens.

    Attributes:
        step_s, sequence_s: of a decode step, and of each running sample in it.
        max_running: samples at a time on a server.
        update_s: of a weight update, in which servers generate nothing.
        train_s, fixed_s: of a step's training with the measured ranks, and the part that more ranks do not shorten.
        publish_s: of the rest of the trainer's work in a step.
        mean, sigma, limit: of the answers' log-normal length, in tokens.
        user_s: of a rollout outside of generation.
    """

    batch: int
    group: int
    step_s: float
    sequence_s: float
    max_running: int
    update_s: float
    train_s: float
    fixed_s: float
    publish_s: float
    mean: float
    sigma: float
    limit: int
    user_s: float

    def decode_s(self, running: float) -> float:
        """Return the seconds of a token of each of `running` samples."""
        return self.step_s + self.sequence_s * running

    def rollout_s(self, running: float) -> float:
        """Return the seconds of a rollout if a server runs at most `running` samples: fewer run, while its shorter
        answers have ended, or user code works. The load and the seconds follow from each other.
        """
        most, found_s = running, 0.0
        for _ in range(ROUNDS):
            found_s = self.longest(self.group) * self.decode_s(running) + self.user_s
            running = most * self.mean * self.decode_s(running) / found_s
        return found_s

    def longest(self, count: float) -> float:
        """Return the tokens of the longest of `count` answers: about exp(μ + σ z) with z = Φ⁻¹(count / (count + 1))."""
        z = NormalDist().inv_cdf(count / (count + 1))
        return min(self.limit, self.mean * math.exp(self.sigma * z - self.sigma**2 / 2))


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run as it was.

    Attributes:
        step_s: measured seconds of a step.
        layout: layout of the training ranks.
        servers, server_devices: number of generation servers, and of the devices of one.
        slots: number of rollouts at a time over all RolloutWorkers; `workers` is the number of these.
        assumed: the figures missing from the files, and the values used instead; one sentence each.
    """

    rates: Rates
    step_s: float
    layout: Layout
    servers: int
    server_devices: int
    eta: int
    slots: int
    workers: int
    assumed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to divide the devices.

    Attributes:
        layout: `trainer.parallel`.
        servers: `generation.servers`.
        slots: number of rollouts at a time over all RolloutWorkers.
        step_s: predicted seconds of a step.
        wait: predicted share of the time in which training waits for rollouts.
        idle: predicted share of the time in which servers have nothing to decode.
        staleness: predicted mean age of trained tokens, in versions.
    """

    layout: str
    training: int
    generation: int
    servers: int
    eta: int
    slots: int
    step_s: float
    wait: float
    idle: float
    staleness: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Candidates for `devices`, the fastest first. `own` is the prediction for the run as it was."""

    devices: int
    own: Candidate
    measured_step_s: float
    candidates: Sequence[Candidate]
    best: Candidate
    assumed: Sequence[str]

    @property
    def off(self) -> float:
        """Relative error of the prediction for the run as it was."""
        return self.own.step_s / self.measured_step_s - 1


def plan(run: MeasuredRun, devices: int) -> Plan:
    """Predict the candidates for `devices`.

    Raises:
        ValueError: there are too few devices for one server and one copy of the trained model.
    """
    splits = list(_splits(run, devices))
    if not splits:
        least = run.server_devices + run.layout.copy
        raise ValueError(f"--plan {devices}: a server and a copy of the trained model take {least} devices")
    found = [predicted(run, layout, servers, max(run.eta, 1)) for layout, servers in splits]
    fastest = min(found, key=lambda each: each.step_s)
    etas = {*ETAS, run.eta} - {fastest.eta}
    found += [predicted(run, Layout.parse(fastest.layout), fastest.servers, eta) for eta in sorted(etas)]
    found.sort(key=lambda each: each.step_s)
    worth = (each for each in found if each.step_s <= WORTH * found[0].step_s)
    best = min(worth, key=lambda each: (each.eta, each.step_s))
    own = predicted(run, run.layout, run.servers, run.eta, run.slots)
    return Plan(devices, own, run.step_s, found, best, (*run.assumed, *ASSUMED))


def _splits(run: MeasuredRun, devices: int) -> Iterator[tuple[Layout, int]]:
    """Yield layouts and numbers of servers that use as many devices as possible; at most `MOST_SPLITS`."""
    copy = run.layout.copy
    counts = [data for data in range(1, devices // copy + 1) if (devices - data * copy) // run.server_devices >= 1]
    if len(counts) > MOST_SPLITS:
        last = len(counts) - 1
        counts = [counts[round(index * last / (MOST_SPLITS - 1))] for index in range(MOST_SPLITS)]
    for data in dict.fromkeys(counts):
        layout = replace(run.layout, data=data, replicas=1)
        yield layout, (devices - layout.ranks) // run.server_devices


def predicted(run: MeasuredRun, layout: Layout, servers: int, eta: int, slots: int | None = None) -> Candidate:
    """Return the prediction for a split, by the bounds at the top of this file.

    Args:
        slots: rollouts at a time; None: as many as η admits and the servers can decode.
    """
    of, alive = run.rates, (eta + 1) * run.rates.batch
    slots = slots or max(1, min(alive, -(-servers * of.max_running // of.group)))
    slots = min(slots, alive)
    running = min(of.max_running, slots * of.group / servers)
    trainer_s = of.fixed_s + (of.train_s - of.fixed_s) * run.layout.data / layout.data + of.publish_s
    answers = of.batch * of.group
    decoding_s = answers * of.mean * of.decode_s(running) / (servers * running)
    if eta:
        rollout_s = of.rollout_s(running)
        cycle_s = (rollout_s + trainer_s + of.update_s) / (eta + 1)
        step_s = max(trainer_s, max(decoding_s, of.batch * rollout_s / slots) + of.update_s, cycle_s)
    else:
        last = of.longest(answers)
        rollout_s = max(decoding_s, last * of.decode_s(running * of.mean / last)) + of.user_s
        step_s = rollout_s + of.update_s + trainer_s
    lifetime_s = (eta + 1) * step_s if step_s == trainer_s else rollout_s + trainer_s
    return Candidate(
        layout=str(layout),
        training=layout.ranks,
        generation=servers * run.server_devices,
        servers=servers,
        eta=eta,
        slots=slots,
        step_s=step_s,
        wait=1 - trainer_s / step_s,
        idle=max(0.0, 1 - decoding_s / step_s),
        staleness=min(float(eta), max(0.0, (lifetime_s - rollout_s / 2 - trainer_s) / step_s)),
    )


def measured_run(history: History, measured: Measured) -> MeasuredRun:
    """Return the rates of the run in `history`, whose means are `measured`.

    Raises:
        NotMeasured: there are too few readings of the servers, or no lengths of answers.
    """
    if measured.takes_turns or measured.policy_servers:
        setting = "generation.colocated" if measured.takes_turns else "policies"
        raise NotMeasured(f"the run has {setting}, for which there is no formula; use a run without it")
    servers = [each for each in history.processes.values() if each.kind == "generation_server"]
    if not servers:
        raise NotMeasured("observed/ has no lines of generation servers: their speed is not known")
    assumed: list[str] = []
    first, last = (history.steps[step].at for step in measured.steps)
    begin, end = first - measured.step_s, last
    mean, sigma, limit = _lengths(history, measured, assumed)
    step_s, sequence_s, usual = _decoding(measured, servers, begin, end, assumed)
    most = max((each.max_running or 0.0 for each in measured.servers), default=0.0) or 2 * usual
    updates = [
        span["end"] - span["begin"]
        for process in history.processes.values()
        for span in process.spans
        if span["span"] == "update" and begin <= span["end"] <= end
    ]
    rates = Rates(
        batch=measured.batch,
        group=measured.group,
        step_s=step_s,
        sequence_s=sequence_s,
        max_running=max(1, int(most)),
        update_s=fmean(updates) if updates else 0.0,
        train_s=measured.parts["train"],
        fixed_s=_fixed_s(history, measured, assumed),
        publish_s=max(0.0, measured.trainer_s - measured.parts["train"]),
        mean=mean,
        sigma=sigma,
        limit=limit,
        user_s=max(0.0, measured.rollout_s - measured.calls.get("generation", 0.0)),
    )
    return MeasuredRun(
        rates,
        measured.step_s,
        Layout.parse(str(history.setting("trainer.parallel", "d1"))),
        len(servers),
        _server_devices(history),
        measured.eta,
        measured.slots or measured.batch * (measured.eta + 1),
        int(history.setting("rollout.workers", 1)),
        tuple(assumed),
    )


def _server_devices(history: History) -> int:
    generation = ExperimentConfig().generation
    generation.backend = str(history.setting("generation.backend", generation.backend))
    engine = generation.engine
    if engine.program is not None:
        engine.program.tensor_parallel = int(history.setting(engine.named("tensor_parallel"), 1))
        engine.program.args = dict(history.setting(engine.named("args"), {}))
    return engine.shape.gpus


def _loads(process: Process, begin: float, end: float) -> Iterator[tuple[float, float]]:
    """Yield (running samples, tokens a second while the engine is busy) of consecutive lines."""
    for before, after in itertools.pairwise(process.between(begin, end)):
        if "generated_total" not in before or "generated_total" not in after:
            continue
        clock = "busy_s" if "busy_s" in before and "busy_s" in after else "at"
        running = (before["running"] + after["running"]) / 2
        tokens, seconds = after["generated_total"] - before["generated_total"], after[clock] - before[clock]
        if running > 0 and tokens > 0 and seconds > 0.1 * (after["at"] - before["at"]):
            yield running, tokens / seconds


def _decoding(
    m: Measured, servers: Sequence[Process], begin: float, end: float, assumed: list[str]
) -> tuple[float, float, float]:
    """Return `step_s` and `sequence_s` of the servers, and the samples of one that is busy. The loads of the warm-up
    before the measured steps count, too.
    """
    loads = [load for process in servers for load in _loads(process, begin - (end - begin), end)]
    if len(loads) < FEWEST_LOADS:
        raise NotMeasured(f"observed/ has {len(loads)} readings of generation servers at work; a plan needs more steps")
    counts = sorted(running for running, _ in loads)
    low, high = counts[len(counts) // 10], counts[-1 - len(counts) // 10]
    times = [running / rate for running, rate in loads]
    typical_n, typical_s = median(counts), median(times)
    if high >= LEAST_SPREAD * low:
        step_s, sequence_s = _line([running for running, _ in loads], times)
    else:
        step_s, sequence_s = typical_s / 2, typical_s / (2 * typical_n)
        assumed.append(
            f"a server always ran about {typical_n:.0f} samples, so half of a decode step is taken to grow with their "
            "number"
        )
    if (busy := 1.0 - m.evaluating) < 1:
        assumed.append(f"evaluations take {m.evaluating:.0%} of the servers' samples, and continue to do so")
        step_s, sequence_s = step_s / busy, sequence_s / busy
    return step_s, sequence_s, high


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return the non-negative intercept and slope with the smallest relative error of `y` (least squares)."""
    weights = 1 / np.maximum(np.array(y, float), 1e-12)
    columns = np.stack([weights, weights * np.array(x, float)], axis=1)
    intercept, slope = np.linalg.lstsq(columns, np.ones(len(x)), rcond=None)[0]
    if intercept < 0:
        return 0.0, float(median(b / a for a, b in zip(x, y, strict=True)))
    if slope < 0:
        return float(median(y)), 0.0
    return float(intercept), float(slope)


def _fixed_s(history: History, m: Measured, assumed: list[str]) -> float:
    """Return the seconds of a step's training that do not grow with the tokens of the batch."""
    rows = [row for row in window(history) if row.get("tokens/batch")]
    sizes = sorted(row["tokens/batch"] for row in rows)
    if len(sizes) >= 8 and sizes[-1] > LEAST_SPREAD * sizes[0]:
        fixed_s, _ = _line([row["tokens/batch"] for row in rows], [row["time/train_s"] for row in rows])
        return min(fixed_s, m.parts["train"])
    assumed.append("the batches were of about the same size, so all of training is taken to grow with their tokens")
    return 0.0


def _lengths(history: History, m: Measured, assumed: list[str]) -> tuple[float, float, int]:
    """Return mean, σ and limit of the lengths of answers; the limit is the setting or the longest answer seen."""
    rows = [row for row in window(history) if row.get("rollout/len_mean")]
    limit = int(history.setting("rollout.sampling.max_new_tokens", 0))
    if rows:
        mean, longest = fmean(row["rollout/len_mean"] for row in rows), fmean(row["rollout/len_max"] for row in rows)
        return mean, _sigma(longest / mean, m.batch * m.group), max(limit, math.ceil(longest))
    means = [each.tokens / each.samples for each in history.rollouts.values() if each.samples and each.tokens]
    if len(means) < m.batch:
        raise NotMeasured("neither the metrics nor the ledger have lengths of answers")
    assumed.append("all answers of a rollout are taken to be equally long; the metrics have no lengths")
    return fmean(means), pstdev([math.log(each) for each in means]), max(limit, math.ceil(max(means)))


def _sigma(ratio: float, count: int) -> float:
    """Return σ of the log-normal whose longest of `count` draws is `ratio` times the mean, or the nearest possible.

    The longest is about exp(μ + σ z) with z = Φ⁻¹(1 - 1/count), and the mean exp(μ + σ²/2).
    """
    z = NormalDist().inv_cdf(1 - 1 / max(2, count))
    inside = z * z - 2 * math.log(max(1.0, ratio))
    return z - math.sqrt(inside) if inside > 0 else z


def show_plan(history: History, devices: int, as_json: bool) -> int:
    """Print the plan; returns the exit code."""
    try:
        if (measured := measure(history)) is None:
            raise NotMeasured("the run has too few steps; let it train some more")
        run = measured_run(history, measured)
        found = plan(run, devices)
    except ValueError as error:
        return refuse(error)
    if as_json:
        print(json.dumps(_as_json(history, run, found) | {"no_cores": _lacked_cores(measured)}))
    else:
        console = Console(highlight=False)
        _show(history, found, console)
        if _lacked_cores(measured):
            console.print(NO_CORES, style="yellow")
    return EXIT_OK


def _lacked_cores(measured: Measured) -> bool:
    return any((server.no_core or 0.0) > STARVED for server in measured.all_servers)


def settings_of(best: Candidate, workers: int) -> str:
    """Return the candidate as settings of an experiment."""
    slots = -(-best.slots // max(1, workers))
    return (
        f"trainer.parallel={best.layout} generation.servers={best.servers} max_head_offpolicyness={best.eta} "
        f"rollout.max_concurrent={slots}"
    )


def _as_json(history: History, run: MeasuredRun, found: Plan) -> dict[str, object]:
    return {
        "run": str(history.folder),
        "devices": found.devices,
        "measured_step_s": found.measured_step_s,
        "own": dataclasses.asdict(found.own),
        "off": found.off,
        "best": dataclasses.asdict(found.best),
        "settings": settings_of(found.best, run.workers),
        "candidates": [dataclasses.asdict(each) for each in found.candidates],
        "rates": dataclasses.asdict(run.rates),
        "assumed": list(found.assumed),
    }


def _show(history: History, found: Plan, console: Console) -> None:
    best = found.best
    console.print(Text(f"{history.name}: a plan for {found.devices} devices", style="bold"))
    console.print(
        f"\nFastest: {best.training} train, {best.generation} generate, η = {best.eta}: {best.step_s:.2f} s a step."
    )
    console.print(f"  → {settings_of(best, int(history.setting('rollout.workers', 1)))}", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("train", "generate", "η", "at once", "s a step", "training waits", "servers idle", "mean age"):
        table.add_column(name, justify="right")
    shown = list(found.candidates[:SHOWN])
    for each in shown:
        table.add_row(*_cells(each), style="bold" if each is best else "")
    table.add_section()
    table.add_row(*_cells(found.own), style="dim")
    console.print()
    console.print(table)
    if len(found.candidates) > SHOWN:
        console.print(f"and {len(found.candidates) - SHOWN} slower ones")
    took = f"The last row is the run as it was: it took {found.measured_step_s:.2f} s a step"
    console.print(f"\n{took}, so the prediction is {found.off:+.0%} off.")
    if abs(found.off) > FAR_OFF:
        console.print("That is far off: take the order of the rows, not their figures.", style="yellow")
    for line in found.assumed:
        console.print(Text(f"assumed: {line}", style="dim"))


def _cells(each: Candidate) -> tuple[str, ...]:
    return (
        str(each.training),
        str(each.generation),
        str(each.eta),
        str(each.slots),
        f"{each.step_s:.2f}",
        f"{each.wait:.0%}",
        f"{each.idle:.0%}",
        f"{each.staleness:.1f}",
    )
