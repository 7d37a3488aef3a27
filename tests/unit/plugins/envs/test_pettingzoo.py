"""PettingZoo's games, played by two policies of a run through the adapter and `MatchAgent`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncrl.api import Completion, FinishReason, GenerationRequest, GenerationResult, Prompt, Sample, SamplingParams
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.data.tokenizers import CharTokenizer
from asyncrl.manager.settings import PolicyConfig
from asyncrl.plugins.envs.pettingzoo_env import PettingZooEnv
from asyncrl.rollout.checks import check
from asyncrl.rollout.episode import run_group
from asyncrl.rollout.user_code.components import UserComponents

pytest.importorskip("pettingzoo", reason="pettingzoo is not installed")
TOKENIZER = CharTokenizer()
GAME = {"game": "pettingzoo:make", "kwargs": {"env_type": "aec", "id": "classic/tictactoe-v3"}}
BOARD = """
def board(observation, env):
    mine, theirs = observation["observation"].transpose(2, 0, 1).reshape(2, 9)
    return "".join(str(a + 2 * b) for a, b in zip(mine, theirs))
"""
DOWN, ACROSS = ["0", "1", "2"], ["3", "4", "5"]


@pytest.fixture
def observe(tmp_path: Path) -> str:
    (tmp_path / "boards.py").write_text(BOARD)
    return f"{tmp_path / 'boards.py'}:board"


class Scripted:
    """Each policy makes its moves, in order, in every game."""

    def __init__(self, moves: dict[str, list[str]]) -> None:
        self.moves = moves
        self.asked: list[tuple[str, str]] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        shown = TOKENIZER.decode(list(request.input_ids))
        self.asked.append((request.policy, shown))
        ids = list(TOKENIZER.encode(self.moves[request.policy][shown.count("+") // 2 - 1]))
        done = Completion(ids, [-0.5] * len(ids), [4] * len(ids), FinishReason.length, policy=request.policy)
        return GenerationResult(request.request_id, (done,))


async def played(
    tiny_model: Path, observe: str, policy: PolicyConfig, scripted: Scripted, seat: str = "player_2"
) -> list[Sample]:
    config = ExperimentConfig(policies=[policy])
    config.model.path = str(tiny_model)
    config.env.path = "asyncrl.plugins.envs.pettingzoo_env:PettingZooEnv"
    config.env.args = {**GAME, "observe": observe, "invalid_reward": -2.0}
    config.agent.path = "asyncrl.plugins.agents.match:MatchAgent"
    config.agent.args = {"players": {seat: policy.name}, "separator": "+"}
    assert [problem for problem in check(config) if problem.startswith(("env", "agent"))] == []
    components = UserComponents(config)
    prompt = Prompt("p", 0, {"prompt": "0"}, tuple(TOKENIZER.encode("0")), 1, SamplingParams(seed=1))
    async with components.runner:
        samples, _ = await run_group(
            components.agent, components.environments.of_group(1), prompt, scripted, components.conversations.client
        )
    return list(samples)


def texts(samples: list[Sample]) -> list[str]:
    return [TOKENIZER.decode(sample.tokens.tolist()) for sample in samples]


async def test_two_trained_policies_play_a_game_each_from_its_side(tiny_model: Path, observe: str) -> None:
    scripted = Scripted({"": DOWN, "judge": ACROSS})
    first, second = await played(tiny_model, observe, PolicyConfig("judge", trained=True), scripted)
    assert texts([first, second]) == [
        "0+000000000+0+100200000+1+110220000+2",
        "0+200000000+3+220100000+4",
    ]
    assert [(sample.group, sample.total_reward) for sample in (first, second)] == [
        ("player_1", 1.0),
        ("judge/player_2", -1.0),
    ]
    assert dict(first.metrics) == {"moves": 5.0, "return/player_1": 1.0, "return/player_2": -1.0, "won/judge": 1.0}
    assert not first.truncated
    assert first.token_rewards is not None
    assert np.flatnonzero(first.token_rewards).tolist() == [len(first.tokens) - 1]
    assert [policy for policy, _ in scripted.asked] == ["", "judge", "", "judge", ""]


@pytest.mark.parametrize(
    ("own", "past", "total", "won"),
    [
        pytest.param(["0", "1", "8"], ["3", "4", "5"], -1.0, 0.0, id="lost"),
        pytest.param(["0", "1", "5", "6", "8"], ["2", "3", "4", "7"], 0.0, 0.5, id="draw"),
        pytest.param(["0", "3"], ["3"], -1.0, 0.0, id="a taken square, by the game's own rule"),
        pytest.param(["0", "="], ["3"], -2.0, 0.0, id="no move"),
    ],
)
async def test_against_an_older_self_only_the_policys_own_moves_are_samples(
    tiny_model: Path, observe: str, own: list[str], past: list[str], total: float, won: float
) -> None:
    (sample,) = await played(tiny_model, observe, PolicyConfig("past"), Scripted({"": own, "past": past}))
    assert (sample.total_reward, sample.metrics["won/past"], sample.group) == (total, won, "player_1")


async def test_a_seat_that_the_game_does_not_have_is_refused_by_name(tiny_model: Path, observe: str) -> None:
    with pytest.raises(ValueError, match=r"the game has no player_3; .*'player_1', 'player_2'.* play it"):
        await played(tiny_model, observe, PolicyConfig("past"), Scripted({}), seat="player_3")


def test_spaces_without_words_name_the_setting() -> None:
    with pytest.raises(ValueError, match=r"env\.args\.actions names 1 actions, and the game's are Discrete\(9\)"):
        PettingZooEnv(**GAME, actions=["left"])
