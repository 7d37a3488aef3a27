"""Evaluation with real processes: of several sets during a run, and by the command of a run.

That the command evaluates a folder, `tests/faults/test_resume.py` shows, as the tutorial does.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.launch.__main__ import main
from asyncrl.observe.samples import answer_files, read_samples

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.slow

CODE = """
from dataclasses import replace

from asyncrl.plugins.agents.single_turn import SingleTurnAgent


def half(data, completion):
    return 0.5


class Marking(SingleTurnAgent):
    async def run(self, prompt, env, client):
        return replace(await super().run(prompt, env, client), metrics={"marked": 1.0})
"""
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 5) for b in range(1, 4)]
GRADED = """
def graded(data, completion):
    if data.get("broken"):
        raise RuntimeError("no reference answer")
    return sum(character in "02468" for character in completion) / max(1, len(completion))
"""


def test_a_run_evaluates_its_sets_and_the_command_measures_the_same_of_its_weights(
    start_run: Any, command: Any, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join(json.dumps(row | {"broken": True}) + "\n" for row in ROWS))
    (tmp_path / "graded.py").write_text(GRADED)
    code = tmp_path / "code.py"
    code.write_text(CODE)
    graded = f"{{name: graded, path: {rows}, reward: {{path: '{code}:half'}}, agent: {{path: '{code}:Marking'}}}}"
    sets = f"[{graded}, {{name: own, path: {rows}}}, {{name: sampled, path: {rows}, interval: 2, n_samples: 3, "
    sets += f"sampling: {{temperature: 1.0, max_new_tokens: 4}}}}, {{name: broken, path: {bad}}}]"
    run = start_run(
        total_train_steps=2,
        eval__interval=1,
        eval__sets=sets,
        samples__eval_every=1,
        generation__context_length=0,
        rollout__workers=2,
        reward__path=f"{tmp_path / 'graded.py'}:graded",
    )
    assert run.wait() == 0, run.output + run.logs()
    by_step = {row["step"]: row for row in run.metrics()}
    assert "eval/own/accuracy" not in by_step[2], "the reward is a grade"
    assert [step for step, row in by_step.items() if "eval/sampled/reward_mean" in row] == [0, 2]
    assert by_step[2]["eval/own/prompts"] == 8.0
    assert by_step[2]["eval/sampled/len_mean"] <= 4.0
    summary = run.summary()
    assert {item["set"] for item in summary["evaluations_failed"]} == {"broken"}, "its reward fails"
    assert "FAILED     evaluation of version 2 on broken" in run.output
    assert "the evaluation of version 1 on broken failed" in run.output

    assert (by_step[2]["eval/graded/reward_mean"], by_step[2]["eval/graded/agent/marked"]) == (0.5, 1.0)
    assert "eval/own/agent/marked" not in by_step[2]
    kept = list(read_samples(answer_files(run.run_dir / "eval_samples")))
    own = [row for row in kept if (row["set"], row["step"]) == ("own", 2)]
    assert sorted(row["order"] for row in own) == list(range(8))
    assert sum(row["total_reward"] for row in own) / 8 == pytest.approx(by_step[2]["eval/own/reward_mean"])
    assert {row["step"] for row in kept if row["set"] == "sampled"} == {0, 2}
    assert {row["episode"] for row in kept if row["set"] == "sampled"} == {0, 1, 2}
    shown = command("show", run.run_dir, "--eval", "own", "--step", 2, "-n", 0)
    assert shown.output.count("version 2  own-") == 8

    out, answers = tmp_path / "out.json", tmp_path / "answers.jsonl"
    done = command("eval", run.run_dir, "--step", 2, "--out", out, "--out", answers)
    assert done.code == 1, "a set failed"
    measured = {row["set"]: row for row in json.loads(out.read_text())["sets"]}
    for name in ("own", "sampled"):
        for metric in ("reward_mean", "len_mean", "truncated", "prompts"):
            key = f"eval/{name}/{metric}"
            assert measured[name][key] == pytest.approx(by_step[2][key]), f"{key}: {done.output}"
    assert "failed" in measured["broken"]
    assert "logs are in" in done.output
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert Counter(line["set"] for line in lines) == {"graded": 8, "own": 8, "sampled": 24}
    for name in ("graded", "own"):
        rewards = [line["reward"] for line in lines if line["set"] == name]
        assert sum(rewards) / 8 == pytest.approx(measured[name][f"eval/{name}/reward_mean"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "'/nowhere' is not a run"),
        (["{model}"], "--experiment: name an experiment"),
        (["{model}", "--experiment", "sft"], "--experiment sft: supervised"),
        (["{model}", "--experiment", "async_ppo", "--step", "3"], "is not a run and has no steps"),
        (["{model}", "--experiment", "async_ppo", "eval.size=0"], "eval.size=0"),
        (["{model}", "--experiment", "async_ppo", "--out", "result.csv"], "--out result.csv: name a file that ends in"),
        (["{model}", "--experiment", "async_ppo", "--out", "/nowhere/a.json"], "its folder is not there"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_a_line(
    arguments: list[str], message: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *(argument.format(model=tiny_model) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err
