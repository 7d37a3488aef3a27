"""An embedded engine that waits for the test: what is under way has not ended when the test does something to it.

As a program it is a worker process with such an engine: `held_engine.py FILE generation_server 0 --run-dir ...`. It is
held for as long as FILE exists.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from asyncrl.inference.embedded.scheduler import DecodeBatch

HELD_AT = 8
"""Tokens that each answer has while the engine is held; those that others join meanwhile have a few more."""


def held_step(is_held: Callable[[], bool]) -> Callable[[DecodeBatch], None]:
    """`DecodeBatch.step` which generates nothing more while `is_held()`; what else the engine is told it does."""
    step = DecodeBatch.step

    @torch.inference_mode()
    def waiting_step(batch: DecodeBatch) -> None:
        running = batch.samples.running
        complete = all(sequence.produced(batch.steps) >= HELD_AT for sequence in running)
        joining = batch.samples.live < batch.queue.max_running and batch.queue.has_admissible()
        if running and complete and not joining and is_held():
            time.sleep(0.001)
        else:
            step(batch)

    return waiting_step


if __name__ == "__main__":
    held = Path(sys.argv.pop(1))
    DecodeBatch.step = held_step(held.exists)  # type: ignore[method-assign]
    runpy.run_module("asyncrl.runtime.main", run_name="__main__")
