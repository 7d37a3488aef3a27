"""Runs trials of Harbor, by Harbor's own agents; a separate program, in an environment where `harbor` is installed.

`asyncrl.plugins.agents.harbor` starts it and speaks to it as `verifiers_host` describes. It imports nothing of asyncrl.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.plugins.agents.verifiers_host import MODEL, NoRows, main
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from verifiers_host import MODEL, NoRows, main

    del sys.path[0]

REWARD = "reward"
"""Which of a verifier's rewards is the episode's."""


class Trials:
    """Trials of the tasks below a folder.

    Args:
        env: the folder.
        args: the rest of their `TrialConfig`, and `path`, a folder of the user's agents and environments. In its texts
            `{base_url}`, `{root_url}` and `{api_key}` stand for those of an episode.
    """

    def __init__(self, env: str, args: Mapping[str, Any]) -> None:
        from harbor.models.task.task import Task
        from harbor.models.trial.config import TrialConfig
        from harbor.trial.trial import Trial

        self._config_of, self._trial_of = TrialConfig.model_validate, Trial.create
        self._args = {name: value for name, value in args.items() if name != "path"}
        if "path" in args:
            sys.path.insert(0, os.path.abspath(args["path"]))
        self._tasks = [file.parent for file in sorted(Path(env).expanduser().rglob("task.toml"))]
        if not self._tasks:
            raise ValueError("no task.toml is below this folder")
        self._prompts = [Task(folder).instruction.strip() for folder in self._tasks]

    @contextlib.asynccontextmanager
    async def serving(self, *, rollouts: bool = True) -> AsyncIterator[None]:
        yield

    def rows(self, split: str) -> list[dict[str, Any]]:
        if split != "train":
            raise NoRows("a folder of tasks has no held-out rows; give eval.path another one, or use eval.interval=0")
        return [{"prompt": prompt} for prompt in self._prompts]

    async def run(self, row: int, split: str, base_url: str, api_key: str) -> dict[str, Any]:
        values = {"{base_url}": base_url, "{root_url}": base_url.removesuffix("/v1"), "{api_key}": api_key}
        given = filled(self._args, values)
        agent = {"model_name": f"openai/{MODEL}", **given.get("agent", {})}
        # containers may leave files there that are not this user's
        with tempfile.TemporaryDirectory(prefix="asyncrl-harbor-", ignore_cleanup_errors=True) as folder:
            own = {"agent": agent, "task": {"path": str(self._tasks[row].absolute())}, "trials_dir": folder}
            result = await (await self._trial_of(self._config_of({**given, **own}))).run()
        rewards = (result.verifier_result and result.verifier_result.rewards) or {}
        if REWARD not in rewards:  # an agent that ran out of time, or exited with an error, is scored all the same
            if error := result.exception_info:
                raise RuntimeError(f"the trial failed: {error.exception_type}: {error.exception_message[:2000]}")
            raise RuntimeError(f"the verifier gave no reward; its values are {rewards}")
        others = {name: float(value) for name, value in rewards.items() if name != REWARD}
        return {"reward": float(rewards[REWARD]), "parts": {REWARD: float(rewards[REWARD])}, "metrics": others}


def filled(value: Any, values: Mapping[str, str]) -> Any:
    """Return `value` with `values` in its texts in place of their names."""
    if isinstance(value, Mapping):
        return {name: filled(each, values) for name, each in value.items()}
    if isinstance(value, list):
        return [filled(each, values) for each in value]
    if isinstance(value, str):
        for name, text in values.items():
            value = value.replace(name, text)
    return value


if __name__ == "__main__":
    main(Trials)
