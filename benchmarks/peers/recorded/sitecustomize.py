"""First on PYTHONPATH: the RolloutWorker writes down every group that it has generated (`simulate.py --fit`).

A line of JSON for each, appended to the file that the environment variable RECORDED_GROUPS names: its place in the data
order, of each answer its tokens and its reward, and the CPU-seconds of the process so far. `samples.every` keeps groups
too, but makes training compute more.
"""

from __future__ import annotations

import json
import os
import time
from functools import partial
from types import ModuleType
from typing import Any

from after_import import after_import

AGENT = "asyncrl.plugins.agents.single_turn"


def _recording(module: ModuleType, file: str) -> None:
    play = module.SingleTurnAgent.run_group
    lines = open(file, "a", buffering=1)  # noqa: SIM115 (as long as the process)

    async def run_group(self: Any, prompt: Any, *args: Any) -> Any:
        samples = await play(self, prompt, *args)
        answers = [(sample.tokens[sample.loss_mask.astype(bool)].tolist(), sample.total_reward) for sample in samples]
        lines.write(json.dumps([prompt.order, answers, time.process_time()]) + "\n")
        return samples

    module.SingleTurnAgent.run_group = run_group


if groups := os.environ.get("RECORDED_GROUPS"):
    after_import({AGENT: partial(_recording, file=groups)})
