"""The runs that the tables of docs/scale.md are made of.

Long-tailed answers: log-normal, median 5,000 tokens, σ = 1, at most 32,768 (mean about 7,650; 3 in 100 reach the
limit), 16 to a prompt, one prompt in a step for each device. The synchronous baseline generates on all devices and then
trains on all of them; each row of it has another number of devices to a server, and the best one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.manager.settings import UpdateMode
from asyncrl.master.settings import OnStale
from asyncrl.rollout.settings import Pacing
from simulator.agents import Turns
from simulator.devices import H100, QWEN_7B, QWEN_32B, Model, engine_model, switch_s, trainer_model
from simulator.faults import Faults
from simulator.lengths import LogNormal
from simulator.run import Setup

LONG = LogNormal(median=5_000, sigma=1.0, limit=32_768)
SHORT_TURNS = LogNormal(median=600, sigma=0.8, limit=8_192)
ETAS = (0, 1, 2, 4, 8)
SYNC = "synchronous"
GRAIN = 512
SWITCHED_UPDATE_S = 1.0
"""Colocated, the weights are on the device already."""


@dataclass(frozen=True)
class Cell:
    """A row of a table. `baseline` ones are what the others' speed-up is against: the fastest of them."""

    table: str
    label: str
    setup: Setup
    baseline: bool = False


def _steps(eta: int, quick: bool) -> dict[str, int]:
    """In the first steps short answers are trained that came first: those that are measured come after the longest."""
    if quick:
        return {"steps": 3, "warm_up": 1}
    return {"steps": eta + 14, "warm_up": eta + 4} if eta else {"steps": 4, "warm_up": 1}


def synchronous(devices: int, tensor: int, *, model: Model = QWEN_7B, quick: bool = False, **more: Any) -> Setup:
    """All devices generate, then all train."""
    trainer = replace(trainer_model(model, H100, devices), switch_s=switch_s(model, H100, 8))
    setup = Setup(
        name=f"{devices} devices, synchronous, {tensor} to a server",
        servers=devices // tensor,
        engine=replace(engine_model(model, H100, tensor), update_s=SWITCHED_UPDATE_S),
        trainer=trainer,
        devices=(devices, devices),
        lengths=LONG,
        eta=0,
        batch=devices,
        group=16,
        max_new_tokens=LONG.limit,
        grain=GRAIN,
        colocated=True,
        **_steps(0, quick),
    )
    return replace(setup, **more)


def asynchronous(
    devices: int, generation: int, tensor: int, eta: int, *, model: Model = QWEN_7B, quick: bool = False, **more: Any
) -> Setup:
    """`generation` of the devices generate, the others train."""
    setup = Setup(
        name=f"{devices} devices, {generation} generate, {tensor} to a server, η = {eta}",
        servers=generation // tensor,
        engine=engine_model(model, H100, tensor),
        trainer=trainer_model(model, H100, devices - generation),
        devices=(generation, devices - generation),
        lengths=LONG,
        eta=eta,
        batch=devices,
        group=16,
        max_new_tokens=LONG.limit,
        grain=GRAIN,
        **_steps(eta, quick),
    )
    return replace(setup, **more)


def _generating(devices: int) -> int:
    """The share of the devices with which neither side waits much."""
    return 11 * devices // 16


def _label(setup: Setup) -> str:
    generation, training = setup.devices
    tensor = generation // setup.servers
    return f"{generation} + {training}, {tensor} to a server, η = {setup.eta}"


def _baselines(table: str, devices: int, tensors: Sequence[int], **more: Any) -> list[Cell]:
    return [
        Cell(table, f"{SYNC}, {tensor} to a server", synchronous(devices, tensor, **more), baseline=True)
        for tensor in tensors
    ]


def _splits(quick: bool) -> list[Cell]:
    table = "64 devices: splits"
    cells = _baselines(table, 64, (8,), quick=quick)
    for generation, tensor in ((36, 4), (40, 4), (44, 1), (44, 2), (44, 4), (48, 4), (52, 4)):
        setup = asynchronous(64, generation, tensor, 8, quick=quick, update_mode=UpdateMode.in_place)
        cells.append(Cell(table, _label(setup), setup))
    return cells


def _etas(devices: int, etas: Sequence[int], tensors: Sequence[int], quick: bool) -> list[Cell]:
    table = f"{devices} devices: η"
    cells = _baselines(table, devices, tensors, quick=quick)
    for eta in etas:
        setup = asynchronous(devices, _generating(devices), 4, eta, quick=quick, update_mode=UpdateMode.in_place)
        cells.append(Cell(table, _label(setup), setup))
    return cells


def _in_flight(quick: bool) -> list[Cell]:
    table = "64 devices, η = 8: rollouts in flight"
    cells = _baselines(table, 64, (8,), quick=quick)
    base = asynchronous(64, _generating(64), 4, 8, quick=quick, update_mode=UpdateMode.in_place)
    for batches in (2, 3, 4, 6):
        cells.append(Cell(table, f"{batches} batches", replace(base, in_flight=batches * 64)))
    return [*cells, Cell(table, "9 batches, all that η allows", base)]


def _best(devices: int, quick: bool) -> list[Cell]:
    """The fastest found at 64 devices."""
    table = f"{devices} devices: the best found"
    baseline = synchronous(devices, 8, quick=quick)
    more = {"update_mode": UpdateMode.in_place, "in_flight": 3 * devices}
    setup = asynchronous(devices, _generating(devices), 4, 8, quick=quick, **more)
    cells = [Cell(table, f"{SYNC}, 8 to a server", baseline, baseline=True)]
    return [*cells, Cell(table, f"{_label(setup)}, 3 batches in flight", setup)]


def _updates(quick: bool) -> list[Cell]:
    table = "64 devices: how weights arrive, and when rollouts start"
    base = asynchronous(64, 44, 4, 4, quick=quick)
    named: dict[str, dict[str, Any]] = {
        "interrupt": {},
        "retract": {"update_mode": UpdateMode.retract},
        "in_place": {"update_mode": UpdateMode.in_place},
        "finish": {"update_mode": UpdateMode.finish},
        "interrupt, a quarter at a time": {"update_fraction": 0.25},
        "interrupt, deadline pacing": {"pacing": Pacing.deadline},
        "in_place, on_stale=wait": {"update_mode": UpdateMode.in_place, "on_stale": OnStale.wait},
    }
    return [Cell(table, label, replace(base, **changes)) for label, changes in named.items()]


def _faults(quick: bool) -> list[Cell]:
    table = "64 devices: faults"
    base = asynchronous(64, 44, 4, 4, quick=quick, update_mode=UpdateMode.in_place, health_interval_s=2.0)
    named = {
        "none": Faults(),
        "a tenth of the servers twice as slow": Faults(slow_share=0.1, slow_factor=2.0),
        "each server dies once in 30 min, back after 90 s": Faults(death_every_s=1800.0),
        "each server silent for 60 s once in 30 min": Faults(silence_every_s=1800.0, silence_s=60.0),
        "half of the servers taken away for 10 min": Faults(
            preempted_share=0.5, preempted_at_s=1_200.0, preempted_for_s=600.0
        ),
    }
    return [Cell(table, label, replace(base, faults=faults)) for label, faults in named.items()]


def _agents(quick: bool) -> list[Cell]:
    table = "64 devices: agents, 2 to 8 turns, tools that take seconds"
    turns = Turns(least=2, most=8, tool_median_s=3.0, tool_sigma=1.2, tool_limit_s=120.0, tool_tokens=4)
    changes: dict[str, Any] = {
        "turns": turns,
        "lengths": SHORT_TURNS,
        "max_new_tokens": SHORT_TURNS.limit,
        "group": 8,
        "grain": 64,
    }
    cells = [
        Cell(table, f"{SYNC}, {tensor} to a server", synchronous(64, tensor, quick=quick, **changes), baseline=True)
        for tensor in (1, 4)
    ]
    for eta, routing in ((1, "least_requests"), (4, "least_requests"), (4, "prefix_affine")):
        setup = asynchronous(64, 48, 2, eta, quick=quick, routing=routing, **changes)
        cells.append(Cell(table, f"{_label(setup)}, {routing}", setup))
    return cells


def _large(quick: bool) -> list[Cell]:
    table = "128 devices, a model of 32B"
    cells = _baselines(table, 128, (4, 8), quick=quick, model=QWEN_32B)
    setup = asynchronous(128, 80, 4, 4, quick=quick, model=QWEN_32B)
    return [*cells, Cell(table, _label(setup), setup)]


TABLES = {
    "splits": _splits,
    "eta64": lambda quick: _etas(64, ETAS[1:], (1, 2, 4, 8), quick),
    "updates": _updates,
    "faults": _faults,
    "agents": _agents,
    "inflight": _in_flight,
    "eta512": lambda quick: _etas(512, (1, 4, 8), (8,), quick),
    "best64": lambda quick: _best(64, quick),
    "best512": lambda quick: _best(512, quick),
    "best1024": lambda quick: _best(1024, quick),
    "large": _large,
}
