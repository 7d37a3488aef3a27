"""Checks of the GserverManager's settings."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.settings import GenerationBackend
from asyncrl.weights.transports.base import weight_transport


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    transport, backend = weight_transport(config.manager.weight_transport), config.generation.backend
    if transport.needs_sglang and backend != GenerationBackend.sglang:
        yield (
            f"manager.weight_transport={transport.name!r}: generation.backend={str(backend)!r} takes weights "
            "from disk only; use weight_transport=disk or backend=sglang"
        )
    yield from transport.check(config)
    lease_s, limit_s = config.manager.rollout_lease_s, config.system.stall_timeout_s
    if lease_s >= limit_s:
        yield (
            f"manager.rollout_lease_s={lease_s:g}: a GserverManager that replaces another waits so long for silent "
            f"workers, and the run ends after system.stall_timeout_s={limit_s:g} without a step; use a shorter lease"
        )
