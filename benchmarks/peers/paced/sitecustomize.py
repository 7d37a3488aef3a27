"""First on PYTHONPATH: devices that take their time and no core, for `plan.py`.

A decode step of n samples lasts `STEP_S + SAMPLE_S * n` and training or scoring a token `TOKEN_S`: what the CPU has
computed earlier than that is held back. Python imports a module of this name when it begins.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from after_import import after_import

STEP_S, SAMPLE_S, TOKEN_S = 0.040, 0.0004, 0.0003


def _paced_server(module: ModuleType) -> None:
    step = module.DecodeBatch.step

    def paced(self: Any) -> None:
        began = time.perf_counter()
        step(self)
        lasts = STEP_S + SAMPLE_S * self.samples.live
        time.sleep(max(0.0, lasts - (time.perf_counter() - began)))

    module.DecodeBatch.step = paced


def _paced_rank(module: ModuleType) -> None:
    cut = module.RoleEngine._cut

    def paced(self: Any, *args: Any) -> Iterator[Any]:
        for micro_batch in cut(self, *args):
            began = time.perf_counter()
            yield micro_batch
            lasts = TOKEN_S * micro_batch.model_inputs["input_ids"].numel()
            time.sleep(max(0.0, lasts - (time.perf_counter() - began)))

    module.RoleEngine._cut = paced


after_import(
    {
        "asyncrl.inference.embedded.scheduler": _paced_server,
        "asyncrl.trainer.engines.role": _paced_rank,
    }
)
