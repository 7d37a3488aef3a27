"""After any stop the same command continues: no step is missing, none is there twice, no prompt is trained twice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.commands.audit import audit
from asyncrl.datasets.used_prompts import UsedPrompts
from asyncrl.rollout.loop import MAX_ATTEMPTS

pytestmark = pytest.mark.slow

BATCH = 4


def newest_state(run: Any) -> dict[str, Any]:
    files = (run.run_dir / "checkpoints").glob("v*/state.json")
    states = [json.loads(file.read_text()) for file in files]
    newest: dict[str, Any] = max(states, key=lambda state: state["version"])
    return newest


FAILING = """
def even_digits(data, completion):
    if data["index"] % 4 == 0:
        raise LookupError("no such answer")
    return sum(c in "02468" for c in completion) / max(len(completion), 1)
"""


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

    found = audit(second.run_dir)
    assert found.findings == ()
    assert (found.outcome.lineages, found.outcome.version, found.outcome.trained) == (2, goal, goal * BATCH)
    ledger = second.run_dir / "ledger" / "000001.jsonl"
    whole = ledger.read_text()
    before, trained, after = whole.rpartition('{"kind":"trained"')
    ledger.write_text(before + trained + after.replace('"order":', '"order":1', 1))
    assert audit(second.run_dir).findings


def _failed(dropped: dict[str, int]) -> int:
    return sum(count for reason, count in dropped.items() if reason.startswith("failed: reward "))


def test_what_was_dropped_for_good_is_told_and_not_played_again(start_run: Any, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    settings = {"reward__path": f"{tmp_path / 'failing.py'}:even_digits", "eval__interval": 0}
    first = start_run(total_train_steps=100_000, **settings)
    first.wait_for_line("rollouts failed in reward")
    first.wait_for_step(8)
    first.kill_tree()
    begun = newest_state(first)
    used = UsedPrompts.from_json(begun["master_state"]["buffer"]["used_prompts"])
    dropped = _failed(begun["master_state"]["dropped"])
    given_up = {prompt for prompt in used if int(prompt.partition("-")[2]) % 4 == 0}
    assert len(used) == begun["version"] * BATCH + len(given_up)
    assert given_up
    assert dropped >= MAX_ATTEMPTS * len(given_up)
    logs = first.run_dir / "logs"
    for log in logs.glob("rollout_worker-*.log"):
        log.unlink()

    second = start_run(total_train_steps=begun["version"] + 4, **settings)
    assert second.wait() == 0, second.output + second.logs()
    failed = re.findall(r"rollout of prompt (\S+) failed", (logs / "rollout_worker-0.log").read_text())
    assert failed
    assert given_up.isdisjoint(failed)
    assert _failed(second.summary()["books"]["dropped"]) >= dropped + len(set(failed))
    assert f"FAILED     {_failed(second.summary()['books']['dropped'])} rollouts in reward" in second.output
