"""Several trained policies: each trains on its own samples, with its own settings, as the reference loop has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from asyncrl.algorithms.registry import Choice, ObjectiveSpec, ValueNormalisation
from asyncrl.api import Agent, ChatClient, Environment, GenerationRequest, Prompt, Sample, SamplingParams, Trajectory
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.catalog import known
from asyncrl.config.setting import ChoiceConfig, ConfigError
from asyncrl.config.variants import config_of_policy, policy_and_role, role_of_policy
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.manager.settings import PolicyConfig
from asyncrl.master.graph import load_graph
from asyncrl.master.step import Dealing, assign, column_moves
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.reference import Actor, ReferenceConfig, ReferenceTrainer, StepReport
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.functions.model_functions import CallContext, find_function, run_call
from asyncrl.trainer.model.load_models import load_causal_lm
from asyncrl.trainer.parallel.placement import layout_setting, model_of, placement, role_placement
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.rank.inbox import record_of
from asyncrl.trainer.rank.requests import parts_of_policies
from asyncrl.trainer.rank.training_rank import TrainingRank, build_rank
from asyncrl.trainer.settings import LearningRateSchedule, OptimizerConfig, RoleRanks
from asyncrl.weights.checkpoints import read_state

CONFIG = ReferenceConfig(
    seed=3, train_batch_size=4, group_size=4, ppo_minibatches=2, lr=1e-2, sampling=SamplingParams(max_new_tokens=8)
)


class Match(Agent):
    """The judge reads prompt and answer; it is paid for long verdicts, the policy for short ones."""

    async def run(self, prompt: Prompt, env: Environment, client: ChatClient) -> list[Sample]:
        judge, name = client.policy("judge"), f"{prompt.prompt_id}/{prompt.member}"
        result = await client.generate(GenerationRequest(name, prompt.input_ids, 1, prompt.sampling))
        read = (*prompt.input_ids, *result.completions[0].token_ids)
        result = await judge.generate(GenerationRequest(f"{name}/judge", read, 1, prompt.sampling))
        paid = float(len(result.completions[0].token_ids))
        return client.samples(-paid) + judge.samples(paid)


class OwnSamplesAlone(Match):
    async def run(self, prompt: Prompt, env: Environment, client: ChatClient) -> list[Sample]:
        return [sample for sample in await super().run(prompt, env, client) if not sample.group]


def loop_of(folder: Path, own: ReferenceConfig, judge: ReferenceConfig, agent: Agent) -> ReferenceTrainer:
    model, other = (load_causal_lm(folder, "float32", "eager", torch.device("cpu")) for _ in range(2))
    return ReferenceTrainer(
        own,
        model,
        PromptFormat(load_tokenizer(folder), None),
        ArithmeticDataset(num_rows=64, max_numbers=3),
        lambda data, completion: 0.0,
        agent,
        {"judge": Actor(judge, other)},
    )


def reports_of(folder: Path, own: ReferenceConfig, judge: ReferenceConfig, agent: Agent) -> list[StepReport]:
    loop = loop_of(folder, own, judge, agent)
    return [loop.train_step() for _ in range(2)]


@pytest.mark.parametrize("loss", sorted(known("policy_loss")))
def test_a_policy_with_learning_rate_0_is_a_frozen_one(qwen_dir: Path, loss: str) -> None:
    own = replace(CONFIG, objective=ObjectiveSpec(policy_loss=Choice(loss)))
    still = reports_of(qwen_dir, own, replace(own, lr=0.0), Match())
    frozen = reports_of(qwen_dir, own, own, OwnSamplesAlone())
    moving = reports_of(qwen_dir, own, own, Match())
    assert [report.losses for report in still] == [report.losses for report in frozen]
    assert [report.losses for report in still] != [report.losses for report in moving]
    assert all(max(report.others["judge"].grad_norms) > 1e-3 for report in still)
    assert all(report.others["judge"].losses == () for report in frozen), "without a sample there is no step"


def with_judge(config: ExperimentConfig, **settings: object) -> ExperimentConfig:
    return replace(config, policies=[PolicyConfig("judge", trained=True, **settings)])  # type: ignore[arg-type]


def test_a_policy_has_the_runs_settings_but_for_what_it_sets_itself(config: ExperimentConfig, llama_dir: Path) -> None:
    run = with_judge(config, path=str(llama_dir), optimizer={"lr": 0.5}, algorithm={"reference": {"path": "/r"}})
    own = config_of_policy(run, "judge")
    assert (own.optimizer.lr, own.optimizer.beta2) == (0.5, config.optimizer.beta2)
    assert (own.algorithm.reference.path, own.algorithm.graph) == ("/r", config.algorithm.graph)
    assert own.model.path == str(llama_dir)
    assert config_of_policy(run, "") is run
    for settings, message in (({"lrr": 1}, "lrr"), ({"lr": "fast"}, "fast")):
        with pytest.raises(ConfigError, match=f"policies: 'judge': optimizer.*{message}"):
            config_of_policy(with_judge(config, optimizer=settings), "judge")


def test_the_schedule_counts_the_steps_that_train_the_policy(config: ExperimentConfig) -> None:
    run = with_judge(replace(config, total_train_steps=7), train_every=3, train_offset=1)
    run.optimizer = OptimizerConfig(lr=1.0, schedule=LearningRateSchedule.linear)
    judge = config_of_policy(run, "judge")
    assert [run.learning_rate(version) for version in (0, 7)] == [1.0, 0.0]
    rates = [judge.learning_rate(version, share) for version in range(7) for share in (0.0, 0.5)]
    assert rates == [1.0, 1.0, 1.0, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0]  # from versions 1 and 4
    assert [run.policies_out_of_phase(version) for version in (0, 1)] == [{"judge"}, set()]


def test_the_graph_has_the_calls_of_each_policy_with_roles_of_its_own(
    config: ExperimentConfig, llama_dir: Path
) -> None:
    run = with_judge(config, path=str(llama_dir), algorithm={"kl_coef": 0.1, "prox": "behave"})
    graph = load_graph(run)
    assert graph.calls[: len(load_graph(config).calls)] == load_graph(config).calls
    own = [call for call in graph.calls if call.policy == "judge"]
    assert [(call.name, call.role) for call in own] == [
        ("judge/ref_inf", "judge/ref"),
        ("judge/advantage", "judge"),
        ("judge/actor_train", "judge"),
    ]
    crossing = [edge for edge in graph.edges() if ("judge" in edge.source) != ("judge" in edge.target)]
    assert crossing == [], "keys pass within a policy"
    assert [policy_and_role(run, role) for role in ("ref", "judge", "judge/ref")] == [
        ("", "ref"),
        ("judge", "actor"),
        ("judge", "ref"),
    ]
    assert role_of_policy("", "actor") == "actor"
    assert model_of(run, graph, "judge/ref") == str(llama_dir)
    assert role_placement(run, "judge")[1].parallel is None
    assert set(placement(run, graph).grids.values()) == {placement(run, graph).actor}


def test_a_policy_and_its_roles_have_ranks_of_their_own_where_it_asks_for_them(
    config: ExperimentConfig, llama_dir: Path
) -> None:
    algorithm = {"graph": "ppo", "kl_coef": 0.1, "critic": {"parallel": "t2"}, "reference": {"ranks": "own"}}
    config.trainer.parallel, config.algorithm.kl_coef = "d3", 0.1
    run = with_judge(config, path=str(llama_dir), ranks=RoleRanks.own, parallel="d2", algorithm=algorithm)
    placed = placement(run)
    assert {role: (str(grid.layout), [*grid.members]) for role, grid in placed.grids.items()} == {
        "actor": ("d3", [0, 1, 2]),
        "judge": ("d2", [3, 4]),
        "ref": ("d3", [0, 1, 2]),
        "judge/ref": ("d2", [5, 6]),
        "judge/critic": ("t2", [3, 4]),
    }
    assert {role: layout_setting(run, role) for role in placed.roles} == {
        "actor": "trainer.parallel",
        "judge": "policies.judge.parallel",
        "ref": "trainer.parallel",
        "judge/ref": "policies.judge.algorithm.reference.parallel",
        "judge/critic": "policies.judge.algorithm.critic.parallel",
    }
    assert layout_setting(with_judge(config), "judge") == "trainer.parallel"
    assert layout_setting(with_judge(config, ranks=RoleRanks.own), "judge/ref") == "policies.judge.parallel"


def test_a_shared_critic_values_the_samples_of_all_before_it_is_trained_on_any(config: ExperimentConfig) -> None:
    config.algorithm.graph, config.algorithm.advantage = "ppo", ChoiceConfig("gae")
    run = with_judge(config, shared_critic=True, ranks=RoleRanks.own, train_every=2)
    order = [call.name for call in load_graph(run).order() if call.role == "critic"]
    assert order == ["critic_inf", "judge/critic_inf", "critic_train", "judge/critic_train"]
    before = load_graph(run).predecessors()
    assert before["critic_train"] >= {"critic_inf", "judge/critic_inf"}
    assert before["judge/critic_train"] >= {"judge/critic_inf", "critic_train"}
    assert placement(run).grids["critic"] == placement(run).actor
    run.algorithm.critic.optimizer = OptimizerConfig(lr=1.0, schedule=LearningRateSchedule.linear)
    run = replace(run, total_train_steps=4)  # two policies train the critic in steps 0 and 2, one in 1 and 3
    assert [6 * run.critic_learning_rate(version) for version in range(5)] == pytest.approx([6, 4, 3, 1, 0])
    assert 6 * run.critic_learning_rate(0, 0.5) == pytest.approx(5)
    moves = column_moves(load_graph(run), placement(run).grids)
    assert {(move.keys, move.policy) for each in moves.values() for move in each} == {
        (("values",), "judge"),
        (("returns", "value_mask"), "judge"),
    }


def test_a_shared_critic_is_one_model_with_one_normalisation(config: ExperimentConfig) -> None:
    config.algorithm.graph, config.algorithm.advantage = "ppo", ChoiceConfig("gae")
    config.algorithm.critic.value_norm = ValueNormalisation.running
    run = with_judge(config, shared_critic=True, algorithm={"aggregation": {"name": "seq_mean_token_mean"}})
    rank = build_rank(run, load_graph(run), World(), torch.device("cpu"))
    assert [*rank.engines] == ["actor", "judge", "critic"]
    assert rank.engines_of("judge") == {"actor": rank.engines["judge"], "critic": rank.engines["critic"]}
    assert rank.states["judge"].value_norm is rank.states[""].value_norm is not None
    assert rank.changing == ("actor", "judge", "critic")


def sample(reward: float, group: str = "", episode: int = 0) -> Sample:
    tokens = np.array([1, 2], np.int32)
    return Sample(
        tokens,
        np.array([0, 1], np.uint8),
        np.zeros(2, np.float32),
        np.array([-1, 0], np.int32),
        reward,
        group=group,
        episode=episode,
    )


def rollout(number: int, *samples: Sample) -> Trajectory:
    return Trajectory(f"r{number}", f"p{number}", number, samples)


def test_each_policy_gets_its_own_samples_in_minibatches_of_its_own() -> None:
    both = [sample(0.0), sample(0.0, episode=1), sample(0.0, "judge"), sample(1.0, "judge", 1)]
    own = [sample(0.0), sample(1.0, episode=1)]
    rollouts = [rollout(0, *own), rollout(1, *both), rollout(2, *own), rollout(3, *both)]
    dealing = Dealing(2, 2, seed=5, policies=("judge",))
    records = [record_of(each, 0) for each in rollouts]
    assert [record.has_signal_of("judge", ("judge",)) for record in records] == [False, True, False, True]
    assert [record.has_signal_of("", ("judge",)) for record in records] == [True, False, True, False]
    dealt = [each.minibatches for each in assign(records, 1, dealing, 0)]
    alone = [each.minibatches for each in assign(records, 1, replace(dealing, policies=()), 0)]
    parts = list(parts_of_policies(rollouts, dealt, dealing.policies))
    assert [part.policy for part in parts] == ["", "judge"]
    assert [each.rollout_id for each in parts[0].trajectories] == ["r0", "r1", "r2", "r3"]
    assert [each.rollout_id for each in parts[1].trajectories] == ["r1", "r3"]
    assert {each.group for part in parts[1].trajectories for each in part.samples} == {"judge"}
    assert {each.group for part in parts[0].trajectories for each in part.samples} == {""}
    assert len(alone[0]) == 2
    for number in range(2):  # of two passes: rollouts with a signal are dealt evenly, of each policy
        assert {parts[0].minibatches[row][number] for row in (0, 2)} == {2 * number, 2 * number + 1}
        assert {steps[number] for steps in parts[1].minibatches} == {2 * number, 2 * number + 1}
    (whole,) = parts_of_policies(rollouts, alone, ())
    assert whole.trajectories is rollouts


REWARDED = """
from asyncrl.master.graph import Call, Graph, POLICY_READS


def graph(config, path):
    return Graph("rewarded", (
        Call("score", "scorer", "reward", reads=("tokens", "loss_mask"), writes=("scores",), args={"path": path}),
        Call("advantage", "actor", "advantage", reads=("rewards", "scores", "loss_mask"), writes=("advantages",),
             args={"rewards": ["rewards", "scores"]}),
        Call("actor_train", "actor", "actor_train", reads=(*POLICY_READS, "scores")),
    ))
"""


@pytest.mark.parametrize("graph", ["ppo", "rewarded"])
def test_a_policy_is_trained_as_by_a_run_of_its_own(
    graph: str, config: ExperimentConfig, llama_dir: Path, make_batch: Callable[..., StepBatch], tmp_path: Path
) -> None:
    algorithm: dict[str, object] = {"graph": graph, "kl_coef": 0.1, "advantage": {"name": "gae"}}
    if graph == "rewarded":
        (tmp_path / "own.py").write_text(REWARDED)
        model = AutoModelForSequenceClassification.from_pretrained(str(llama_dir), num_labels=1)
        model.config.pad_token_id = 0
        model.save_pretrained(tmp_path / "scorer")
        own = f"{tmp_path / 'own.py'}:graph"
        algorithm = {"graph": own, "graph_args": {"path": str(tmp_path / "scorer")}, "prox": "behave"}
    run = with_judge(config, path=str(llama_dir), optimizer={"lr": 0.02}, algorithm=algorithm)
    alone = config_of_policy(run, "judge")
    rank, other = (build_rank(each, load_graph(each), World(), torch.device("cpu")) for each in (run, alone))
    assert rank.engines_of("judge").keys() == other.engines.keys()
    assert len(other.engines) == (3 if graph == "ppo" else 2)
    for version in range(2):
        mine = ran(run, rank, "judge", make_batch(version=version))
        assert mine == ran(alone, other, "", make_batch(version=version))
    assert mine["actor_train"]["optimizer/steps"] == 2


def ran(config: ExperimentConfig, rank: TrainingRank, policy: str, batch: StepBatch) -> dict[str, dict[str, Any]]:
    """Run the calls of a policy, as `ModelWorker` does; their statistics by the name of the call."""
    stats = {}
    for call in [call for call in load_graph(config).order() if call.policy == policy]:
        context = CallContext(
            name=call.name,
            role=policy_and_role(config, call.role)[1],
            reads=call.reads,
            writes=call.writes,
            args=call.args,
            config=config_of_policy(config, policy),
            engines=rank.engines_of(policy),
            ranks=rank.world.position(call.role).data,
            state=rank.states[policy],
        )
        stats[call.name.removeprefix(f"{policy}/")] = run_call(find_function(call.function), context, batch)
    return stats


def test_a_checkpoint_has_every_policy(config: ExperimentConfig, tmp_path: Path) -> None:
    from asyncrl.trainer.messages import SaveCheckpoint

    run = with_judge(config, algorithm={"advantage": {"name": "rae"}})
    rank = build_rank(run, load_graph(run), World(), torch.device("cpu"))
    assert rank.changing == ("actor", "judge")
    rank.states["judge"].baselines["judge"] = 0.25
    before = {name: tensor.clone() for name, tensor in rank.engines["judge"].state()[0].items()}
    path = tmp_path / "v1"
    rank.save_checkpoint(SaveCheckpoint(str(path), 1, {"version": 1}))
    files = rank.disk_writer.share(path).result()
    rank.disk_writer.commit(path, files, keep=1, protected=())
    assert set(read_state(path)["roles"]) == {"actor", "judge"}
    for tensor in rank.engines["judge"].state()[0].values():
        tensor.zero_()
    rank.states["judge"].baselines = {}
    assert rank.load_checkpoint(tmp_path) == {"version": 1}
    assert rank.states["judge"].baselines == {"judge": 0.25}
    restored = rank.engines["judge"].state()[0]
    assert all(torch.equal(tensor, restored[name]) for name, tensor in before.items())
