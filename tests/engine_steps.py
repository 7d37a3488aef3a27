"""Take the steps of an embedded engine in the test's own thread."""

from __future__ import annotations

from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.engine_io import GenerationInput, GenerationOutput


def drain(engine: GenerationEngine) -> None:
    """Take steps until nothing runs."""
    while engine.step():
        pass


def run(engine: GenerationEngine, *inputs: GenerationInput) -> list[GenerationOutput]:
    """Answer `inputs` and whatever else the engine has to do; return their outputs."""
    future = engine.submit(Job(inputs))
    drain(engine)
    return future.result(timeout=0)
