"""Tasks of Harbor, by Harbor's own agents: an episode is a trial, whose verifier gives the reward.

`harbor` needs Python 3.12 and is installed in a separate virtual environment (`asyncrl install verifiers 0.4.0 FOLDER
harbor`), in which `harbor_host.py` runs the trials.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.plugins.agents.verifiers_env import VerifiersAgent, VerifiersDataset

HOST = Path(__file__).with_name("harbor_host.py")


class HarborDataset(VerifiersDataset):
    """The instructions of the tasks below a folder; name it in `dataset.path`.

    Args:
        split, seed: not needed; a folder of tasks has no held-out rows.
        python: the interpreter of the environment that has `harbor`.
        tasks: the folder.
        trial: as for `HarborAgent`.

    Raises:
        ValueError: there is no task, or one cannot be read.
    """

    program = HOST

    def __init__(
        self, *, split: str, seed: int, python: str, tasks: str, trial: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(split=split, seed=seed, python=python, env=tasks, args=trial)


class HarborAgent(VerifiersAgent):
    """An episode is a trial of a task; `env` and `reward` of the experiment are not used.

    Args:
        tokenizer: the run's tokenizer; not needed.
        python, tasks: as for `HarborDataset`.
        trial: Harbor's `TrialConfig` without `task` and `trials_dir`: `agent`, `environment`, `verifier` and so on.
            `{base_url}`, `{root_url}` and `{api_key}` in its texts stand for those of the episode. `path` is a folder
            from which agents and environments of one's own are imported.
        max_episodes: episodes after which the process is replaced.
    """

    program = HOST
    rows_by = "asyncrl.plugins.agents.harbor:HarborDataset"
    apart = False

    def __init__(
        self,
        *,
        tokenizer: object = None,
        python: str,
        tasks: str,
        trial: Mapping[str, Any] | None = None,
        max_episodes: int = 1000,
    ) -> None:
        super().__init__(python=python, env=tasks, args=trial, max_episodes=max_episodes)
