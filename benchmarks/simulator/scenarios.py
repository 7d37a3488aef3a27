"""The runs that the tables of `benchmarks/simulate.py` are made of.

Long-tailed answers: log-normal, median 5,000 tokens, σ = 1, at most 32,768 (mean about 7,650; 3 in 100 reach the
limit), 16 to a prompt, one prompt in a step for each device. The synchronous baseline generates on all devices and then
trains on all of them; each row of it has another number of devices to a server, and the best one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.manager.settings import UpdateMode
from asyncrl.master.settings import OnStale
from asyncrl.rollout.settings import Pacing
from simulator.devices import H100, QWEN_1B, QWEN_7B, Model, engine_model, switch_s, trainer_model
from simulator.setup import Faults, LogNormal, Setup

LONG = LogNormal(median=5_000, sigma=1.0, limit=32_768)
ANSWERS: dict[str, Any] = {"lengths": LONG, "group": 16, "max_new_tokens": LONG.limit, "grain": 512}
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
"""The rows of a table; with True in few steps."""


def _steps(eta: int, quick: bool) -> dict[str, Any]:
    """In the first steps short answers are trained that came first: those that are measured come after the longest."""
    if quick:
        return {"steps": 3, "warm_up": 1}
    return {"steps": eta + 14, "warm_up": eta + 4} if eta else {"steps": 4, "warm_up": 1}


def synchronous(devices: int, tensor: int, *, quick: bool = False, **more: Any) -> Setup:
    """All devices generate, then all train."""
    setup = Setup(
        servers=devices // tensor,
        engine=replace(engine_model(QWEN_7B, H100, tensor), update_s=SWITCHED_UPDATE_S),
        trainer=replace(trainer_model(QWEN_7B, H100, devices), switch_s=switch_s(QWEN_7B, 8)),
        devices=(devices, devices),
        eta=0,
        batch=devices,
        colocated=True,
        **ANSWERS,
        **_steps(0, quick),
    )
    return replace(setup, **more)


def asynchronous(devices: int, generation: int, tensor: int, eta: int, *, quick: bool = False, **more: Any) -> Setup:
    """`generation` of the devices generate, the others train."""
    setup = Setup(
        servers=generation // tensor,
        engine=engine_model(QWEN_7B, H100, tensor),
        trainer=trainer_model(QWEN_7B, H100, devices - generation),
        devices=(generation, devices - generation),
        eta=eta,
        batch=devices,
        **ANSWERS,
        **_steps(eta, quick),
    )
    return replace(setup, **more)


def _baselines(table: str, devices: int, tensors: Sequence[int], **more: Any) -> list[Cell]:
    return [
        Cell(table, f"synchronous, {tensor} to a server", synchronous(devices, tensor, **more), baseline=True)
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
    flying: dict[str, Any] = {"in_flight": min(batches, eta + 1) * devices, "update_mode": UpdateMode.in_place}
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
    return _baselines(table, devices, (8,), quick=quick) + [
        _row(table, devices, eta, quick=quick) for eta in (0, 1, 2, 4, 8)
    ]


def _beyond(devices: int, quick: bool) -> list[Cell]:
    """Return the cells on answers that take longer than η steps."""
    table = f"{devices} devices: beyond η"
    return _baselines(table, devices, (8,), quick=quick) + [
        _row(table, devices, eta, label=f"η = {eta}, {on_stale}", on_stale=on_stale, quick=quick)
        for eta in (1, 2, 4, 8)
        for on_stale in OnStale
    ]


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
        "each server dies once in 30 min, back after 90 s": Faults(death_every_s=1800.0),
        "each server silent for 60 s once in 30 min": Faults(silence_every_s=1800.0, silence_s=60.0),
    }
    return [
        _row(table, devices, label=label, faults=faults, health_interval_s=2.0, quick=quick)
        for label, faults in named.items()
    ]


def _few_devices(quick: bool) -> list[Cell]:
    """Few devices, whose servers are apart from the trainer, share all of its devices, or take turns on some."""
    table, cells = "few devices: colocated servers", []

    def add(
        label: str, devices: int, alone: int, training: int, eta: int, colocated_servers: int, model: Model
    ) -> None:
        engine = replace(engine_model(model, H100, 1), switch_s=switch_s(model, training) / 2)
        setup = Setup(
            servers=alone + colocated_servers,
            engine=engine,
            trainer=trainer_model(model, H100, training),
            devices=(alone + colocated_servers, training),
            eta=eta,
            batch=16,
            colocated_servers=colocated_servers,
            on_stale=OnStale.wait,
            **ANSWERS,
            **_steps(eta, quick),
        )
        cells.append(Cell(table, f"{model.name}, {devices} devices: {label}, η = {eta}", setup))

    for eta in (0, 1, 2):
        add("in turns", 1, 0, 1, eta, 1, QWEN_1B)
    for colocated_servers in (0, 1):
        add("1 + 1, partly colocated" if colocated_servers else "1 + 1", 2, 1, 1, 2, colocated_servers, QWEN_1B)
    add("in turns", 2, 0, 2, 2, 2, QWEN_1B)
    for alone in (5, 6):
        for colocated_servers in (0, 8 - alone):
            add(
                f"{alone} + {8 - alone}{', partly colocated' if colocated_servers else ''}",
                8,
                alone,
                8 - alone,
                2,
                colocated_servers,
                QWEN_7B,
            )
    add("in turns", 8, 0, 8, 2, 8, QWEN_7B)
    return cells


TABLES: dict[str, Table] = {
    "colocated": _few_devices,
    "splits64": _splits(64, (9, 10, 11, 12, 13), (1, 2, 4, 8), (1, 2)),
    "eta64": lambda quick: _etas(64, quick),
    "beyond64": lambda quick: _beyond(64, quick),
    "updates": _updates,
    "faults64": lambda quick: _faults(64, quick),
    "splits512": _splits(512, (10, 11, 12), (1, 2, 4, 8)),
    "eta512": lambda quick: _etas(512, quick),
    "splits1024": _splits(1024, (10, 11, 12), (4, 8)),
}
