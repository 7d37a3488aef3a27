"""First on PYTHONPATH: the RolloutWorker writes down every group that it has generated (`simulate.py --fit`).

A line of JSON for each, appended to the file that the environment variable RECORDED_GROUPS names: its place in the data
order, of each answer its tokens and its reward, and the CPU-seconds of the process so far. `samples.every` keeps groups
too, but makes training compute more.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

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


class _Finder(importlib.abc.MetaPathFinder):
    """Changes the agent's module right after it is imported."""

    def __init__(self, file: str) -> None:
        self._file = file

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == AGENT else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            _recording(module, self._file)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


if groups := os.environ.get("RECORDED_GROUPS"):
    sys.meta_path.insert(0, _Finder(groups))
