"""Teachers: what they take from the advantages of which samples, as roles of the trainer, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.api import GenerationRequest, GenerationResult
from asyncrl.api.columns import ColumnError
from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ChoiceConfig, ConfigError
from asyncrl.data.settings import SourceConfig
from asyncrl.launch.before_start.models import with_model
from asyncrl.manager.settings import PolicyConfig
from asyncrl.master.data.while_waiting import frozen_calls
from asyncrl.master.graph import load_graph
from asyncrl.models.ranks import Ranks
from asyncrl.rollout.user_code.beside_groups import scored_by_teachers, with_source_number
from asyncrl.trainer import checks, feature_checks
from asyncrl.trainer.batches.step_batch import build_step_batch
from asyncrl.trainer.engines.base import PolicyEngine
from asyncrl.trainer.functions.model_functions import CallContext, StatValues, TrainState, find_function, run_call
from asyncrl.trainer.parallel.placement import placement
from asyncrl.trainer.rank.training_rank import TrainingRank
from asyncrl.trainer.settings import SOURCE_NUMBER, RoleRanks, TeacherConfig

MakeRank = Callable[[ExperimentConfig], TrainingRank]
MakeTrajectories = Callable[..., list[Trajectory]]
RunStep = Callable[..., dict[str, StatValues]]


def teachers(config: ExperimentConfig, **sources: list[str]) -> None:
    """Two teachers, `sums` and `words`, of the policy's own model."""
    assert config.model.path is not None
    config.algorithm.teachers = [
        TeacherConfig(name=name, path=config.model.path, coef=0.5, sources=sources.get(name, []))
        for name in ("sums", "words")
    ]


def of_sources(trajectories: list[Trajectory], numbers: list[int]) -> list[Trajectory]:
    """The trajectories, each with the number of its row's source."""
    return [
        replace(each, samples=tuple(replace(own, metrics={SOURCE_NUMBER: float(number)}) for own in each.samples))
        for each, number in zip(trajectories, numbers, strict=True)
    ]


def sample(mask: list[int], logprobs: list[float], reward: float, source: int, episode: int) -> Sample:
    return Sample(
        tokens=np.arange(len(mask), dtype=np.int32),
        loss_mask=np.array(mask, np.uint8),
        behave_logprobs=np.array(logprobs, np.float32),
        versions=np.where(np.array(mask), 0, -1).astype(np.int32),
        reward=reward,
        episode=episode,
        metrics={SOURCE_NUMBER: float(source)},
    )


def test_each_teacher_changes_the_advantages_of_its_samples_as_in_tinker_cookbook(config: ExperimentConfig) -> None:
    """tinker-cookbook 0.6.1, `incorporate_kl_penalty` of these numbers: coefficient 0.5, discount 0, a teacher each."""
    teachers(config, sums=["sums"], words=["words"])
    config.algorithm.advantage = ChoiceConfig("grpo", {"std_eps": 1e-12})
    samples = (
        sample([0, 0, 1, 1, 1], [0, 0, -0.5, -1.25, -0.1], 1.0, 0, 0),
        sample([0, 1, 0, 1, 1], [0, -2.0, 0, -0.3, -0.9], 0.0, 1, 1),
    )
    batch = build_step_batch([Trajectory("r", "p", 0, samples)], [0], version=0, num_minibatches=1, own=config.columns)
    batch["teacher_sums_logprobs"] = torch.tensor([0, -9.0, -0.25, -2.5, -0.75, *[-5.0] * 5])
    batch["teacher_words_logprobs"] = torch.tensor([*[-5.0] * 5, 0, -1.0, -7.0, -0.35, -1.6])
    call = next(call for call in load_graph(config).calls if call.function == "advantage")
    context = CallContext(
        call.name, call.role, call.reads, call.writes, {}, config, {}, Ranks(), TrainState(config.algorithm)
    )
    stats = run_call(find_function("advantage"), context, batch)
    expected = [0, 0, 0.8321067690849304, 0.08210676908493042, 0.3821067810058594]
    expected += [0, -0.20710676908493042, 0, -0.7321067452430725, -1.0571067333221436]
    torch.testing.assert_close(batch["advantages"], torch.tensor(expected))
    assert stats["kl/teacher/sums"] == pytest.approx(0.549999992052714)
    assert stats["kl/teacher/words"] == pytest.approx(-0.08333333333333333)


def test_a_teacher_of_another_architecture_scores_the_samples_of_its_sources_only(
    config: ExperimentConfig,
    llama_dir: Path,
    make_rank: MakeRank,
    make_trajectories: MakeTrajectories,
    run_step: RunStep,
) -> None:
    """Beside the anchor, which stays in the loss."""
    teachers(config, sums=["sums"], words=["words", "prose"])
    config.algorithm.teachers[1].path = str(llama_dir)
    config.algorithm.kl_coef = 0.1
    trajectories = of_sources(make_trajectories(groups=4), [2, 1, 0, -1])  # prose, sums, words are sorted
    numbers = {name: config.algorithm.teacher_sources.index(name) for name in ("prose", "sums", "words")}
    assert numbers == {"prose": 0, "sums": 1, "words": 2}
    batch = build_step_batch(trajectories, [0, 1, 0, 1], version=0, num_minibatches=2, own=config.columns)
    rank = make_rank(config)
    stats = run_step(config, rank, batch)
    assert stats["actor_train"]["kl/reference"] == pytest.approx(0, abs=0.02), "the anchor is the initial model"
    teacher = rank.engines["teacher_words"]
    assert isinstance(teacher, PolicyEngine)
    mask_T, rollout_T = batch["loss_mask"], batch["rollouts"][batch.seq_ids_T]
    for name, own in (("words", (0, 2)), ("sums", (1,))):
        of_T = mask_T & torch.isin(rollout_T, torch.tensor(own))
        engine = rank.engines[f"teacher_{name}"]
        assert isinstance(engine, PolicyEngine)
        expected_T = engine.logprobs(batch, mask_T)
        torch.testing.assert_close(batch[f"teacher_{name}_logprobs"], torch.where(of_T, expected_T, 0))
    plain = build_step_batch(trajectories, [0, 1, 0, 1], version=0, num_minibatches=2, own=config.columns)
    config.algorithm.teachers = []
    run_step(config, make_rank(config), plain)
    untaught_T = mask_T & (rollout_T == 3)
    difference_T = (batch["advantages"] - plain["advantages"]).abs()
    assert difference_T[untaught_T].max() == 0
    assert all(difference_T[mask_T & (rollout_T == rollout)].max() > 0 for rollout in range(3))


def test_a_teacher_that_is_the_policy_teaches_nothing(
    config: ExperimentConfig, make_rank: MakeRank, make_trajectories: MakeTrajectories, run_step: RunStep
) -> None:
    """Exactly: neither its log-ratio nor the gradient is more than rounding."""
    teachers(config)
    config.algorithm.advantage = ChoiceConfig("zero")
    rank = make_rank(config)
    mine: list[Trajectory] = make_trajectories(groups=4)
    batch = build_step_batch(mine, [0, 1, 0, 1], version=0, num_minibatches=2)
    logprobs_T = rank.policy("actor").logprobs(batch, batch["loss_mask"])
    starts = batch.starts_S.tolist()
    on_policy, position = [], 0
    for trajectory in mine:
        own = []
        for each in trajectory.samples:
            start = starts[position]
            own.append(replace(each, behave_logprobs=logprobs_T[start : start + len(each.tokens)].numpy()))
            position += 1
        on_policy.append(replace(trajectory, samples=tuple(own)))
    batch = build_step_batch(on_policy, [0, 1, 0, 1], version=0, num_minibatches=2)
    stats = run_step(config, rank, batch)
    assert batch["advantages"].abs().max() < 1e-6
    assert stats["advantage"]["kl/teacher/sums"] == pytest.approx(0, abs=1e-6)
    assert stats["actor_train"]["grad_norm/max"] < 1e-5


def test_a_teacher_has_a_layout_of_its_own_and_scores_ahead(config: ExperimentConfig) -> None:
    teachers(config)
    first, second = config.algorithm.teachers
    first.ranks, first.parallel = RoleRanks.own, "d2"
    placed = placement(config)
    assert placed.workers == placed.actor.workers + 2
    assert placed.grid("teacher_sums").members == range(1, 3)
    assert placed.grid("teacher_words") == placed.actor
    config.trainer.score_ahead = True
    ahead = frozen_calls(config, load_graph(config), placed)
    assert [call.role for call in ahead] == ["teacher_words"]
    second.sources = ["words"]
    assert frozen_calls(config, load_graph(config), placed) == []


ROWS: list[tuple[Mapping[str, Any], str]] = [
    ({"prompt": "a"}, "source None"),
    ({"prompt": "a", "source": 3}, "source 3"),
    ({"prompt": "a", "source": "other"}, "none for rows of source 'other'"),
]


@pytest.mark.parametrize(("row", "reported"), ROWS)
def test_a_row_that_no_teacher_is_for_is_refused(
    config: ExperimentConfig, row: Mapping[str, Any], reported: str
) -> None:
    teachers(config, sums=["sums"], words=["words"])
    config.algorithm.advantage = ChoiceConfig("zero")
    with pytest.raises(ColumnError, match=reported):
        with_source_number(row, config.algorithm)


def test_rows_tell_the_number_of_their_source(config: ExperimentConfig) -> None:
    row = {"prompt": "a", "source": "words"}
    assert with_source_number(row, config.algorithm) == row
    teachers(config, sums=["sums"], words=["words"])
    assert with_source_number(row, config.algorithm) == {**row, "source_number": 1}
    assert with_source_number({"source": "other"}, config.algorithm)["source_number"] == -1, "rewards teach it alone"


async def test_servers_of_a_teacher_score_the_samples_of_its_sources(config: ExperimentConfig) -> None:
    """A column that the trainer reads as it reads the log-probabilities of its own ranks."""
    config.algorithm.teachers = [TeacherConfig(name="big", policy="judge", sources=["sums"])]
    assert config.columns == ("token/teacher_big", SOURCE_NUMBER)
    asked: list[GenerationRequest] = []

    class Scoring:
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            asked.append(request)
            assert request.score_from is not None
            return GenerationResult("", (), tuple(-0.5 * n for n in range(1, len(request.input_ids) - 1)))

    given = [sample([0, 0, 1, 0, 1], [0, 0, -0.5, 0, -0.1], 1.0, 0, 0)]
    other = await scored_by_teachers(given, {"source": "words"}, config.algorithm, Scoring())
    assert not asked
    assert other[0].token_columns["teacher_big"].tolist() == [0] * 5
    (scored,) = await scored_by_teachers(given, {"source": "sums"}, config.algorithm, Scoring())
    assert [(each.policy, each.input_ids, each.score_from) for each in asked] == [("judge", (0, 1, 2, 3, 4), 2)]
    assert scored.token_columns["teacher_big"].tolist() == [0, 0, -0.5, 0, -1.5]
    (call,) = [call for call in load_graph(config).calls if call.function == "advantage"]
    assert {"token/teacher_big", SOURCE_NUMBER} <= {*call.reads}
    assert load_graph(config).roles() == ("actor",), "no rank has it"
    batch = build_step_batch(
        [Trajectory("r", "p", 0, (scored,))], [0], version=0, num_minibatches=1, own=config.columns
    )
    config.algorithm.advantage = ChoiceConfig("zero")
    context = CallContext(
        call.name, call.role, call.reads, call.writes, {}, config, {}, Ranks(), TrainState(config.algorithm)
    )
    run_call(find_function("advantage"), context, batch)
    torch.testing.assert_close(batch["advantages"], torch.tensor([0, 0, 0.0, 0, -1.4]))


def check(config: ExperimentConfig) -> list[str]:
    return [*checks.check(config), *feature_checks.of_algorithm(config)]


def test_teachers_on_servers_and_in_columns_are_checked(config: ExperimentConfig) -> None:
    algorithm = config.algorithm
    assert config.model.path is not None

    def reported(**fields: Any) -> str:
        algorithm.teachers = [TeacherConfig(name="big", **fields)]
        return " ".join(check(config))

    assert "has path and policy; give one of path" in reported(path=config.model.path, policy="judge")
    assert "not one of `policies` that stays as it is (there is none)" in reported(policy="judge")
    config.policies = [PolicyConfig(name="judge", path=config.model.path), PolicyConfig(name="past")]
    assert "that stays as it is (judge)" in reported(policy="past")
    assert reported(policy="judge") == reported(column="token/hinted") == ""
    config.policies[0] = PolicyConfig(name="judge", url="http://127.0.0.1:30000")
    assert reported(policy="judge") == ""
    assert "no column of tokens" in reported(column="agent/hinted")
    assert "it is on no training rank" in reported(policy="judge", ranks=RoleRanks.own)
    config.rollout.sampling.temperature = 0.7
    assert "servers score at temperature 1" in reported(column="token/hinted")
    assert reported(path=config.model.path) == ""
    config.rollout.sampling.temperature = 1.0
    config.policies[1].trained = True
    assert "teachers score on the training ranks; use path" in reported(policy="judge")
    assert "leave the sources out" in reported(path=config.model.path, sources=["sums"])


def test_teachers_that_would_teach_nothing_right_are_refused(config: ExperimentConfig, tmp_path: Path) -> None:
    algorithm = config.algorithm
    teachers(config)
    assert list(check(config)) == []
    algorithm.teachers[1].name = "sums"
    assert sum("a name of its own" in message for message in check(config)) == 2
    teachers(config, sums=["sums"])
    config.dataset.sources = [SourceConfig(name="words", path="rows.jsonl")]
    assert any("'sums' is not a name of dataset.sources" in message for message in check(config))
    config.dataset.sources = []
    config.rollout.columns = [SOURCE_NUMBER]
    assert any("give the field another name" in message for message in check(config))
    config.rollout.columns = []
    algorithm.teachers[0].path = None
    assert any("algorithm.teachers[0]: the teacher 'sums' has no model" in message for message in check(config))
    algorithm.teachers[0].path = str(tmp_path)
    assert any(message.startswith(f"algorithm.teachers[0].path={str(tmp_path)!r}") for message in check(config))


def test_a_teacher_of_another_vocabulary_is_refused(
    config: ExperimentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the policy is the base model, which is there only after the other checks."""
    teachers(config)
    assert config.model.path is not None
    other = tmp_path / "other"
    shutil.copytree(config.model.path, other)
    reported = json.loads((other / "tokenizer.json").read_text())
    vocabulary = reported["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(reported))
    config.algorithm.teachers[1].path = str(other)
    (message,) = check(config)
    begins = f"algorithm.teachers[1].path={str(other)!r}: its tokenizer is not the one of"
    assert message.startswith(begins)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config.fileroot, config.model.path = str(tmp_path / "runs"), None
    assert list(check(config)) == []
    with pytest.raises(ConfigError, match=re.escape(begins)):
        with_model(config, None)


def test_a_graph_of_the_users_that_leaves_a_teacher_out_is_refused(config: ExperimentConfig, tmp_path: Path) -> None:
    file = tmp_path / "graph.py"
    file.write_text(
        "from asyncrl.master.graph import Call, Graph\n\n\ndef build(config):\n"
        "    return Graph('mine', (Call('advantage', 'actor', 'advantage', ('rewards', 'loss_mask'), ('advantages',)),"
        "Call('actor_train', 'actor', 'actor_train', ('tokens', 'loss_mask', 'behave_logprobs', 'versions', "
        "'advantages'))))\n"
    )
    teachers(config)
    config.algorithm.graph = f"{file}:build"
    messages = [message for message in check(config) if "does not read" in message]
    assert len(messages) == 2
    assert "'teacher_sums_logprobs'" in messages[0]
