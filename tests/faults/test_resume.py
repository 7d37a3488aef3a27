"""After any stop the same command continues: no step is missing, none is there twice, no prompt is trained twice."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.files import FileDataset
from asyncrl.data.mixture import Mixture
from asyncrl.data.prompt_queue import DataOrder, UsedPrompts, epoch_order
from asyncrl.launch.commands.audit import audit
from asyncrl.rollout.loop import MAX_ATTEMPTS

from ..conftest import LIMIT_S, Gate
from ..e2e.clusters import await_that

pytestmark = pytest.mark.slow

BATCH = 4


def newest_state(run: Any) -> dict[str, Any]:
    files = (run.run_dir / "checkpoints").glob("v*/state.json")
    states = [json.loads(file.read_text()) for file in files]
    newest: dict[str, Any] = max(states, key=lambda state: state["version"])
    return newest


def used_prompts(state: dict[str, Any]) -> UsedPrompts:
    return UsedPrompts.from_json(state["master_state"]["gate"]["used"])


FAILING = """
ROWS = {rows}

def even_digits(data, completion):
    if data["index"] in ROWS:
        raise LookupError("no such answer")
    return sum(c in "02468" for c in completion) / max(len(completion), 1)
"""


def test_a_killed_run_goes_on_in_another_layout_and_trains_no_prompt_twice(
    start_run: Any, gate: Callable[[int], Gate], tmp_path: Path
) -> None:
    """Its checkpoint is read into whatever layout the ranks have now, and the terminal says that this one is new. It is
    killed within its last epoch.
    """
    rows_of_data, goal = 14, 7
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{row}+1="}}\n' for row in range(rows_of_data)))
    held = gate(goal - 1)
    epochs = {"total_epochs": 2, "dataset__path": tmp_path / "rows.jsonl", "dataset__args": "{}", "eval__interval": 0}
    first = start_run(trainer__parallel="d2", **epochs, **held.settings)
    first.wait_for_file("checkpoints/v4")
    first.kill_tree()
    held.open()
    begun = newest_state(first)["version"]
    assert begun >= 4

    second = start_run(trainer__parallel="p2", **epochs, **held.settings)
    assert second.wait() == 0, second.output + second.logs()
    assert 'trainer.parallel: "d2" -> "p2"' in second.output
    assert f"continuing from checkpoint v{begun}: step {begun} of {goal}, {begun * BATCH} prompts used" in second.output

    rows = second.rows()
    assert [row["step"] for row in rows] == [row["policy_version"] for row in rows] == list(range(1, goal + 1))
    assert all(math.isfinite(row[name]) for row in rows for name in ("loss", "grad_norm"))
    assert (second.run_dir / "weights" / "actor" / f"v{goal}" / "manifest.json").exists()
    state = newest_state(second)
    assert state["version"] == goal
    assert sorted(used_prompts(state)) == sorted(f"e{epoch}-{row}" for epoch in (0, 1) for row in range(rows_of_data))
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


def test_what_was_dropped_for_good_is_told_and_not_played_again(start_run: Any, ctrl_c: Any, tmp_path: Path) -> None:
    """Every sixth prompt fails whenever it is tried: never so many in a row that the run ends for it."""
    stream = DataOrder(16_384, seed=1)
    rows = {stream.ref(order).row for order in range(1, 16_384, 6)}
    (tmp_path / "failing.py").write_text(FAILING.format(rows=rows))
    settings = {"reward__path": f"{tmp_path / 'failing.py'}:even_digits", "eval__interval": 0, "seed": 1}
    first = start_run(total_train_steps=100_000, **settings)
    first.wait_for_line("rollouts failed in reward")

    def is_saved() -> bool:
        with contextlib.suppress(FileNotFoundError, ValueError):  # there is none yet, or it was replaced just now
            state = newest_state(first)
            return len(used_prompts(state)) > state["version"] * BATCH
        return False

    await_that(is_saved, "checkpoint that has a prompt as given up", LIMIT_S)
    first.kill_tree()
    begun = newest_state(first)
    used = used_prompts(begun)
    dropped = _failed(begun["master_state"]["gate"]["dropped"])
    given_up = {prompt for prompt in used if int(prompt.partition("-")[2]) in rows}
    assert json.loads((first.run_dir / "data_record.json").read_text())["rows"] == 16_384
    assert len(used) == begun["version"] * BATCH + len(given_up)
    assert given_up
    assert dropped >= MAX_ATTEMPTS * len(given_up)
    logs = first.run_dir / "logs"
    for log in logs.glob("rollout_worker-*.log"):
        log.unlink()

    before = first.rows()[-1]["step"]
    second = start_run(total_train_steps=100_000, **settings)

    def has_failures_of_its_own() -> bool:
        rows = [row for row in second.rows() if row["step"] > before]
        return any(value for row in rows for name, value in row.items() if name.startswith("rollout/dropped_failed: "))

    await_that(has_failures_of_its_own, "row that tells of failures", LIMIT_S)
    ctrl_c(second)
    assert second.wait() == 130, second.output + second.logs()
    failed = re.findall(r"rollout of prompt (\S+) failed", (logs / "rollout_worker-0.log").read_text())
    assert failed
    assert given_up.isdisjoint(failed)
    assert _failed(second.summary()["books"]["dropped"]) > dropped
    assert f"FAILED     {_failed(second.summary()['books']['dropped'])} rollouts in reward" in second.output


PARTLY_RIGHT = """
def score(group):
    "Easy rows are always right; of a hard one's group the first never is, the others as the model happens to write."
    easy = group[0].data["source"] == "easy"
    return [float(easy or (at > 0 and len(one.response) % 2 == 0)) for at, one in enumerate(group)]
"""


OWN_CODE = """
class Curriculum:
    "What the built-in one does with high=0.9, skip_epochs=1."

    def __init__(self):
        self.right = {}

    def measured(self, row, epoch, success):
        self.right.setdefault(row, {})[epoch] = success

    def skips(self, row, epoch):
        return self.right.get(row, {}).get(epoch - 1, 0.0) > 0.9

    def state(self):
        return [[row, sorted(by_epoch.items())] for row, by_epoch in sorted(self.right.items())]

    def restore(self, state):
        self.right = {row: dict(by_epoch) for row, by_epoch in state}


class Order:
    def __init__(self):
        self.steps = []

    def __call__(self, rollout):
        return rollout.order

    def trained(self, rollouts):
        self.steps.append(sorted(rollout.prompt_id for rollout in rollouts))

    def state(self):
        return self.steps

    def restore(self, state):
        self.steps = state
"""


def test_a_curriculum_of_ones_own_over_a_mixture_goes_on_after_a_kill_as_if_there_had_been_none(
    start_run: Any, gate: Callable[[int], Gate], tmp_path: Path
) -> None:
    """With η = 0 a run that goes on from v5 trains what it trained before the kill, and measures the same success.

    4 easy and 12 hard rows in batches of 4: epoch 0 is steps 1 to 4, and the easy rows, all in the first two of them,
    rest in epoch 1, which is steps 5 to 7; some of them after v5.
    """
    (tmp_path / "easy.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(4)))
    (tmp_path / "hard.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+20="}) + "\n" for n in range(12)))
    (tmp_path / "score.py").write_text(PARTLY_RIGHT)
    sources = [
        f"{{path: {tmp_path / name}.jsonl, name: {name}, weight: {w}}}" for name, w in (("easy", 1), ("hard", 3))
    ]
    easy = {row for row, source in enumerate(mixed_sources(tmp_path)) if source == "easy"}
    seed = next(seed for seed in range(1000) if _suits(seed, easy))
    settings = {
        "dataset__sources": f"[{', '.join(sources)}]",
        "dataset__curriculum__path": f"{tmp_path / 'own.py'}:Curriculum",
        "buffer__order__path": f"{tmp_path / 'own.py'}:Order",
        "reward__path": f"{tmp_path / 'score.py'}:score",
        "max_head_offpolicyness": 0,
        "group_size": 4,
        "seed": seed,
        "eval__interval": 0,
        "optimizer__lr": 0.003,
        "optimizer__schedule": "constant",  # a cosine over so many steps more is another rate
        "checkpoint__interval": 5,
    }
    (tmp_path / "own.py").write_text(OWN_CODE)
    settings |= gate(8).settings  # steps 5 to 7 take two batches of the data order, as prompts rest
    killed = start_run(total_train_steps=100_000, **settings)
    killed.wait_for_step(7)
    killed.wait_for_file("checkpoints/v5")
    killed.kill_tree()
    for late in {*(killed.run_dir / "checkpoints").glob("v*")} - {killed.run_dir / "checkpoints" / "v5"}:
        shutil.rmtree(late)  # it was not killed at once
    resumed = start_run(total_train_steps=7, **settings)
    assert resumed.wait() == 0, resumed.output + resumed.logs()
    assert "continuing from checkpoint v5" in resumed.output
    state = json.loads((resumed.run_dir / "checkpoints" / "v7" / "state.json").read_text())["master_state"]
    assert len(state["buffer_order"]["state"]) == 7, "steps of both launches, those after v5 once"

    trained = trained_prompts(resumed.run_dir)
    assert {step: trained[0, step] for step in (6, 7)} == {step: trained[1, step] for step in (6, 7)}
    measured = {
        int(row): (int(epoch), success)
        for step in range(1, 8)
        for (epoch, row), success in ((name[1:].split("-"), success) for name, success in trained[0, step])
    }
    assert {row for row, (epoch, _) in measured.items() if epoch == 0} == easy, "they rested in epoch 1"
    assert len({success for row, (_, success) in measured.items() if row not in easy}) > 2, "success does differ"
    ahead = set(epoch_order(16, seed, 2)[:4].tolist())  # what was under way at the end may be measured or not
    reported = newest_state(resumed)["master_state"]["gate"]["curriculum"]
    kept = {row: tuple(by_epoch[-1]) for row, by_epoch in reported["state"]}
    assert {row: kept[row] for row in measured.keys() - ahead} == {
        row: measured[row] for row in measured.keys() - ahead
    }
    assert audit(resumed.run_dir).findings == ()


def _suits(seed: int, easy: set[int]) -> bool:
    in_epoch_1 = epoch_order(16, seed, 1).tolist()
    return easy <= set(epoch_order(16, seed, 0)[:8].tolist()) and in_epoch_1[-2] in easy


def mixed_sources(folder: Path) -> list[str]:
    """Return the source of each row of the mixture."""
    names = ("easy", "hard")
    mixture = Mixture([FileDataset(path=str(folder / f"{name}.jsonl")) for name in names], (1.0, 3.0), names)
    return [mixture.row(index)["source"] for index in range(len(mixture))]


def trained_prompts(run_dir: Path) -> dict[tuple[int, int], set[tuple[str, float]]]:
    """By lineage and step, the prompts that were trained, and the mean reward of each."""
    steps: dict[tuple[int, int], set[tuple[str, float]]] = {}
    for file in sorted((run_dir / "ledger").glob("*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            if line["kind"] == "trained":
                steps.setdefault((line["lineage"], line["step"]), set()).add((line["prompt"], line["reward"]))
    return steps


TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial_resume.md"
COMMAND = re.compile(r"^python -m asyncrl\.launch (.*?)(?: +#.*)?$", re.MULTILINE)


def test_the_tutorial_on_stopping_and_continuing_holds(
    start_run: Any, ctrl_c: Any, gate: Callable[[int], Gate], command: Any, tmp_path: Path
) -> None:
    """Its commands in its order, on a tiny model: stop, continue, other settings, the rollout counts, the policy."""
    begin, longer, _another, _anew, *afterwards = COMMAND.findall(TUTORIAL.read_text(encoding="utf-8"))
    held = gate(4)
    version, out = 0, tmp_path / "out.json"
    small = ["--out", out, "eval.size=4", "eval.n_samples=2", "eval.interval=0", "system.start_timeout_s=240"]
    small += ["eval.sampling.temperature=1.0", "eval.sampling.max_new_tokens=8"]
    for words, reported in (
        (begin, ""),
        (begin, "continuing from checkpoint v{version}"),
        (longer, "optimizer.lr"),
    ):
        experiment, *given = words.split()
        settings = {"total_train_steps": None, "eval.interval": 0} | dict(word.split("=") for word in given)
        held.let_make(version + 4)
        run = start_run(experiment, **settings, **held.settings)
        run.wait_for_step(version + 3)
        assert reported.format(version=version) in run.output
        ctrl_c(run)
        assert run.wait() == 130, run.output
        version = run.summary()["steps"]
        assert [row["step"] for row in run.rows()] == list(range(1, version + 1))
        counts = run.summary()["books"]
        assert counts["submitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["abandoned"]
        assert run.survivors() == []
        state = newest_state(run)
        assert state["version"] == version, "the last step is saved"
        assert len(used_prompts(state)) == version * BATCH, "each step uses B prompts that no other step used"
    assert [words.split()[0] for words in afterwards] == ["audit", "export", "eval"]
    for words in afterwards:
        own = words.replace("~/.cache/asyncrl/long/trial0", str(run.run_dir)).replace(
            "my-model", str(tmp_path / "mine")
        )
        ended = command(*own.split(), *(small if own.startswith("eval") else []))
        assert ended.code == 0, ended.output
        assert "nothing found" in ended.output or not own.startswith("audit")
    (row,) = json.loads(out.read_text())["sets"]
    assert row["eval/held_out/accuracy"] <= row["eval/held_out/pass@2"]
    assert (row["eval/held_out/prompts"], row["left_out"]) == (4.0, 0)
    assert "pass@2" in ended.output
