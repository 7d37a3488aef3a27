"""Checks of the settings of servers on the trainer's devices."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.settings import ALL_GUESTS, guests_of
from asyncrl.manager.settings import UpdateMode


def guest_problems(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting that guests exclude: `setting=value: what is wrong; what to do`."""
    try:
        guests = guests_of(config.generation)
    except ValueError as error:
        yield str(error)
        return
    if not guests:
        return
    setting = f"generation.guests={config.generation.guests!r}"
    if config.generation.engine.urls:
        yield (
            f"{setting}: {config.generation.engine.named('urls')} names servers that others started, and where they "
            "run is not known; leave the urls out, or use guests=none"
        )
    if len(guests) < config.generation.servers and config.system.hosts:
        yield f"{setting}: of servers on several hosts (system.hosts) only all can be guests; use {ALL_GUESTS}"
    if config.samples.only or config.samples.replay:
        yield f"{setting}: samples.only and samples.replay have no trainer or no servers to take turns; use guests=none"
    if config.manager.update_mode in (UpdateMode.in_place, UpdateMode.finish):
        yield (
            f"{setting}: guests are interrupted before each step and lose their cache, which "
            f"manager.update_mode={str(config.manager.update_mode)!r} promises not to do; use interrupt or retract"
        )
    if config.manager.weight_transport != "disk":
        yield (
            f"{setting}: manager.weight_transport={config.manager.weight_transport!r} sends weights from the trainer's "
            "memory, which a guest needs by then; use disk"
        )
    if config.trainer.score_ahead:
        yield (
            f"{setting}: trainer.score_ahead=true computes on the devices while guests generate there; use "
            "trainer.score_ahead=false"
        )
    if config.policies:
        yield f"{setting}: servers of `policies` do not rest, and may be on the same devices; use guests=none"
    if not config.system.shared_filesystem:
        yield (
            f"{setting}: versions that are brought to hosts are not kept for a server that rests; use "
            "system.shared_filesystem=true"
        )
