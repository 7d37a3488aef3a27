"""What becomes of a trial of Harbor, by the result that it gives."""

from __future__ import annotations

import asyncio
import errno
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.plugins.agents.harbor_host import Trials

LATE = SimpleNamespace(exception_type="AgentTimeoutError", exception_message="too late")


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trials by a stand-in of Harbor, whose next result is `trials.result`."""

    def leave_something(config: dict[str, Any]) -> Any:
        Path(config["trials_dir"], "left").mkdir()
        return made.result

    async def create(config: dict[str, Any]) -> Any:
        async def run() -> Any:
            return leave_something(config)

        return SimpleNamespace(run=run)

    parts: dict[str, Any] = {
        "models.task.task": {"Task": lambda folder: SimpleNamespace(instruction="do it")},
        "models.trial.config": {"TrialConfig": SimpleNamespace(model_validate=lambda config: config)},
        "trial.trial": {"Trial": SimpleNamespace(create=create)},
    }
    for name, has in parts.items():
        monkeypatch.setitem(sys.modules, f"harbor.{name}", SimpleNamespace(**has))
    (tmp_path / "task.toml").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made: Any = Trials(str(tmp_path), {})
    return made


def run(trials: Any) -> Any:
    return asyncio.run(trials.run(0, "train", "http://policy/v1", "key"))


def test_an_agent_that_ran_out_of_time_has_the_reward_that_the_verifier_gave(trials: Any) -> None:
    scored = SimpleNamespace(rewards={"reward": 1, "tests": 3})
    trials.result = SimpleNamespace(exception_info=LATE, verifier_result=scored)
    assert run(trials) == {"reward": 1.0, "parts": {"reward": 1.0}, "metrics": {"tests": 3.0}}
    for verifier_result in (None, SimpleNamespace(rewards={"tests": 3})):
        trials.result = SimpleNamespace(exception_info=LATE, verifier_result=verifier_result)
        with pytest.raises(RuntimeError, match="the trial failed: AgentTimeoutError: too late"):
            run(trials)
    trials.result.exception_info = None
    with pytest.raises(RuntimeError, match=r"the verifier gave no reward; its values are \{'tests': 3\}"):
        run(trials)


def test_a_folder_that_cannot_be_removed_costs_no_trial(trials: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "a container has it")

    trials.result = SimpleNamespace(exception_info=None, verifier_result=SimpleNamespace(rewards={"reward": 0.5}))
    monkeypatch.setattr("os.rmdir", refuse)
    assert run(trials)["reward"] == 0.5
