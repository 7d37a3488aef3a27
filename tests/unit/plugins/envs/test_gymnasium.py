"""Games of gymnasium's as environments of agents, one by one and in a vector, and the agent that plays them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces

import asyncrl
from asyncrl.api import Completion, FinishReason, GenerationRequest, GenerationResult, Prompt, RunIn, SamplingParams
from asyncrl.api.picture import Picture
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.data.tokenizers import CharTokenizer
from asyncrl.plugins.agents.game import GameAgent
from asyncrl.plugins.envs.gymnasium_env import GymnasiumEnv, action_of, text_of
from asyncrl.plugins.envs.gymnasium_vector import VectorGames
from asyncrl.rollout.checks import check, code_problems
from asyncrl.rollout.episode import run_group
from asyncrl.rollout.settings import UserCodeConfig
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code_pool.call_records import Activity, Code, UserCodeError
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner

TOKENIZER = CharTokenizer()
DRY = {"is_slippery": False}
WALK = ["2", "2", "1", "1", "1", "2"]
"""Right, right, down, down, down, right: from the start of the 4x4 lake to its goal, past the holes."""


def test_a_registered_game_is_played_in_texts() -> None:
    env = GymnasiumEnv(id="FrozenLake-v1", kwargs=DRY)
    assert env.reset(seed=1, options={"data": {}})[0] == "0"
    *before, last = [env.step(f"I go {move}.") for move in WALK]
    assert [observation for observation, *_ in before] == ["1", "2", "6", "10", "14"]
    assert last[:4] == ("15", 1.0, True, False)
    env.reset(seed=1)
    observation, reward, terminated, truncated, info = env.step("somewhere")
    assert (observation, reward, terminated, truncated) == ("0", 0.0, True, False)
    assert info["invalid_action"] == "'somewhere' is no action of Discrete(4)"
    env.close()


def test_actions_have_names_and_a_picture_shows_where_one_is() -> None:
    names = ["left", "down", "right", "up"]
    env = GymnasiumEnv(id="FrozenLake-v1", kwargs={**DRY, "render_mode": "ansi"}, actions=names, invalid_reward=-1.0)
    observation, _ = env.reset(seed=1)
    assert observation.splitlines() == ["[S]FFF", "FHFH", "FFFH", "HFFG"]
    assert "S[F]FF" in env.step("I go Right, not left")[0]
    assert env.step("upright")[1:3] == (-1.0, True)


@pytest.mark.parametrize(
    ("space", "observation", "text"),
    [
        (spaces.Discrete(9), np.int64(4), "4"),
        (spaces.Box(-1, 1, (2, 2)), np.array([[0.5, -0.25], [1, 0]], np.float32), "0.5 -0.25\n1 0"),
        (spaces.Text(9), "word", "word"),
        (spaces.Tuple((spaces.Discrete(32), spaces.Discrete(2))), (17, 1), "17, 1"),
        (spaces.Dict({"at": spaces.Discrete(4), "to": spaces.Discrete(4)}), {"at": 1, "to": 3}, "at: 1\nto: 3"),
    ],
)
def test_observations_of_usual_spaces_have_words(space: Any, observation: Any, text: str) -> None:
    assert text_of(space, observation) == text


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (spaces.Discrete(4), "move 3 then 1", 3),
        (spaces.Discrete(3, start=-1), "-1", -1),
        (spaces.Box(-1, 1, (2,)), "0.5, -0.25", [0.5, -0.25]),
        (spaces.MultiDiscrete([3, 3]), "2 0", [2, 0]),
        (spaces.Text(9, charset="abc "), " a b ", "a b"),
    ],
)
def test_texts_are_actions_of_usual_spaces(space: Any, text: str, action: Any) -> None:
    found = action_of(space, text)
    assert space.contains(found)
    assert np.array_equal(found, action)


@pytest.mark.parametrize(
    ("space", "text"),
    [(spaces.Discrete(4), "4"), (spaces.Discrete(4), "up"), (spaces.Box(-1, 1, (2,)), "0.5"), (spaces.Box(0, 1), "7")],
)
def test_a_text_that_is_no_action_says_so(space: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is no action of"):
        action_of(space, text)


def test_what_words_are_missing_for_is_named() -> None:
    with pytest.raises(ValueError, match=r"env\.args\.actions names 2 actions, and the game's are Discrete\(4\)"):
        GymnasiumEnv(id="FrozenLake-v1", actions=["left", "right"])


class Walking:
    """Member m takes m steps of the walk too few, the rest is no action."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.asked.append(request)
        turn, member = (int(part) for part in request.request_id.split("/")[1:])
        text = WALK[turn] if turn < len(WALK) - member else "="
        ids = [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]
        completion = Completion(ids, [-0.5] * len(ids), [0] * len(ids), FinishReason.stop)
        return GenerationResult(request.request_id, (completion,))


def config(tiny_model: Path, **args: Any) -> ExperimentConfig:
    made = ExperimentConfig()
    made.model.path, made.env.path = str(tiny_model), "gymnasium:FrozenLake-v1"
    made.env.args = {"kwargs": dict(DRY), "invalid_reward": -0.5, **args}
    made.agent.path, made.agent.args = "asyncrl.plugins.agents.game:GameAgent", {"separator": "+"}
    return made


@pytest.mark.parametrize("vectorized", [False, True])
async def test_a_group_plays_and_each_turn_has_its_reward(tiny_model: Path, vectorized: bool) -> None:
    settings = config(tiny_model)
    settings.env.vectorized = vectorized
    assert [problem for problem in check(settings) if problem.startswith(("env", "agent"))] == []
    components = UserComponents(settings)
    prompt = Prompt("p", 0, {"prompt": "0", "seed": 3}, tuple(TOKENIZER.encode("0")), 3, SamplingParams(seed=1))
    policy = Walking()
    async with components.runner, asyncio.timeout(300):
        samples, _ = await run_group(
            components.agent, components.environments.of_group(3), prompt, policy, components.conversations.client
        )
    assert [sample.episode for sample in samples] == [0, 1, 2]
    assert [sample.total_reward for sample in samples] == [1.0, -0.5, -0.5]
    assert [dict(sample.metrics) for sample in samples] == [
        {"turns": 6.0, "return": 1.0},
        {"turns": 6.0, "return": -0.5},
        {"turns": 5.0, "return": -0.5},
    ]
    first = samples[0]
    assert TOKENIZER.decode(first.tokens.tolist()) == "0+0+2+1+2+2+1+6+1+10+1+14+2"
    assert first.token_rewards is not None
    assert np.flatnonzero(first.token_rewards).tolist() == [len(first.tokens) - 1]
    assert first.loss_mask.sum() == 2 * len(WALK)
    assert not any(sample.truncated for sample in samples)


@pytest.mark.parametrize("vectorized", [False, True])
async def test_a_member_that_stops_early_keeps_nobody_waiting(tiny_model: Path, vectorized: bool) -> None:
    settings = config(tiny_model)
    settings.env.vectorized = vectorized
    settings.agent.args["max_turns"] = 2
    components = UserComponents(settings)
    prompt = Prompt("p", 0, {"prompt": "0"}, tuple(TOKENIZER.encode("0")), 2, SamplingParams(seed=1))
    async with components.runner, asyncio.timeout(300):
        samples, _ = await run_group(
            components.agent, components.environments.of_group(2), prompt, Walking(), components.conversations.client
        )
    assert [sample.truncated for sample in samples] == [True, True]
    assert [sample.metrics["turns"] for sample in samples] == [2.0, 2.0]


async def test_games_of_a_vector_show_their_own_pictures_and_a_fault_reaches_every_member() -> None:
    async def call(function: Any, *args: Any) -> Any:
        return function(*args)

    names = ["left", "down", "right", "up"]
    games = VectorGames(call, 2, id="FrozenLake-v1", kwargs={**DRY, "render_mode": "ansi"}, actions=names)
    members = [games.member(), games.member()]
    async with asyncio.timeout(300):
        seen = await asyncio.gather(*(member.reset(seed=1) for member in members))
        assert [text.splitlines()[0] for text, _ in seen] == ["[S]FFF"] * 2
        first, second = await asyncio.gather(members[0].step("right"), members[1].step("down"))
        assert "S[F]FF\nFHFH" in first[0]
        assert "SFFF\n[F]HFH" in second[0]
        with pytest.raises(RuntimeError, match="reset is called again"):
            await members[0].reset()
        for member in members:
            await member.close()
        broken = VectorGames(call, 2, id="FrozenLake-v1", kwargs={"no_such": 1})
        members = [broken.member(), broken.member()]
        found = await asyncio.gather(*(member.reset() for member in members), return_exceptions=True)
    assert all(isinstance(error, TypeError) and "no_such" in str(error) for error in found)
    with pytest.raises(RuntimeError, match="a group of 2 has no environment more"):
        broken.member()


@pytest.mark.parametrize(
    ("path", "vectorized", "message"),
    [
        ("gymnasium:FrozenLak-v1", False, "env.path='gymnasium:FrozenLak-v1': Environment `FrozenLak` doesn't exist"),
        ("asyncrl.plugins.envs.single_turn:SingleTurnEnv", True, "env.vectorized=true: env.path="),
    ],
)
def test_what_is_no_game_is_refused_before_anything_starts(
    tiny_model: Path, path: str, vectorized: bool, message: str
) -> None:
    settings = config(tiny_model)
    settings.env.path, settings.env.vectorized = path, vectorized
    assert any(problem.startswith(message) for problem in check(settings)), list(check(settings))


@pytest.mark.parametrize("vectorized", [False, True])
def test_arguments_of_a_game_are_checked(tiny_model: Path, vectorized: bool) -> None:
    settings = config(tiny_model, slippery=False)
    settings.env.vectorized = vectorized
    assert any("has no parameter 'slippery'" in problem for problem in code_problems(settings))


def test_a_missing_package_is_named(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (message,) = [problem for problem in check(config(tiny_model)) if problem.startswith("env.")]
    assert message.endswith("the package gymnasium is not installed; pip install 'asyncrl[gymnasium]'")


def test_a_game_agent_takes_at_least_one_turn() -> None:
    with pytest.raises(ValueError, match="max_turns is 0"):
        GameAgent(tokenizer=TOKENIZER, max_turns=0)


WORDS = """
import os, time
import gymnasium
from gymnasium import spaces

class Words(gymnasium.Env):
    observation_space = action_space = spaces.Text(9)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"p{os.getpid()}", {}

    def step(self, action):
        if action == "exit":
            os._exit(3)
        if action == "hang":
            time.sleep(1000)
        if action == "raise":
            raise ValueError("no such word")
        return action.upper(), 1.0, action == "end", False, {}

gymnasium.register("AsyncrlWords-v0", Words)
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A game of texts, each in the process that plays it, as `kwargs` of which it runs in processes."""
    (tmp_path / "asyncrl_words.py").write_text(WORDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "asyncrl_words:AsyncrlWords-v0"


def vector_of(id: str, size: int, step_s: float = 120.0, **kwargs: Any) -> tuple[UserCodeRunner, list[Any]]:
    runner = UserCodeRunner(UserCodeConfig())

    async def call(function: Any, *args: Any) -> Any:
        limit_s = step_s if function.__name__ == "step" else 120.0
        return await runner.call(Code("env words.step", Activity.env, limit_s, RunIn.thread), function, *args)

    games = VectorGames(call, size, id=id, kwargs=kwargs)
    return runner, [games.member() for _ in range(size)]


async def test_games_of_an_async_vector_play_in_processes_and_texts_come_through(words: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    runner, members = vector_of(words, 2, vectorization_mode="async")
    async with runner, asyncio.timeout(300):
        seen = await asyncio.gather(*(member.reset(seed=1) for member in members))
        pids = {int(text[1:]) for text, _ in seen}
        assert len(pids) == 2
        assert os.getpid() not in pids
        ended, other = await asyncio.gather(members[0].step("end"), members[1].step("word"))
        assert (ended[:3], other[:3]) == (("END", 1.0, True), ("WORD", 1.0, False))
        assert (await members[1].step("again"))[0] == "AGAIN", "the one that ended keeps nobody waiting"
        for member in members:
            await member.close()
    started = set(psutil.Process().children(recursive=True)) - before
    assert not {process.pid for process in started} & pids


@pytest.mark.parametrize("deed", ["exit", "hang", "raise"])
async def test_an_async_vector_in_which_a_game_fails_is_killed_and_nobody_waits(words: str, deed: str) -> None:
    runner, members = vector_of(words, 2, 1.0 if deed == "hang" else 120.0, vectorization_mode="async")
    async with runner, asyncio.timeout(300):
        seen = await asyncio.gather(*(member.reset() for member in members))
        processes = [psutil.Process(int(text[1:])) for text, _ in seen]
        steps = members[0].step(deed), members[1].step("word")
        outcomes = await asyncio.gather(*steps, return_exceptions=True)
        assert all(isinstance(outcome, UserCodeError) for outcome in outcomes), outcomes
        for member in members:
            await member.close()
        assert psutil.wait_procs(processes, timeout=60)[1] == []


async def test_a_vector_whose_stepping_member_is_given_up_tells_the_others() -> None:
    begun, stepping = asyncio.Event(), asyncio.Event()

    async def call(function: Any, *args: Any) -> Any:
        if begun.is_set():
            stepping.set()
            await asyncio.Event().wait()
        begun.set()
        return function(*args)

    games = VectorGames(call, 2, id="FrozenLake-v1")
    members = [games.member(), games.member()]
    async with asyncio.timeout(300):
        await asyncio.gather(*(member.reset() for member in members))
        first, second = (asyncio.create_task(member.step("1")) for member in members)
        await stepping.wait()
        second.cancel()
        with pytest.raises(RuntimeError, match="another game of the vector was cancelled"):
            await first
        await asyncio.gather(second, return_exceptions=True)
    assert second.cancelled()


async def test_what_a_vector_cannot_do_is_refused_by_name(words: str) -> None:
    shared = {"vectorization_mode": "async", "vector_kwargs": {"shared_memory": True}}
    for id, kwargs, message in (
        (words, shared, "env.args.kwargs.vector_kwargs.shared_memory=true: texts do not come through"),
        ("CartPole-v1", {"vectorization_mode": "vector_entry_point"}, "it takes one seed for all games"),
    ):
        runner, members = vector_of(id, 2, **kwargs)
        async with runner, asyncio.timeout(300):
            outcomes = await asyncio.gather(*(member.reset(seed=1) for member in members), return_exceptions=True)
            assert all(message in str(outcome) for outcome in outcomes), outcomes
            for member in members:
                await member.close()
    runner, members = vector_of("CartPole-v1", 2, vectorization_mode="vector_entry_point")
    async with runner, asyncio.timeout(300):
        await asyncio.gather(*(member.reset() for member in members))
        assert (await asyncio.gather(*(member.step("1") for member in members)))[0][1] == 1.0
        for member in members:
            await member.close()


class Drawn(gymnasium.Env[Any, Any]):
    """Draws black, and is worth the sum of its action."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 1}
    observation_space, action_space = spaces.Discrete(2), spaces.Box(-1, 1, (2,))

    def __init__(self, render_mode: str) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, float(action.sum()), True, False, {"success": True}

    def render(self) -> Any:
        return FRAME


FRAME = np.zeros((4, 6, 3), np.uint8)
SHOWN = [{"type": "image", "image": Picture.from_array(FRAME)}]
gymnasium.register("Drawn-v0", entry_point=Drawn)


async def test_the_frames_of_a_vector_are_its_games_own() -> None:
    async def call(function: Any, *args: Any) -> Any:
        return function(*args)

    games = VectorGames(call, 2, id="Drawn-v0", kwargs={"render_mode": "rgb_array"})
    members = [games.member(), games.member()]
    assert [shown for shown, _ in await asyncio.gather(*(member.reset() for member in members))] == [SHOWN, SHOWN]
    ends = await asyncio.gather(*(member.step([0.5, number / 4]) for number, member in enumerate(members)))
    assert [end[1] for end in ends] == [0.5, 0.75]


def test_a_game_that_draws_frames_is_seen_and_takes_numbers() -> None:
    env = GymnasiumEnv(id="Drawn-v0", kwargs={"render_mode": "rgb_array"})
    shown, _ = env.reset(seed=1)
    assert shown == SHOWN
    observation, reward, terminated, _, info = env.step([0.25, -0.125])
    assert (observation, reward, terminated, info) == (shown, 0.125, True, {"success": True})
    env.reset()
    assert "no action of Box" in env.step([0.25, 3.0])[4]["invalid_action"]


def test_minigrid_is_played_from_pixels() -> None:
    pytest.importorskip("minigrid", reason="minigrid is not installed")
    words = ["left", "right", "forward", "pickup", "drop", "toggle", "done"]
    kwargs = {"render_mode": "rgb_array", "tile_size": 8}
    env = GymnasiumEnv(id="minigrid:MiniGrid-Empty-5x5-v0", kwargs=kwargs, actions=words)
    ((first,), _) = env.reset(seed=0)
    assert first["image"].pixels().shape == (40, 40, 3)
    steps = [env.step(word) for word in ("forward", "forward", "right", "forward", "forward")]
    seen = [first["image"].sha256, *(step[0][0]["image"].sha256 for step in steps)]
    assert len(set(seen)) == len(seen)
    assert [step[2] for step in steps] == [False] * 4 + [True]
    assert steps[-1][1] > 0
    env.close()


METAWORLD = os.environ.get("ASYNCRL_METAWORLD_PYTHON", "")
REACHES = """
import json, sys

sys.path.append(sys.argv[1])  # what the environment of metaworld lacks
from asyncrl.plugins.envs.gymnasium_env import GymnasiumEnv

drawn = {"render_mode": "rgb_array", "width": 64, "height": 64, "camera_name": "corner2"}
env = GymnasiumEnv(id="metaworld:Meta-World/MT1", kwargs={"env_name": "reach-v3", **drawn})
shown = [env.reset(seed=1)[0]]
for _ in range(3):
    observation, reward, _, _, info = env.step([0.5, -0.5, 0.1, 1.0])
    shown.append(observation)
frames = [parts[0]["image"] for parts in shown]
env.close()
print(json.dumps([[frame.size for frame in frames], len({frame.sha256 for frame in frames}), reward, info["success"]]))
"""


@pytest.mark.metaworld
@pytest.mark.skipif(not METAWORLD, reason="no Meta-World")
def test_meta_world_is_played_from_pixels() -> None:
    paths = [str(Path(asyncrl.__file__).parents[1]), str(Path(np.__file__).parents[1])]
    environment = {**os.environ, "MUJOCO_GL": "egl", "PYTHONPATH": paths[0]}
    command = [METAWORLD, "-c", REACHES, paths[1]]
    played = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert played.returncode == 0, played.stderr
    sizes, distinct, reward, success = json.loads(played.stdout.splitlines()[-1])
    assert sizes == [[64, 64]] * 4
    assert distinct == 4, "it moves"
    assert reward > 0
    assert success == 0
