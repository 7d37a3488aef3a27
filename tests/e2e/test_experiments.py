"""Every experiment that comes with the package runs on this machine, on the tiny model.

`sync_ppo` is in `test_whole_system.py`, `async_ppo_critic` in `test_layouts.py`, the demos have files of their own.
"""

from __future__ import annotations

import json
import os
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.load import load_experiment
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.launch.commands.export import main as export
from asyncrl.observe.samples import read_samples, sample_files
from tests.integration.endpoint.test_verifiers import CLASSIC, IMPORTED, V1
from tests.integration.endpoint.test_verifiers_tasksets import has, served

from ..warm import Template, forked

pytestmark = pytest.mark.slow

STEPS = 3
EXPERIMENTS = Path(__file__).parents[2] / "experiments"
EXAMPLE = EXPERIMENTS / "recipes" / "custom_graph_example.py"


OWN_ALGORITHMS = """
from asyncrl.algorithms.advantages import rloo
from asyncrl.algorithms.filters import GroupView, FilterDecision
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput, PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.policy_losses import reinforce
from asyncrl.algorithms.registry import advantage, filter_, policy_loss


@policy_loss("my_loss")
def my_loss(inputs: PolicyLossInputs, *, scale: float = 1.0) -> PolicyLossOutput:
    return PolicyLossOutput(scale * reinforce(inputs).loss_T, inputs.mask_T)


@advantage("my_advantage")
def my_advantage(inputs: AdvantageInputs) -> AdvantageOutput:
    return rloo(inputs)


@filter_("my_filter")
def my_filter(group: GroupView, *, least: float = 0.0) -> FilterDecision:
    return FilterDecision(float(group.rewards_S.mean()) >= least, "mine")
"""


OWN_LOSS = """
from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.policy_losses import reinforce


def by_column(inputs: PolicyLossInputs, *, scale: float = 1.0) -> PolicyLossOutput:
    assert set(inputs.columns) == {"row/index", "reward/zero", "token/place"}
    assert all(column.shape == inputs.logprobs_T.shape for column in inputs.columns.values())
    assert ((inputs.columns["token/place"] > 0) == inputs.mask_T).all()
    return PolicyLossOutput(scale * inputs.columns["reward/zero"] * reinforce(inputs).loss_T, inputs.mask_T)
"""
OWN_COLUMNS = """
from dataclasses import replace

import numpy as np

from asyncrl.plugins.agents.single_turn import SingleTurnAgent


def even(data, completion):
    return {"score": float(completion[:1] in "02468"), "zero": 0.0, "said": completion}


class Placed(SingleTurnAgent):
    async def run(self, prompt, env, client):
        sample = await super().run(prompt, env, client)
        place = np.cumsum(sample.loss_mask).astype(np.float32) * sample.loss_mask
        return replace(sample, token_columns={"place": place})
"""


REWARDS_BY_SOURCE = """
def short(data, completion):
    assert data["source"] == "short"
    return float(completion[:1] in "02468")


def long(data, completion):
    assert data["source"] == "long"
    return 2.0 + float(completion[:1] in "02468")


def every(data, completion):
    return 0.5
"""
MIXTURE = """# Sums of two lengths, with a reward for each, and algorithms of my own
defaults: [async_grpo, _self_]
algorithm:
  plugins: [my_algorithms]
  policy_loss: {name: my_loss, params: {scale: 0.0}}
  advantage: {name: my_advantage}
  kl_coef: 0.0
rollout: {filters: [{name: my_filter, params: {least: 0.6}}]}  # a group without any even digit
dataset:
  sources:
    - {name: short, path: 'asyncrl.plugins.datasets.arithmetic:ArithmeticDataset', args: {max_numbers: 2}}
    - {name: long, path: 'asyncrl.plugins.datasets.arithmetic:ArithmeticDataset', args: {min_numbers: 3}}
rewards:
  - {name: short, path: '${here:}/my_rewards.py:short', sources: [short]}
  - {name: long, path: '${here:}/my_rewards.py:long', sources: [long]}
  - {name: all, path: '${here:}/my_rewards.py:every'}
eval: {path: 'asyncrl.plugins.datasets.arithmetic:ArithmeticDataset'}
"""


def finished(start_run: Any, experiment: str, **overrides: Any) -> Any:
    """A short run of `experiment`, which keeps its own name and η; it has ended well."""
    own = {"experiment_name": experiment, "max_head_offpolicyness": None, "total_train_steps": STEPS}
    run = start_run(experiment, **(own | overrides))
    assert run.wait() == 0, run.output + run.logs()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert run.summary()["books"]["trained"] == STEPS * 4
    assert sum(row["optimizer/steps"] for row in rows) > 0
    return run


def test_async_dapo_trains_no_group_whose_rewards_agree(start_run: Any, tmp_path: Path) -> None:
    (tmp_path / "coin.py").write_text("def even(data, completion):\n    return float(completion[:1] in '02468')\n")
    often = {"reward__path": f"{tmp_path / 'coin.py'}:even", "group_size": 4}  # of two, most groups would agree
    run = finished(start_run, "async_dapo", **often)
    assert {row["reward/frac_zero_std"] for row in run.rows()} == {0.0}
    dropped = run.summary()["books"]["dropped"]["filter: zero_variance"]
    assert 0 < sum(row["filter/dropped_groups"] for row in run.rows()) <= dropped, "the rest after the last step"


def test_teachers_are_roles_servers_or_the_policy_itself_with_a_hint(start_run: Any, tiny_model: Path) -> None:
    """One model as a role of the trainer, on ranks of its own, and on a server: they say the same of an answer."""
    teachers = (
        f"[{{name: role, path: {tiny_model}, ranks: own}}, {{name: server, policy: big, coef: 0.5}}, "
        "{name: hinted, column: token/hinted}]"
    )
    run = finished(
        start_run,
        "self_distill",
        algorithm__teachers=teachers,
        policies=f"[{{name: big, path: {tiny_model}}}]",
        agent__args__teacher="''",
        optimizer__lr=1e-2,
        max_head_offpolicyness=0,
    )
    rows = run.rows()
    for row in rows:
        assert row["kl/teacher/role"] == pytest.approx(row["kl/teacher/server"], abs=1e-5)
        assert row["kl/teacher/hinted"] != row["kl/teacher/server"]
    assert abs(rows[0]["kl/teacher/role"]) < abs(rows[-1]["kl/teacher/role"]), "the policy has left where it began"


def test_custom_graph_runs_its_own_calls_and_a_second_reward_model(
    start_run: Any, tiny_model: Path, tmp_path: Path
) -> None:
    judge = tmp_path / "judge"
    runpy.run_path(str(EXAMPLE))["make_untrained_reward_model"](str(tiny_model), str(judge))
    rows = finished(start_run, "custom_graph", algorithm__graph_args__style_model=judge).rows()
    assert all(0 < row["reward/length_penalty"] <= 0.1 for row in rows)
    assert len({row["reward/style_scores"] for row in rows}) == STEPS


def test_gsm8k_chat_trains_a_chat_model_on_rows_of_its_form(
    start_run: Any, tiny_chat_model: Path, tmp_path: Path
) -> None:
    """An untrained model answers nothing right; that an answer has an odd number of letters it learns to say."""
    (tmp_path / "odd.py").write_text("def odd(data, completion):\n    return float(len(completion) % 2)\n")
    run = finished(
        start_run,
        "gsm8k_chat",
        model__path=tiny_chat_model,
        dataset__max_prompt_tokens=256,
        generation__max_total_tokens=8192,
        eval__interval=None,
        checkpoint__keep_best="null",
        rewards=f"[{{name: odd, path: '{tmp_path / 'odd.py'}:odd'}}, "
        "{name: right, path: 'asyncrl.plugins.rewards.math_answer:math_answer_reward'}]",
        reward__path=None,
    )
    assert "first prompt," in run.output
    assert (
        "<|im_start|>system\nReason step by step, and put your final answer within \\boxed{}.<|im_end|>" in run.output
    )
    last = run.summary()["eval"]["gsm8k"]
    assert last["version"] == STEPS
    assert 0 < last["prompts"] < 24
    assert {"accuracy", "reward_mean"} <= last.keys()
    assert all(row["reward/right"] <= row["reward/odd"] <= 1 for row in run.rows())


def test_own_model_trains_a_model_on_rows_of_ones_own_within_its_limits(
    start_run: Any, tiny_chat_model: Path, tmp_path: Path
) -> None:
    rows = EXPERIMENTS / "gsm8k_rows.jsonl"
    (tmp_path / "odd.py").write_text("def odd(data, completion):\n    return float(len(completion) % 2)\n")
    run = finished(
        start_run,
        "own_model",
        model__path=tiny_chat_model,
        dataset__path=rows,
        dataset__args="{held_out_share: 0.1}",
        dataset__max_prompt_tokens=None,
        rollout__sampling__max_new_tokens=None,
        generation__max_total_tokens=None,
        eval__interval=None,
        optimizer__lr=None,
        reward__path=f"{tmp_path / 'odd.py'}:odd",
    )
    assert run.summary()["eval"]["held_out"]["version"] == STEPS
    assert max(row["rollout/len_max"] for row in run.rows()) > 112, "longer than the demo's answers"


def test_supervised_training_on_conversations_tells_what_carries_loss_and_the_held_out_loss(
    tiny_chat_model: Path, command: Any, tmp_path: Path
) -> None:
    rows = (EXPERIMENTS / "gsm8k_rows.jsonl").read_text(encoding="utf-8").splitlines()
    data = tmp_path / "chat.jsonl"
    turns = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        for row in map(json.loads, rows)
    ]
    data.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns), encoding="utf-8")
    settings = [f"model.path={tiny_chat_model}", f"dataset.path={data}", "dataset.args.held_out_share=0.2"]
    settings += ["batch_size=8", "phases=[{steps: 30}]", "eval.interval=10", f"fileroot={tmp_path}", "warmup_steps=3"]
    done = command("sft", *settings)
    assert done.code == 0, done.output
    assert "tokens carry loss" in done.output
    assert "<|im_start|>assistant\n⟦" in done.output
    losses = [float(line.rpartition(" ")[2]) for line in done.output.splitlines() if "held-out loss" in line]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    (folder,) = (path for path in (tmp_path / "models").iterdir() if path.is_dir())
    measured = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in measured if row["held_out_loss"] is not None] == [10, 20, 30]
    assert load_tokenizer(folder).encode("<|im_end|>") == [2]


SUMS = """
import os, signal, sys
from pathlib import Path


class Sums:
    "The second rank dies once, while it reads the 52nd row: in step 8, of batches of 7."

    def __init__(self, split, seed):
        self.read = 0

    def __len__(self):
        return 40

    def row(self, index):
        self.read += 1
        once = Path(__file__).with_name("died")
        if self.read == 52 and len(sys.argv) > 3 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"prompt": f"{index}+1="}

    def demonstration(self, row):
        return "7" * (len(row["prompt"]) % 3 + 1)
"""


def test_supervised_training_on_two_ranks_goes_on_after_one_was_killed_with_the_losses_of_one_rank(
    command: Any, tmp_path: Path
) -> None:
    from asyncrl.trainer.supervised.settings import SFTConfig
    from asyncrl.trainer.supervised.supervised_loop import make_base_model  # which loads torch

    (tmp_path / "sums.py").write_text(SUMS)
    settings = [f"dataset.path={tmp_path / 'sums.py'}:Sums", "optimizer=adamw", "adamw_lr=3e-3", "warmup_steps=2"]
    settings += ["batch_size=7", "phases=[{steps: 10}]", "checkpoint.interval=3", f"fileroot={tmp_path / 'two'}"]
    killed = command("sft", *settings, "trainer.parallel=d2")
    assert killed.code == 1
    assert (tmp_path / "died").exists()
    assert "the base model's training exited with 1" in killed.output
    resumed = command("sft", *settings, "trainer.parallel=d2")
    assert resumed.code == 0, resumed.output
    assert "continuing after step 6 of 10" in resumed.output

    alone = load_experiment("sft", settings, None)
    assert isinstance(alone, SFTConfig)
    whole = make_base_model(alone, tmp_path / "whole")
    (folder,) = (path for path in (tmp_path / "two" / "models").iterdir() if (path / "training.json").is_file())
    two, one = (
        [json.loads(line) for line in (at / "metrics.jsonl").read_text().splitlines()] for at in (folder, whole)
    )
    assert [row["step"] for row in two] == list(range(1, 11))
    # Sums in another order are rounded otherwise, and Adam makes more of that: 6e-6 by step 10. A step changes 1e-1.
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], abs=1e-4)
    assert export(["--step", "9", f"{folder}.run", str(tmp_path / "ninth")], "asyncrl") == 0
    assert (tmp_path / "ninth" / "model.safetensors").is_file()


def test_an_experiment_of_ones_own_has_algorithms_of_ones_package_and_rewards_for_each_source_of_its_data(
    start_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's algorithms are known by their registered names."""
    folder, package = tmp_path / "mine", tmp_path / "lib" / "my_algorithms"
    for each in (folder, package):
        each.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "all_of_mine.py").write_text(OWN_ALGORITHMS)
    monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)
    (folder / "my_rewards.py").write_text(REWARDS_BY_SOURCE)
    (folder / "my_mixture.yaml").write_text(MIXTURE)
    run = finished(
        start_run,
        f"my_mixture --config-dir {folder}",
        experiment_name="my_mixture",
        reward__path=None,
        samples__every=1,
    )
    rows = run.rows()
    assert {row["grad_norm"] for row in rows} == {0.0}
    assert run.summary()["books"]["dropped"]["filter: mine"] > 0
    assert all(row.get("reward/short", 0) <= 1 < 2 <= row.get("reward/long", 2) for row in rows), "own rows alone"
    kept = list(read_samples(sample_files(run.run_dir / "samples")))
    rewards = {row["reward"] for row in kept}
    assert rewards <= {0.5, 1.5, 2.5, 3.5}, "what the rewards of its source say, and 0.5 of the reward of all rows"
    assert min(rewards) < 2 < max(rewards), "rows of both sources"
    assert run.summary()["eval"]["held_out"]["reward_mean"] == 0.5, "its rows are of neither source"


def test_a_loss_reads_columns_of_the_row_the_reward_and_the_agent_of_unshuffled_data(
    start_run: Any, command: Any, tmp_path: Path
) -> None:
    (tmp_path / "my_loss.py").write_text(OWN_LOSS)
    (tmp_path / "columns.py").write_text(OWN_COLUMNS)
    settings = {
        "agent__path": f"{tmp_path / 'columns.py'}:Placed",
        "reward__path": f"{tmp_path / 'columns.py'}:even",
        "algorithm__policy_loss__name": f"{tmp_path / 'my_loss.py'}:by_column",
        "algorithm__policy_loss__params": "{scale: 2.0}",
        "rollout__columns": "[row/index, reward/zero, token/place]",
        "rollout__filters": "[{name: success_rate, params: {on: reward/zero, high: 0.5}}]",
        "trainer__parallel": "d2",
        "samples__every": 1,
        "dataset__shuffle": "false",
    }
    run = finished(start_run, "async_ppo", **settings)
    assert {row["grad_norm"] for row in run.rows()} == {0.0}, "the factor of the loss is the reward's zero"
    assert all(row["reward/zero"] == 0.0 == row["data/epoch"] for row in run.rows())
    audited = command("audit", run.run_dir)
    assert audited.code == 0, audited.output
    shown = command("show", run.run_dir)
    assert "e0-0" in shown.output, "rows come in their order"


def test_a_gymnasium_game_is_played_in_turns_that_have_their_own_rewards(start_run: Any) -> None:
    run = finished(start_run, "gymnasium_frozen_lake", total_train_steps=STEPS)
    rows = run.rows()
    assert all(1 <= row["agent/turns"] <= 12 for row in rows)
    assert all(row["reward/mean"] == pytest.approx(row["agent/return"]) for row in rows)
    assert all(row["rollout/env_s"] > 0 for row in rows)
    assert any(row["agent/turns"] > 1 for row in rows)


def test_who_answers_wrongly_tries_again(start_run: Any) -> None:
    remax = {"algorithm__advantage__name": "remax", "trainer__ppo_minibatches": 2, "trainer__ppo_epochs": 2}
    rows = finished(start_run, "several_turns", **remax).rows()
    turns = [row["agent/turns"] for row in rows]
    assert all(1.0 < each <= 2.0 for each in turns), turns
    assert all(0.0 <= row["agent/greedy_reward"] <= 1.0 for row in rows), "played for remax beside each group"
    assert all(len(row["ppo/loss_per_minibatch"]) == 4 for row in rows), "two minibatches in each of two passes"


def test_a_rollout_function_may_answer_more_than_once(start_run: Any) -> None:
    rows = finished(start_run, "custom_rollout", trainer__ppo_minibatches=2).rows()
    assert all(1.0 < row["rollout/samples_per_episode"] <= 2.0 for row in rows)


OWN_EPISODES = """
from dataclasses import replace

from asyncrl.api import GenerationRequest


async def run(prompt, env, client):
    "A game of the policy with itself: none, one, two or three players ask from the beginning; the rewards' sum is 0."
    if prompt.order % 4 == 0 and prompt.member == 0:
        return None
    for number in range(1 + prompt.member % 3):
        await client.generate(GenerationRequest(f"{prompt.member}/{number}", prompt.input_ids, 1, prompt.sampling))
    first, *others = client.samples()
    if not others:
        return [first]
    won = 1.0 if len(first.tokens) > len(others[0].tokens) else -1.0
    return [replace(first, reward=won), replace(others[0], reward=-won), *others[1:]]
"""


def test_async_grpo_plays_a_zero_sum_game_with_bounded_advantages_and_measures_its_distance_from_the_frozen_base(
    start_run: Any, tmp_path: Path
) -> None:
    """Episodes have any number of samples."""
    (tmp_path / "mine.py").write_text(OWN_EPISODES)
    own = {"agent__path": f"{tmp_path / 'mine.py'}:run", "trainer__ppo_minibatches": 2, "optimizer__lr": 1e-3}
    rows = finished(start_run, "async_grpo", **own).rows()
    assert 0 < rows[0]["kl/reference"] < rows[-1]["kl/reference"]
    assert {row["reward/mean"] for row in rows} == {0.0}
    assert all(row["reward/frac_zero_std"] < 1.0 for row in rows)
    assert all(0.0 < row["advantage/abs_mean"] < 2.0 for row in rows), "not 1e6, as a deviation of episode means gives"
    assert all(1.0 < row["rollout/samples_per_episode"] <= 2.0 for row in rows)
    assert any(not row["rollout/samples_per_episode"].is_integer() for row in rows), "one and two in one step"


OWN_ROLES = """
from dataclasses import replace

from asyncrl.api import GenerationRequest


def run(prompt, env, client):
    "A zero-sum game between two roles of the policy: the longer answer wins."
    samples = []
    for role in ("first", "second"):
        player = client.conversation(role)
        player.generate(GenerationRequest(role, prompt.input_ids, 1, prompt.sampling))
        samples += player.samples()
    won = 1.0 if len(samples[0].tokens) > len(samples[1].tokens) else -1.0
    return [replace(sample, reward=reward) for sample, reward in zip(samples, (won, -won))]
"""


def test_roles_are_compared_with_their_own_past(start_run: Any, command: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_ROLES)
    run = finished(
        start_run,
        "async_grpo",
        agent__path=f"{tmp_path / 'mine.py'}:run",
        algorithm__advantage__name="rae",
        trainer__parallel="d2",
        trainer__ppo_minibatches=2,
        samples__every=1,
    )
    rows = run.rows()
    assert {row["reward/mean"] for row in rows} == {0.0}
    first = [row["reward/role/first"] for row in rows]
    assert [-row["reward/role/second"] for row in rows] == pytest.approx(first)
    assert any(first), "second wins a draw"
    assert all(row["rollout/samples_per_episode"] == 2.0 for row in rows)
    assert command("audit", run.run_dir).code == 0
    kept = read_samples(sample_files(run.run_dir / "samples"), ["group"])
    assert {row["group"] for row in kept} == {"first", "second"}
    expected = 0.0
    for mean in first:
        expected = 0.95**8 * expected + (1 - 0.95**8) * mean
    texts = [path.read_text() for path in run.run_dir.glob("checkpoints/*/*.json")]
    found = [json.loads(text)["train_state"]["baselines"] for text in texts if '"baselines"' in text]
    assert pytest.approx({"first": expected, "second": -expected}) in found, "of the newest checkpoint"


OWN_MATCH = """
from dataclasses import replace

from asyncrl.api import GenerationRequest


async def run(prompt, env, client):
    async def said(player, tokens):
        request = GenerationRequest(prompt.prompt_id, tuple(tokens), 1, prompt.sampling)
        return (await player.generate(request)).completions[0]

    mine = await said(client, prompt.input_ids)
    past = await said(client.policy("past"), prompt.input_ids)
    judge = await said(client.policy("judge"), prompt.input_ids)
    assert {past.policy, judge.policy} == {"past", "judge"} and len(set(past.versions)) <= 1
    won = float(len(mine.token_ids) > len(past.token_ids))
    return [replace(sample, metrics={"won/past": won}) for sample in client.samples(won)]
"""


def test_a_policy_plays_against_opponents_of_older_versions_over_a_death_and_a_restart(
    start_run: Any, command: Any, tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "mine.py").write_text(OWN_MATCH)
    settings = {
        "experiment_name": "async_grpo",
        "agent__path": f"{tmp_path / 'mine.py'}:run",
        "policies": "[{name: past, versions: {every: 2, keep: 2, pick: prioritised}}, "
        f"{{name: judge, path: {tiny_model}}}]",
        "rollout__sampling__max_new_tokens": 12,
    }
    first = start_run("async_grpo", **settings, total_train_steps=6)
    first.wait_for_step(3)
    first.worker("policy_server/0").kill()
    assert first.wait() == 0, first.output + first.logs()
    second = start_run("async_grpo", **settings, total_train_steps=9)
    assert second.wait() == 0, second.output + second.logs()
    rows = second.rows()
    assert [row["step"] for row in rows] == list(range(1, 10))
    met = [row["policy_server/past/newest_version"] for row in rows if "policy_server/past/newest_version" in row]
    assert met[0] == 0, "the initial model, until a version joins the pool"
    assert met[-1] >= 2
    trained = [
        line
        for file in sorted((second.run_dir / "ledger").iterdir())
        for line in map(json.loads, file.read_text().splitlines())
        if line["kind"] == "trained"
    ]
    assert all(line["opponents"]["judge"] == [0, 0] for line in trained)
    versions = {version for line in trained for version in line["opponents"]["past"]}
    assert versions <= {0, 2, 4, 6, 8}
    assert len(versions) > 1
    (state,) = (second.run_dir / "checkpoints" / "v9").glob("state.json")
    games = json.loads(state.read_text())["master_state"]["win_rates"]["games"]["past"]
    met_one = Counter(line["opponents"]["past"][0] for line in trained if len({*line["opponents"]["past"]}) == 1)
    assert {member: count for member, _, count in games} == {each: met_one[each] for each in (0, 6, 8) if met_one[each]}
    kept = {folder.name for folder in (second.run_dir / "weights" / "actor").iterdir()}
    assert {"v6", "v8"} <= kept
    assert not {"v1", "v2", "v3", "v5"} & kept
    assert command("audit", second.run_dir).code == 0


def test_an_agent_that_imports_only_openai_trains(start_run: Any) -> None:
    run = finished(start_run, "openai_agent")
    assert not any(reason.startswith("failed") for reason in run.summary()["books"]["dropped"]), run.logs()
    assert all(row["reward/mean"] > 0 for row in run.rows())


@pytest.mark.verifiers
@pytest.mark.skipif(not CLASSIC, reason="no verifiers 0.2")
def test_an_environment_of_verifiers_trains(start_run: Any, template: Template | None, tmp_path: Path) -> None:
    with forked(template, CLASSIC, IMPORTED[CLASSIC], tmp_path) as python:
        run = finished(start_run, "verifiers_env", agent__args__python=python, reward__path=None)
    assert not any(reason.startswith("failed") for reason in run.summary()["books"]["dropped"]), run.logs()
    for row in run.rows():
        assert 0 < row["reward/right"] == pytest.approx(row["reward/mean"], abs=0.2)
        assert row["agent/length"] > 0


@pytest.mark.verifiers
@pytest.mark.skipif(not V1 or not has("openenv"), reason="no openenv beside verifiers 0.4")
def test_a_game_of_an_openenv_server_trains(
    start_run: Any, tiny_chat_model: Path, template: Template | None, tmp_path: Path
) -> None:
    with (
        forked(template, V1, IMPORTED[V1], tmp_path) as python,
        served("verifiers_openenv_server.py") as url,
    ):
        run = start_run(
            "verifiers_openenv",
            model__path=tiny_chat_model,
            agent__args__python=python,
            agent__args__args__taskset__base_url=url,
            total_train_steps=2,
            train_batch_size=1,
            group_size=2,
            trainer__ppo_minibatches=1,
            rollout__max_concurrent=1,
            rollout__sampling__max_new_tokens=8,
            max_head_offpolicyness=1,
            dataset__max_prompt_tokens=None,
            generation__max_total_tokens=16384,
            eval__interval=0,
            reward__path=None,
        )
        assert run.wait() == 0, run.output + run.logs()
    assert [row["step"] for row in run.rows()] == [1, 2]
    assert run.summary()["books"]["dropped"] == {}
    assert all(0 < row["reward/openenv_reward"] == pytest.approx(row["reward/mean"]) for row in run.rows())
    assert "no held-out rows" not in run.output + run.logs()
