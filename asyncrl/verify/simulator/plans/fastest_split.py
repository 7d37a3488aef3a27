"""The search for a run's fastest split of a number of devices between training and generation, and its fastest η.

Each candidate is simulated with the run's own rates (`measured_run`). The run as it was is simulated too. Its
difference from the measured time shows the accuracy of the other predictions. A server keeps its number of devices, and
the training ranks keep their tensor and pipeline axes, so only the numbers of servers and of data-parallel ranks
change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from asyncrl.trainer.parallel.layout import Layout
from asyncrl.verify.simulator.clock import Deadlock
from asyncrl.verify.simulator.plans.measured_run import MeasuredRun, steps_of
from asyncrl.verify.simulator.setup import Outcome, Setup
from asyncrl.verify.simulator.simulation import Stalled, simulate

ETAS = (0, 1, 2, 4, 8)
MOST_SPLITS = 9
WORTH = 1.1
"""A larger η must make a step faster by this factor to be worth the older tokens."""
ASSUMED = (
    "train time beyond its fixed part falls with the number of data-parallel ranks; publishing and checkpoints do not",
    "servers are alike, and each has as many cores or GPUs as those that were measured",
    "answers stay as long as they were, and user code as fast",
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A simulated way to divide the devices.

    Attributes:
        layout: `trainer.parallel`.
        servers: `generation.servers`.
        places: number of rollouts at a time over all RolloutWorkers.
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
    places: int
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


def plan(run: MeasuredRun, devices: int, progress: Callable[[int, int], None] = lambda done, total: None) -> Plan:
    """Simulate the candidates for `devices`.

    Args:
        progress: called with the number of finished simulations and of all.

    Raises:
        ValueError: there are too few devices for one server and one copy of the trained model.
    """
    splits = list(_splits(run, devices))
    if not splits:
        least = run.server_devices + run.layout.copy
        raise ValueError(f"--plan {devices}: a server and a copy of the trained model take {least} devices")
    eta = max(run.setup.eta, 1)
    etas = [each for each in sorted({*ETAS, run.setup.eta}) if each != eta]
    total, done = 1 + len(splits) + len(etas), 0

    def simulated(setup: Setup, layout: Layout) -> Candidate | None:
        nonlocal done
        progress(done, total)
        done += 1
        try:
            return _candidate(setup, layout, simulate(setup))
        except (Stalled, Deadlock):  # the run would stand still with this split
            return None

    own = simulated(run.setup, run.layout)
    if own is None:
        raise ValueError("the run as it was stands still in the simulation: its files give no usable rates")
    found = [
        each for layout, servers in splits if (each := simulated(_setup(run, layout, servers, eta), layout)) is not None
    ]
    if not found:
        raise ValueError(f"--plan {devices}: the run stands still in the simulation on every split")
    fastest = min(found, key=lambda each: each.step_s)
    layout = Layout.parse(fastest.layout)
    found += [
        each for other in etas if (each := simulated(_setup(run, layout, fastest.servers, other), layout)) is not None
    ]
    progress(total, total)
    found.sort(key=lambda each: each.step_s)
    best = min(
        (each for each in found if each.step_s <= WORTH * found[0].step_s), key=lambda each: (each.eta, each.step_s)
    )
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


def _setup(run: MeasuredRun, layout: Layout, servers: int, eta: int) -> Setup:
    """Return the run with other devices, and with as many rollouts at a time as η admits and the servers can decode."""
    own = run.setup
    room = -(-servers * own.engine.max_running // own.group)
    faster = layout.data / run.layout.data
    return replace(
        own,
        servers=servers,
        devices=(servers * run.server_devices, layout.ranks),
        trainer=replace(own.trainer, token_s=own.trainer.token_s / faster),
        eta=eta,
        in_flight=max(1, min((eta + 1) * own.batch, room)),
        **steps_of(eta),
    )


def _candidate(setup: Setup, layout: Layout, outcome: Outcome) -> Candidate:
    return Candidate(
        layout=str(layout),
        training=layout.ranks,
        generation=setup.devices[0],
        servers=setup.servers,
        eta=setup.eta,
        places=setup.in_flight or setup.batch * (setup.eta + 1),
        step_s=outcome.step_s,
        wait=outcome.wait_s / outcome.step_s,
        idle=outcome.generation_idle,
        staleness=outcome.staleness_mean,
    )
