"""The whole system with real processes: versions, staleness, rollout counts, metrics and what is left afterwards."""

from __future__ import annotations

import fcntl
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.observe.tail import JsonlTail
from asyncrl.runtime.settings import EXIT_HELD

from ..conftest import LIMIT_S, SHARED_MEMORY, Gate, left_in_memory
from .clusters import await_that

pytestmark = pytest.mark.slow


def assert_balanced(counts: dict[str, Any]) -> None:
    assert counts["submitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["abandoned"]


def test_a_run_has_its_trial_to_itself_keeps_its_bound_balances_its_counts_and_leaves_nothing(
    start_run: Any, gate: Callable[[int], Gate], required_metrics: set[str]
) -> None:
    shared_memory, held = set(SHARED_MEMORY.iterdir()), gate(4)
    run = start_run(**held.settings)
    run.wait_for_step(2)
    titles = [title for title in run.remember_processes() if title.startswith("asyncrl ")]
    second = start_run(**held.settings)
    assert second.wait() == EXIT_HELD
    assert "another run is using" in second.output
    held.open()
    assert run.wait() == 0, run.output + run.logs()

    kinds = ["generation_server", "gserver_manager", "master_worker", "model_worker", "rollout_worker"]
    assert sorted(title.split()[1] for title in titles) == [f"{kind}/0" for kind in kinds]
    logs = {f.name for f in (run.run_dir / "logs").iterdir()}
    assert logs == {"prompts.log", *(f"{kind}-0.log" for kind in kinds)}

    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["policy_version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row.keys() >= required_metrics, f"missing {required_metrics - row.keys()}"
        assert row["staleness/max"] <= 2
        assert row["tokens/trained"] > 0
    assert [row["step"] for row in run.metrics() if "eval/held_out/reward_mean" in row] == [0, 3, 6]

    summary = run.summary()
    assert summary["steps"] == 6
    assert summary["books"]["trained"] == 6 * 4
    assert_balanced(summary["books"])
    assert "stale" not in summary["books"]["dropped"], "on_stale=wait"
    assert "submitted" in run.output

    newest = run.run_dir / "weights" / "actor" / "v6"
    assert json.loads((newest / "manifest.json").read_text())["version"] == 6

    assert run.survivors() == []
    assert left_in_memory(run.run_dir, shared_memory) == []
    with (run.run_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert stat.S_IMODE((run.run_dir / "secret").stat().st_mode) == 0o600


EASY = """
def score(data, completion):
    "Answers to easy prompts are all right."
    return 1.0 if data["easy"] else 0.5 * sum(c in "02468" for c in completion) / max(len(completion), 1)
"""


def test_with_eta_zero_every_token_is_of_the_version_that_trains_on_it_and_prompts_answered_well_rest(
    start_run: Any, tmp_path: Path
) -> None:
    """So every weight is 1, under truncated sampling too, and the narrowest mask masks nothing."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "easy": n % 2}) + "\n" for n in range(1, 9)))
    (tmp_path / "easy.py").write_text(EASY)
    run = start_run(
        "sync_ppo",
        dataset__path=data,
        reward__path=f"{tmp_path / 'easy.py'}:score",
        dataset__curriculum__high=0.9,
        dataset__curriculum__skip_epochs=1,
        max_head_offpolicyness=None,
        total_train_steps=6,
        eval__interval=0,
        system__encrypt="false",
        rollout__sampling__temperature=0.7,
        rollout__sampling__top_p=0.9,
        algorithm__correction__name="geometric_mask",
    )
    assert run.wait() == 0, run.output + run.logs()
    assert "top_p=0.9 cuts tokens off that no importance weight brings back" in run.output
    rows = run.rows()
    assert len(rows) == 6
    learned = [row for row in rows if row["reward/frac_zero_std"] < 1]  # in the others nothing has a weight
    assert len(learned) > 2
    assert all(row["ppo/behave_imp_weight_max"] == pytest.approx(1.0, abs=1e-4) for row in learned)
    for row in rows:
        assert row["staleness/max"] == 0
        assert row["ppo/behave_kl"] < 1e-8
        assert row["masked/sequence_below_band"] == row["masked/sequence_above_band"] == 0
    counts = run.summary()["books"]
    assert_balanced(counts)
    # 4 of 8 prompts are easy: epoch 0 is two steps, epoch 1 without them one, epoch 2 two, epoch 3 one
    assert counts["dropped"]["curriculum"] >= 7
    assert counts["trained"] == 24


NOTING_AGENT = """
import json
from pathlib import Path

from asyncrl.plugins.agents.single_turn import SingleTurnAgent


class NotingAgent(SingleTurnAgent):
    "Writes down the versions of every answer's tokens; and answers a few prompts until an update comes in between."

    def __init__(self, *, tokenizer, file):
        super().__init__(tokenizer=tokenizer)
        self._file = Path(file)

    async def run_group(self, prompt, make_env, client):
        while True:
            samples = await super().run_group(prompt, make_env, client)
            answers = [[int(v) for v, m in zip(sample.versions, sample.loss_mask) if m] for sample in samples]
            with self._file.open("a") as file:
                file.writelines(json.dumps({"versions": versions}) + "\\n" for versions in answers)
            if prompt.order >= 4 or any(len(set(versions)) > 1 for versions in answers):
                return samples
"""


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_kept_answers_go_on_across_updates_within_the_bound(
    mode: str, start_run: Any, ctrl_c: Any, tmp_path: Path
) -> None:
    (tmp_path / "noting.py").write_text(NOTING_AGENT)
    run = start_run(
        manager__update_mode=mode,
        rollout__rehearse="false",  # where no update ever comes
        on_stale="mask",  # with "wait" the update would wait for the agent, which waits for the update
        agent__path=f"{tmp_path / 'noting.py'}:NotingAgent",
        agent__args=f"{{file: {tmp_path / 'versions'}}}",
        rollout__sampling__max_new_tokens=96,
        total_train_steps=100_000,
        eval__interval=0,
    )
    run.wait_for_step(1)
    written = JsonlTail(tmp_path / "versions")
    answers: list[list[int]] = []

    def one_spans_an_update() -> bool:
        answers.extend(row["versions"] for row in written.read())
        return any(len(set(versions)) > 1 for versions in answers)

    await_that(one_spans_an_update, "an answer that spans an update", LIMIT_S)
    at = int(run.rows()[-1]["step"])
    run.wait_for_step(at + 2)
    ctrl_c(run)
    assert run.wait() == 130, run.output + run.logs()
    one_spans_an_update()
    assert all(versions == sorted(versions) for versions in answers)
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert max(row["staleness/max"] for row in rows) <= 2
    assert_balanced(run.summary()["books"])
    assert run.survivors() == []


def test_a_finished_trial_is_not_run_again_and_goes_on_with_more_steps_where_it_may(start_run: Any) -> None:
    assert start_run(cold=True, total_train_steps=2).wait() == 0  # as a user starts it
    again = start_run(total_train_steps=2)
    assert again.wait() == 0
    assert "is complete" in again.output
    other = start_run(total_train_steps=2, optimizer__lr=2e-3)
    assert other.wait() == 1
    assert "optimizer.lr: 0.0001 -> 0.002" in other.output
    refused = start_run(total_train_steps=4, resume="never")
    assert refused.wait() == 1
    assert "resume=restart" in refused.output
    more = start_run(total_train_steps=4, optimizer__lr=2e-3)
    assert more.wait() == 0, more.output + more.logs()
    assert "continuing from checkpoint v2: step 2 of 4, 8 prompts used" in more.output
    assert "total_train_steps: 2 -> 4" in more.output
    assert more.rows()[2]["lr"] > 5e-4  # the new rate, somewhat down its cosine
    assert [row["step"] for row in more.rows()] == [1, 2, 3, 4]


@pytest.mark.parametrize(("engine", "parallel", "replay"), [("flat", "d1", False), ("sharded", "d2", True)])
def test_a_mixture_of_experts_is_served_as_it_is_trained(
    engine: str, parallel: str, replay: bool, start_run: Any, tiny_moe: Path
) -> None:
    """After an update the server's experts equal the trainer's: every weight is 1, with or without routing replay."""
    run = start_run(
        model__path=str(tiny_moe),
        trainer__engine=engine,
        trainer__parallel=parallel,
        moe__replay_routing=replay,
        max_head_offpolicyness=0,
        optimizer__lr=0.01,
        total_train_steps=3,
        eval__interval=0,
    )
    assert run.wait() == 0, run.output + run.logs()
    assert [row["step"] for row in run.rows()] == [1, 2, 3]
    for row in run.rows():
        assert row["ppo/behave_imp_weight_max"] == pytest.approx(1.0, abs=1e-4)
    names = json.loads((run.run_dir / "weights" / "actor" / "v3" / "manifest.json").read_text())["tensors"]
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in names
