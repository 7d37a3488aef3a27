"""What the embedded engine can do."""

from __future__ import annotations

from asyncrl.inference.backend import Backend


class Embedded(Backend):
    """The torch engine of this package, in the GenerationServer's own process."""

    label = "the embedded engine"
    host = "asyncrl.inference.embedded.host:make_host"
    slow_on_gpus = (
        "on a GPU it is for tests and small models, as a token costs some thirty operators a layer, each started by "
        "the CPU; use generation.backend=sglang for speed"
    )
    memory_is_counted = keeps_pictures = pause_ends_requests = True
    same_arithmetic = tells_experts = loads_adapters = verifies_files = finds_stop_strings = True

    def takes_pictures(self, weight_transport: str, model_type: str) -> bool:
        return True
