"""The runs that the tables of `benchmarks/simulate.py` are made of.

Long-tailed answers: log-normal, median 5,000 tokens, σ = 1, at most 32,768 (mean about 7,650; 3 in 100 reach the
limit), 16 to a prompt, one prompt in a step for each device. The synchronous baseline generates on all devices and then
trains on all of them; each row of it has another number of devices to a server, and the best one counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.manager.settings import UpdateMode
from asyncrl.master.settings import OnStale
from asyncrl.rollout.settings import Pacing
from simulator.devices import (
    H100,
    QWEN_1B,
    QWEN_7B,
    QWEN_32B,
    REFERENCE_OPERATIONS,
    TRAIN_OPERATIONS,
    Device,
    Model,
    engine_model,
    switch_s,
    trainer_model,
)
from simulator.setup import Faults, LogNormal, Setup, Turns

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


Table = Callable[[bool], list[Cell]]
"""The rows of one or more tables; with True in few steps."""


def _steps(eta: int, quick: bool) -> dict[str, Any]:
    """In the first steps short answers are trained that came first: those that are measured come after the longest."""
    if quick:
        return {"steps": 3, "warm_up": 1}
    return {"steps": eta + 14, "warm_up": eta + 4} if eta else {"steps": 4, "warm_up": 1}


def synchronous(
    devices: int,
    tensor: int,
    *,
    model: Model = QWEN_7B,
    device: Device = H100,
    free_updates: bool = False,
    quick: bool = False,
    **more: Any,
) -> Setup:
    """All devices generate, then all train. `free_updates`: changing between the two takes no time."""
    moving_s = 0.0 if free_updates else switch_s(model, 8)
    trainer = replace(trainer_model(model, device, devices), switch_s=moving_s)
    setup = Setup(
        name=f"{devices} devices, synchronous, {tensor} to a server",
        servers=devices // tensor,
        engine=replace(engine_model(model, device, tensor), update_s=0.0 if free_updates else SWITCHED_UPDATE_S),
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
    devices: int,
    generation: int,
    tensor: int,
    eta: int,
    *,
    model: Model = QWEN_7B,
    device: Device = H100,
    free_updates: bool = False,
    quick: bool = False,
    **more: Any,
) -> Setup:
    """`generation` of the devices generate, the others train. `free_updates`: new weights arrive in no time."""
    engine = engine_model(model, device, tensor)
    setup = Setup(
        name=f"{devices} devices, {generation} generate, {tensor} to a server, η = {eta}",
        servers=generation // tensor,
        engine=replace(engine, update_s=0.0) if free_updates else engine,
        trainer=trainer_model(model, device, devices - generation),
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


def in_flight(batches: int, devices: int) -> dict[str, Any]:
    """Return the recommended setup beside its split: this many batches of rollouts in flight, updates in place."""
    return {"in_flight": batches * devices, "update_mode": UpdateMode.in_place}


def _baselines(table: str, devices: int, tensors: Sequence[int], **more: Any) -> list[Cell]:
    return [
        Cell(table, f"{SYNC}, {tensor} to a server", synchronous(devices, tensor, **more), baseline=True)
        for tensor in tensors
    ]


def _row(
    table: str,
    devices: int,
    eta: int = 8,
    *,
    label: str = "",
    sixteenths: int = 11,
    tensor: int = 4,
    batches: int = 3,
    **more: Any,
) -> Cell:
    """An asynchronous run: `sixteenths` of the devices generate (with 11 neither side waits much), at most `batches` in
    flight, and fewer where η admits fewer.
    """
    flying = in_flight(min(batches, eta + 1), devices)
    setup = asynchronous(devices, sixteenths * devices // 16, tensor, eta, **(flying | more))
    generation, training = setup.devices
    return Cell(table, label or f"{generation} + {training}, {tensor} to a server, η = {eta}", setup)


def _splits(devices: int, sixteenths: Sequence[int], tensors: Sequence[int], sizes: Sequence[int] = ()) -> Table:
    """The baseline by size of server (`tensors`), then splits with 4 devices to a server, then other `sizes`."""

    def cells(quick: bool) -> list[Cell]:
        table = f"{devices} devices: splits"
        splits = [*((share, 4) for share in sixteenths), *((11, size) for size in sizes)]
        found = [_row(table, devices, sixteenths=share, tensor=tensor, quick=quick) for share, tensor in splits]
        return _baselines(table, devices, tensors, quick=quick) + found

    return cells


def _etas(devices: int, quick: bool) -> list[Cell]:
    table = f"{devices} devices: η"
    return _baselines(table, devices, (8,), quick=quick) + [_row(table, devices, eta, quick=quick) for eta in ETAS]


def _beyond(devices: int, quick: bool) -> list[Cell]:
    """Return the cells on answers that take longer than η steps."""
    table = f"{devices} devices: beyond η"
    return _baselines(table, devices, (8,), quick=quick) + [
        _row(table, devices, eta, label=f"η = {eta}, {on_stale}", on_stale=on_stale, quick=quick)
        for eta in (1, 2, 4, 8)
        for on_stale in OnStale
    ]


def _in_flight(quick: bool) -> list[Cell]:
    table = "64 devices: rollouts in flight"
    cells = _baselines(table, 64, (8,), quick=quick)
    for eta, batches in ((2, 3), (4, 3), (4, 5), (8, 2), (8, 3), (8, 4), (8, 6), (8, 9)):
        every = ", all that η allows" if batches == eta + 1 else ""
        cells.append(_row(table, 64, eta, label=f"η = {eta}, {batches} batches{every}", batches=batches, quick=quick))
    return cells


def _updates(quick: bool) -> list[Cell]:
    table = "64 devices, η = 4, 3 batches in flight: how weights arrive, and when rollouts start"
    base = asynchronous(64, 44, 4, 4, quick=quick, in_flight=3 * 64)
    named: dict[str, dict[str, Any]] = {
        "interrupt": {},
        "retract": {"update_mode": UpdateMode.retract},
        "in_place": {"update_mode": UpdateMode.in_place},
        "finish": {"update_mode": UpdateMode.finish},
        "interrupt, a quarter at a time": {"update_fraction": 0.25},
        "interrupt, deadline pacing": {"pacing": Pacing.deadline},
    }
    return [Cell(table, label, replace(base, **changes)) for label, changes in named.items()]


def _faults(devices: int, quick: bool) -> list[Cell]:
    table = f"{devices} devices: faults"
    named = {
        "none": Faults(),
        "a tenth of the servers twice as slow": Faults(slow_share=0.1, slow_factor=2.0),
        "each server dies once in 30 min, back after 90 s": Faults(death_every_s=1800.0),
        "each server silent for 60 s once in 30 min": Faults(silence_every_s=1800.0, silence_s=60.0),
        "half of the servers taken away for 10 min": Faults(
            preempted_share=0.5, preempted_at_s=1_200.0, preempted_for_s=600.0
        ),
    }
    return [
        _row(table, devices, label=label, faults=faults, health_interval_s=2.0, quick=quick)
        for label, faults in named.items()
    ]


def _agents(devices: int, tools_s: Sequence[float], quick: bool) -> list[Cell]:
    """Episodes of 2 to 8 turns; what a speed-up is against is the baseline with the same tools, so a table each."""
    cells = []
    for tool_s in tools_s:
        table = f"{devices} devices: agents, 2 to 8 turns, tools of {tool_s:g} s"
        changes: dict[str, Any] = {
            "turns": Turns(2, 8, tool_s, tool_sigma=1.2, tool_limit_s=40 * tool_s, tool_tokens=4),
            "lengths": SHORT_TURNS,
            "max_new_tokens": SHORT_TURNS.limit,
            "group": 8,
            "grain": 64,
            "quick": quick,
        }
        cells += _baselines(table, devices, (1, 4), **changes)
        cells += [_row(table, devices, eta, sixteenths=12, tensor=2, **changes) for eta in (1, 4)]
    return cells


def _large(devices: int, quick: bool) -> list[Cell]:
    table = f"{devices} devices, a model of 32B"
    cells = _baselines(table, devices, (4, 8), quick=quick, model=QWEN_32B)
    for share, batches in ((10, 2), (11, 2), (11, 3), (12, 2)):
        cell = _row(table, devices, sixteenths=share, tensor=8, batches=batches, quick=quick, model=QWEN_32B)
        cells.append(replace(cell, label=f"{cell.label}, {batches} batches"))
    return cells


def _assumptions(quick: bool) -> list[Cell]:
    """Each a table of two rows: what the speed-up is if an assumption is another."""
    changed: dict[str, dict[str, Any]] = {
        "as above": {},
        "an all-reduce in a quarter of the time": {"device": replace(H100, all_reduce_s=H100.all_reduce_s / 4)},
        "weights in no time, state moved in no time (both sides)": {"free_updates": True},
        "a shorter tail: σ = 0.5": {"lengths": replace(LONG, sigma=0.5)},
        "a longer one: σ = 1.5": {"lengths": replace(LONG, sigma=1.5)},
        "answers of a prompt not alike": {"lengths": replace(LONG, alike=0.0)},
        "half the limit: 16,384 tokens": {"lengths": replace(LONG, limit=16_384), "max_new_tokens": 16_384},
    }
    cells = []
    for name, changes in changed.items():
        table = f"64 devices: {name}"
        cells += _baselines(table, 64, (4, 8), quick=quick, **changes)
        cells.append(_row(table, 64, quick=quick, **changes))
    return cells


def _prompts(devices: int, quick: bool) -> list[Cell]:
    """More prompts per device to a step: a synchronous run then waits less for its longest answers."""
    cells = []
    for share in (1, 2, 4):
        table = f"{devices} devices, {share} prompt{'s' * (share > 1)} a device"
        more: dict[str, Any] = {"batch": share * devices, "quick": quick}
        cells += _baselines(table, devices, (4, 8), **more)
        more |= in_flight(3 * share, devices)
        for sixteenths, tensor in ((9, 4), (10, 4), (11, 4), (10, 2)):
            cells.append(_row(table, devices, sixteenths=sixteenths, tensor=tensor, **more))
    return cells


def _ahead(devices: int, quick: bool) -> list[Cell]:
    """A frozen reference's log-probabilities in the step, or as rollouts arrive while the trainer waits for data."""
    share = REFERENCE_OPERATIONS / (TRAIN_OPERATIONS + REFERENCE_OPERATIONS)
    cells = []
    for eta, sixteenths in itertools.product((1, 4), (9, 10, 11, 12)):
        for name, ahead in (("in the step", 0.0), ("as rollouts arrive", share)):
            table = f"{devices} devices, a reference, η = {eta}: {sixteenths * devices // 16} generate"
            cell = _row(table, devices, eta, label=f"reference {name}", sixteenths=sixteenths, quick=quick)
            trainer = cell.setup.trainer
            trainer = replace(trainer, token_s=trainer.token_s / (1 - share), ahead_share=ahead)
            cells.append(replace(cell, setup=replace(cell.setup, trainer=trainer), baseline=not ahead))
    return cells


def _guests(quick: bool) -> list[Cell]:
    """Few devices, whose servers are apart from the trainer, share all of its devices, or are lent them."""
    table, cells = "few devices: guests", []

    def add(label: str, devices: int, alone: int, training: int, eta: int, guests: int, model: Model) -> None:
        engine = replace(engine_model(model, H100, 1), switch_s=switch_s(model, training) / 2)
        setup = Setup(
            name=f"{devices} devices, {model.name}, {alone} + {training}, {guests} guests, η = {eta}",
            servers=alone + guests,
            engine=engine,
            trainer=trainer_model(model, H100, training),
            devices=(alone + guests, training),
            lengths=LONG,
            eta=eta,
            batch=16,
            group=16,
            max_new_tokens=LONG.limit,
            guests=guests,
            on_stale=OnStale.wait,
            grain=GRAIN,
            **_steps(eta, quick),
        )
        cells.append(Cell(table, f"{model.name}, {devices} devices: {label}, η = {eta}", setup))

    for eta in (0, 1, 2):
        add("in turns", 1, 0, 1, eta, 1, QWEN_1B)
    for guests in (0, 1):
        add("1 + 1, lent" if guests else "1 + 1", 2, 1, 1, 2, guests, QWEN_1B)
    add("in turns", 2, 0, 2, 2, 2, QWEN_1B)
    for alone in (5, 6):
        for guests in (0, 8 - alone):
            add(f"{alone} + {8 - alone}{', lent' if guests else ''}", 8, alone, 8 - alone, 2, guests, QWEN_7B)
    add("in turns", 8, 0, 8, 2, 8, QWEN_7B)
    return cells


TABLES: dict[str, Table] = {
    "guests": _guests,
    "splits64": _splits(64, (9, 10, 11, 12, 13), (1, 2, 4, 8), (1, 2)),
    "eta64": lambda quick: _etas(64, quick),
    "beyond64": lambda quick: _beyond(64, quick),
    "inflight": _in_flight,
    "prompts64": lambda quick: _prompts(64, quick),
    "ahead64": lambda quick: _ahead(64, quick),
    "assumptions": _assumptions,
    "updates": _updates,
    "faults64": lambda quick: _faults(64, quick),
    "agents64": lambda quick: _agents(64, (3.0, 30.0), quick),
    "large128": lambda quick: _large(128, quick),
    "splits512": _splits(512, (10, 11, 12), (1, 2, 4, 8)),
    "eta512": lambda quick: _etas(512, quick),
    "splits1024": _splits(1024, (10, 11, 12), (4, 8)),
}
