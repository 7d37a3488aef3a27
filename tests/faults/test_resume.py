"""After any stop the same command continues: no step is missing, none is there twice, no prompt is trained twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.datasets.used_prompts import UsedPrompts

pytestmark = pytest.mark.slow

BATCH = 4


def newest_state(run: Any) -> dict[str, Any]:
    files = (run.run_dir / "checkpoints").glob("v*/state.json")
    states = [json.loads(file.read_text()) for file in files]
    newest: dict[str, Any] = max(states, key=lambda state: state["version"])
    return newest


@pytest.mark.parametrize("stop", ["kill the tree", "ctrl-c"])
def test_a_stopped_run_goes_on_and_trains_no_prompt_twice(start_run: Any, ctrl_c: Any, stop: str) -> None:
    first = start_run(total_train_steps=100_000)
    first.wait_for_step(5)
    if stop == "kill the tree":
        first.kill_tree()
    else:
        ctrl_c(first)
        assert first.wait(60) == 130, first.output
    begun = newest_state(first)["version"]
    assert begun >= 4

    goal = begun + 6
    second = start_run(total_train_steps=goal)
    assert second.wait() == 0, second.output + second.logs()
    assert f"continuing from checkpoint v{begun}: step {begun} of {goal}, {begun * BATCH} prompts used" in second.output

    assert [row["step"] for row in second.rows()] == list(range(1, goal + 1))
    state = newest_state(second)
    assert state["version"] == goal
    used = UsedPrompts.from_json(state["master_state"]["buffer"]["used_prompts"])
    assert len(used) == goal * BATCH, "each step uses B prompts that no other step used"
    assert second.survivors() == []
