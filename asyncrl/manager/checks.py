"""Checks of the GserverManager's settings."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.settings import backends_that
from asyncrl.weights.transports.base import weight_transport


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    transport, generation = weight_transport(config.manager.weight_transport), config.generation
    if transport.name not in (taken := generation.engine.weight_transports):
        takers = backends_that(lambda kind: transport.name in kind.weight_transports)
        yield (
            f"manager.weight_transport={transport.name!r}: generation.backend={generation.backend!r} takes "
            f"weights from {' or '.join(taken)} only; use weight_transport={' or '.join(taken)}, or backend={takers}"
        )
    yield from transport.check(config)
    system = config.system
    if system.silence_s >= system.stall_timeout_s:
        yield (
            f"system.lease_s={system.lease_s:g}: a new GserverManager waits {system.silence_s:g} s for silent workers, "
            f"but the run ends after system.stall_timeout_s={system.stall_timeout_s:g} without a sign of life; use a "
            f"shorter lease"
        )
