"""Checks of the settings that go together with servers on the training devices (`generation.colocated`)."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.settings import COLOCATE_ALL, colocated_servers
from asyncrl.manager.settings import UpdateMode


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting without colocated servers: `setting=value: what is wrong; what to do`."""
    try:
        colocated = colocated_servers(config.generation)
    except ValueError as error:
        yield str(error)
        return
    if not colocated:
        return
    setting = f"generation.colocated={config.generation.colocated!r}"
    if config.generation.engine.urls:
        yield (
            f"{setting}: {config.generation.engine.named('urls')} names servers that others started, and where they "
            "run is not known; leave the urls out, or use colocated=none"
        )
    if len(colocated) < config.generation.servers and config.system.hosts:
        yield f"{setting}: of servers on several hosts (system.hosts) all or none can be colocated; use {COLOCATE_ALL}"
    if config.samples.only or config.samples.replay:
        yield f"{setting}: samples.only and samples.replay have no trainer or no servers that take turns; use none"
    if config.manager.update_mode in (UpdateMode.in_place, UpdateMode.finish):
        yield (
            f"{setting}: colocated servers are interrupted before each step and lose their cache, which "
            f"manager.update_mode={str(config.manager.update_mode)!r} promises not to do; use interrupt or retract"
        )
    if config.manager.weight_transport != "disk":
        yield (
            f"{setting}: manager.weight_transport={config.manager.weight_transport!r} sends weights from the trainer's "
            "memory, which a colocated server needs by then; use disk"
        )
    if config.trainer.score_ahead:
        yield (
            f"{setting}: trainer.score_ahead=true computes on the devices while colocated servers generate there; use "
            "trainer.score_ahead=false"
        )
    if config.policies:
        yield f"{setting}: servers of `policies` do not sleep, and may be on the same devices; use colocated=none"
    if not config.system.shared_filesystem:
        yield (
            f"{setting}: versions that are brought to hosts are not kept for a server that sleeps; use "
            "system.shared_filesystem=true"
        )
