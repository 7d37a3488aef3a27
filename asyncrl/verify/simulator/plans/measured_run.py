"""The rates of a real run, read from its files, as the setup of a simulation.

Sources, all over the doctor's window of newest steps:

    engine     lines of the generation servers in `observed/`: n running samples get n / t(n) tokens a second, so a
               decode step takes t(n) = step_s + sequence_s · n. Both are a least-squares fit; prefilling is inside.
    trainer    rows of `metrics.jsonl`: `time/train_s` = fixed_s + token_s · (tokens of the batch)
    answers    a log-normal with the mean and the maximum of `rollout/len_*`, or with the ledger's tokens per rollout
    rest       seconds of a rollout outside of generation; publishing, checkpoints and evaluations of a step; seconds
               of the servers' weight updates

A figure that the files do not determine is replaced by a conservative value, which `MeasuredRun.assumed` lists.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median, pstdev
from typing import Any

import numpy as np

from asyncrl.manager.settings import UpdateMode
from asyncrl.master.settings import OnStale
from asyncrl.observe.doctor.measured import Measured, window
from asyncrl.observe.history import History, Process
from asyncrl.rollout.settings import Pacing
from asyncrl.trainer.parallel.layout import Layout
from asyncrl.verify.simulator.servers.engine_model import EngineModel
from asyncrl.verify.simulator.servers.lengths import LogNormal
from asyncrl.verify.simulator.setup import Setup
from asyncrl.verify.simulator.trainer import TrainerModel

FEWEST_LOADS = 4
"""Least number of readings of the servers that determines their speed."""
LEAST_SPREAD = 1.3
"""With a smaller ratio of the greatest to the smallest load a fit cannot separate `step_s` and `sequence_s`."""
UNITS = 48
"""Simulated tokens of a mean answer; real tokens are grouped into these units."""
SIMULATED_STEPS = 10
ENDLESS_KV = 1e12


class NotMeasured(ValueError):
    """The run's files lack a figure that the plan needs; the message names it."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run's rates.

    Attributes:
        setup: simulates the run as it was.
        step_s: measured seconds of a step.
        layout: layout of the training ranks.
        server_devices: number of devices of one generation server.
        assumed: the figures missing from the files, and the values used instead; one sentence each.
    """

    setup: Setup
    step_s: float
    layout: Layout
    server_devices: int
    assumed: tuple[str, ...]


def measured_run(history: History, measured: Measured) -> MeasuredRun:
    """Return the rates of the run in `history`, whose means are `measured`.

    Raises:
        NotMeasured: there are too few readings of the servers, or no lengths of answers.
    """
    if measured.takes_turns or measured.policy_servers:
        setting = "generation.guests" if measured.takes_turns else "policies"
        raise NotMeasured(f"the run has {setting}, which the simulation does not support; use a run without it")
    assumed: list[str] = []
    settings = history.ledger.settings
    if settings is None:
        raise NotMeasured("the ledger has no beginning of a launch: the run's settings are not known")
    begin, end = _seconds(history, measured)
    servers = [each for each in history.processes.values() if each.kind == "generation_server"]
    if not servers:
        raise NotMeasured("observed/ has no lines of generation servers: their speed is not known")
    lengths = _lengths(history, measured, assumed)
    mean = lengths.median * math.exp(lengths.sigma**2 / 2)
    prompt_tokens = _prompt_tokens(history, measured)
    layout = Layout.parse(str(history.setting("trainer.parallel", "d1")))
    server_devices = _server_devices(history)
    setup = Setup(
        name=history.name,
        servers=len(servers),
        engine=_engine(history, measured, servers, begin, end, assumed),
        trainer=_trainer(history, measured, mean, prompt_tokens, assumed),
        devices=(len(servers) * server_devices, layout.ranks),
        lengths=lengths,
        eta=measured.eta,
        batch=measured.batch,
        group=measured.group,
        max_new_tokens=lengths.limit,
        prompt_tokens=prompt_tokens,
        grain=max(1, round(mean / UNITS)),
        user_s=max(0.0, measured.rollout_s - measured.calls.get("generation", 0.0)),
        workers=int(history.setting("rollout.workers", 1)),
        in_flight=measured.places or None,
        update_mode=UpdateMode(str(history.setting("manager.update_mode", UpdateMode.interrupt))),
        update_fraction=float(history.setting("manager.update_fraction", 1.0)),
        pacing=Pacing(str(history.setting("rollout.pacing", Pacing.eager))),
        on_stale=OnStale(settings.on_stale),
        **steps_of(measured.eta),
    )
    return MeasuredRun(setup, measured.step_s, layout, server_devices, tuple(assumed))


def steps_of(eta: int) -> dict[str, Any]:
    """Return the steps to simulate for `eta`. The first steps do not count, since they train the short answers."""
    return {"steps": eta + SIMULATED_STEPS, "warm_up": eta + 4}


def _seconds(history: History, measured: Measured) -> tuple[float, float]:
    """Return begin and end of the measured steps, in seconds since 1970. Loads also count the warm-up before."""
    first, last = (history.steps[step].at for step in measured.steps)
    return first - measured.step_s, last


def _server_devices(history: History) -> int:
    from asyncrl.config.experiment import ExperimentConfig

    generation = ExperimentConfig().generation
    generation.sglang.tensor_parallel = int(history.setting("generation.sglang.tensor_parallel", 1))
    generation.sglang.args = dict(history.setting("generation.sglang.args", {}))
    generation.backend = type(generation.backend)(str(history.setting("generation.backend", generation.backend)))
    return generation.engine.shape.gpus


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


def _engine(
    history: History, m: Measured, servers: Sequence[Process], begin: float, end: float, assumed: list[str]
) -> EngineModel:
    warm = begin - (end - begin)
    loads = [load for process in servers for load in _loads(process, warm, end)]
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
    most = max((each.max_running or 0.0 for each in m.servers), default=0.0) or 2 * high
    updates = [
        span["end"] - span["begin"]
        for process in history.processes.values()
        for span in process.spans
        if span["span"] == "update" and begin <= span["end"] <= end
    ]
    return EngineModel(
        step_s=step_s,
        sequence_s=sequence_s,
        context_s=0.0,
        prefill_s=0.0,
        prefill_token_s=0.0,
        max_running=max(1, int(most)),
        kv_tokens=ENDLESS_KV,
        update_s=fmean(updates) if updates else 0.0,
    )


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


def _trainer(history: History, m: Measured, mean: float, prompt_tokens: int, assumed: list[str]) -> TrainerModel:
    rows = [row for row in window(history) if row.get("tokens/batch")]
    train_s = m.parts["train"]
    tokens = m.batch * m.group * (mean + prompt_tokens)
    fixed_s, token_s = 0.0, train_s / tokens
    sizes = sorted(row["tokens/batch"] for row in rows)
    if len(sizes) >= 8 and sizes[-1] > LEAST_SPREAD * sizes[0]:
        fixed_s, _ = _line([row["tokens/batch"] for row in rows], [row["time/train_s"] for row in rows])
        fixed_s = min(fixed_s, train_s)
        token_s = (train_s - fixed_s) / tokens
    else:
        assumed.append("the batches were of about the same size, so all of training is taken to grow with their tokens")
    return TrainerModel(token_s=token_s, fixed_s=fixed_s, publish_s=max(0.0, m.trainer_s - train_s))


def _lengths(history: History, m: Measured, assumed: list[str]) -> LogNormal:
    """Return the lengths of answers; the limit is the setting or the longest answer seen."""
    rows = [row for row in window(history) if row.get("rollout/len_mean")]
    limit = int(history.setting("rollout.sampling.max_new_tokens", 0))
    if rows:
        mean, longest = fmean(row["rollout/len_mean"] for row in rows), fmean(row["rollout/len_max"] for row in rows)
        sigma = _sigma(longest / mean, m.batch * m.group)
        alike = 0.5
    else:
        means = [each.tokens / each.samples for each in history.rollouts.values() if each.samples and each.tokens]
        if len(means) < m.batch:
            raise NotMeasured("neither the metrics nor the ledger have lengths of answers")
        mean, longest, alike = fmean(means), max(means), 1.0
        sigma = pstdev([math.log(each) for each in means])
        assumed.append("all answers of a rollout are taken to be equally long; the metrics have no lengths")
    limit = max(limit, math.ceil(longest))
    return LogNormal(mean * math.exp(-(sigma**2) / 2), sigma, limit, alike)


def _sigma(ratio: float, count: int) -> float:
    """Return σ of the log-normal whose longest of `count` draws is `ratio` times the mean, or the nearest possible.

    The longest is about exp(μ + σ z) with z = Φ⁻¹(1 - 1/count), and the mean exp(μ + σ²/2).
    """
    z = NormalDist().inv_cdf(1 - 1 / max(2, count))
    inside = z * z - 2 * math.log(max(1.0, ratio))
    return z - math.sqrt(inside) if inside > 0 else z


def _prompt_tokens(history: History, m: Measured) -> int:
    found = [
        (row["tokens/batch"] - row["tokens/trained"]) / (m.batch * m.group)
        for row in window(history)
        if "tokens/batch" in row and "tokens/trained" in row
    ]
    return max(1, round(fmean(found))) if found else 1
