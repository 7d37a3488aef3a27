"""Vision-language-action policies: their action tokens, and whole episodes of the demo with a policy that knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.api import Completion, FinishReason, GenerationRequest, GenerationResult, Prompt, Sample, SamplingParams
from asyncrl.api.picture import Picture
from asyncrl.config.load import load_experiment, recipes_dir
from asyncrl.config.plugin_code.import_paths import load_plugin
from asyncrl.data.prompt_queue import PromptRef
from asyncrl.data.tokenizers import CharTokenizer
from asyncrl.plugins.agents import vla
from asyncrl.plugins.agents.vla import OPENVLA_OFT, ActionTokens, VLAAgent
from asyncrl.rollout.episode import RetryLimits
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code.rewards_of_groups import episode_of

STATE, WORDS = (load_plugin(f"{recipes_dir() / 'embodied_srpo.py'}:{name}") for name in ("State", "WORDS"))
OPENVLA_IDS = range(31744, 32000)
FIRST_WORD = 7


def openvlas(token_ids: list[int]) -> Any:
    """OpenVLA's own decoding: `ActionTokenizer.decode_token_ids_to_actions`, with its 256 bins within -1 and 1."""
    bins = np.linspace(-1, 1, 256)
    centres = (bins[:-1] + bins[1:]) / 2.0
    return centres[np.clip(32000 - np.array(token_ids) - 1, 0, centres.shape[0] - 1)]


def test_the_preset_means_what_openvlas_tokenizer_means() -> None:
    assert OPENVLA_OFT.tokens == 56
    ids = np.random.default_rng(0).choice(OPENVLA_IDS, 56).tolist()
    numbers = OPENVLA_OFT.numbers(ids, OPENVLA_IDS)
    assert numbers.shape == (8, 7)
    np.testing.assert_allclose(numbers.ravel(), openvlas(ids))
    np.testing.assert_allclose(
        OPENVLA_OFT.numbers([*OPENVLA_IDS][:252], OPENVLA_IDS).ravel(), openvlas([*OPENVLA_IDS][:252])
    )
    assert OPENVLA_OFT.numbers(ids[:20], OPENVLA_IDS).shape == (2, 7), "of an answer that was cut off its whole actions"
    discretised = np.digitize(np.clip(numbers, -1, 1), np.linspace(-1, 1, 256))  # OpenVLA's encoding
    assert OPENVLA_OFT.ids(numbers, OPENVLA_IDS) == (32000 - discretised).ravel().tolist()
    with pytest.raises(ValueError, match="no action tokens"):
        OPENVLA_OFT.numbers([5], OPENVLA_IDS)


@given(st.lists(st.floats(-2, 2), min_size=3, max_size=3), st.integers(2, 300), st.booleans())
def test_a_number_comes_back_within_its_bin(numbers: list[float], count: int, descending: bool) -> None:
    tokens, allowed = ActionTokens(1, 3, -0.5, 1.5, descending), range(10, 10 + count)
    back = tokens.numbers(tokens.ids(numbers, allowed), allowed)[0]
    assert np.abs(back - np.clip(numbers, -0.5, 1.5)).max() <= 1 / (count - 1) + 1e-9


def test_bad_arguments_are_refused_by_name() -> None:
    tokenizer = CharTokenizer()
    for wrong, why in (
        ({"chat": False}, "needs a chat template"),
        ({"actions": "other"}, "'other': name openvla_oft"),
        ({"actions": {"chunk": 0}}, "chunk 0"),
        ({"max_turns": 0}, "max_turns is 0"),
        ({"reward": "best"}, "best"),
    ):
        with pytest.raises(ValueError, match=why):
            VLAAgent(**{"tokenizer": tokenizer, "chat": True, **wrong})


def test_an_observation_in_text_is_on_a_line_of_its_own() -> None:
    picture = {"type": "image", "image": Picture.from_array(np.zeros((2, 2, 3), np.uint8))}
    assert vla._before("at 3", "go") == "at 3\ngo"
    assert vla._before([picture], "go") == [picture, {"type": "text", "text": "go"}]


class Policy:
    """Answers with the words that `choose` makes of the state in the newest picture."""

    def __init__(self, choose: Callable[[Any], str]) -> None:
        self._choose, self.requests = choose, list[GenerationRequest]()
        cells = range(9)
        stains = [frozenset(some) for count in range(4) for some in combinations(cells, count)]
        states = [STATE(gripper, some) for gripper in cells for some in stains]
        self._states = {Picture.from_array(state.frame).sha256: state for state in states}

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        state, words = self._states[request.pictures[-1].picture.sha256], []
        for _ in range(request.sampling.max_new_tokens):
            words.append(self._choose(state))
            state = state.after(words[-1])
        ids = [FIRST_WORD + WORDS.index(word) for word in words]
        completion = Completion(ids, [-1.0] * len(ids), [4] * len(ids), FinishReason.length)
        return GenerationResult(request.request_id, (completion,))


async def played(policy: Any, *overrides: str) -> list[Sample]:
    config = load_experiment("embodied_srpo", ["rewards=[]", "rollout.sampling.max_new_tokens=9", *overrides])
    components = UserComponents(config)
    async with components.entered():
        prompt = components.prompts.train(PromptRef("p", 0, 0))
        samples, _ = await components.play_to_train(prompt, policy, RetryLimits())
        assert episode_of(prompt, samples[-1], components.tokenizer).frames == samples[-1].frames
    return list(samples)


async def test_each_turn_sees_the_newest_picture_alone_and_is_a_sample_of_its_episode() -> None:
    policy = Policy(lambda state: state.best)
    samples = await played(policy)
    assert {request.sampling.allowed_token_ids for request in policy.requests} == {(7, 8, 9, 10, 11)}
    episodes = [[sample for sample in samples if sample.episode == number] for number in range(8)]
    for turns in episodes:
        assert {len(turn.pictures) for turn in turns} == {1}
        assert {turn.generated_length for turn in turns} == {2}
        assert {(turn.reward, turn.truncated, turn.metrics["success"], turn.metrics["progress"]) for turn in turns} == {
            (1.0, False, 1.0, 1.0)
        }
        *before, last = turns
        assert not any(turn.frames for turn in before)
        assert len(last.frames) == 1 + last.metrics["steps"]
        assert [turn.pictures[0].picture for turn in turns] == list(last.frames[::2])[: len(turns)]


CAMERAS = """
import numpy as np
from asyncrl.api import Environment
from asyncrl.api.picture import Picture

class Cameras(Environment):
    def __init__(self, *, reward):
        self.steps = 0

    def shown(self):
        levels = (self.steps, 100 + self.steps)
        pictures = [Picture.from_array(np.full((24, 24, 3), level, np.uint8)) for level in levels]
        return [{"type": "image", "image": picture} for picture in pictures]

    async def reset(self, *, seed=None, options=None):
        return self.shown(), {}

    async def step(self, action):
        self.steps += 1
        return self.shown(), 0.0, False, False, {"is_success": self.steps == 3}
"""


async def test_the_policy_sees_every_camera_and_rewards_see_the_first(tmp_path: Path) -> None:
    (tmp_path / "cameras.py").write_text(CAMERAS)
    policy = Reaching()
    samples = await played(policy, f"env.path={tmp_path / 'cameras.py'}:Cameras", "env.args={}", "group_size=1")

    def levels(pictures: Iterable[Picture]) -> list[int]:
        return [int(picture.pixels()[0, 0, 0]) for picture in pictures]

    assert [levels(placed.picture for placed in sample.pictures) for sample in samples] == [[0, 100], [2, 102]]
    assert levels(samples[-1].frames) == [0, 1, 2, 3]
    assert {sample.reward for sample in samples} == {1.0}


async def test_an_episode_that_runs_out_of_turns_has_failed_and_its_frames_are_chosen_evenly() -> None:
    samples = await played(Policy(lambda _: "left"), "env.run_in=process", "env.processes=8", "agent.args.frames=5")
    assert len(samples) == 8 * 6
    last = samples[5]
    assert (last.reward, last.truncated, last.metrics["success"], last.metrics["steps"]) == (0.0, False, 0.0, 12.0)
    assert last.metrics["progress"] < 1
    assert len(last.frames) == 5
    assert len({frame.sha256 for frame in last.frames}) <= 3


class Reaching:
    """Answers every picture with the first and the last action token; keeps the pictures."""

    def __init__(self) -> None:
        self.pictures = list[Picture]()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.pictures.append(request.pictures[-1].picture)
        ids = [request.sampling.allowed_token_ids[at] for at in (0, -1)]
        completion = Completion(ids, [-1.0] * 2, [4] * 2, FinishReason.length)
        return GenerationResult(request.request_id, (completion,))


async def test_mujoco_is_played_from_pixels_by_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco", reason="mujoco is not installed")
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setenv("PYOPENGL_PLATFORM", "egl")
    try:
        from mujoco.egl import GLContext

        GLContext(8, 8).free()
    except (ImportError, AttributeError, RuntimeError) as error:
        pytest.skip(f"this machine has no EGL to draw with: {error}")
    policy = Reaching()
    samples = await played(
        policy,
        "env.path=gymnasium:Reacher-v5",
        "env.args={kwargs: {render_mode: rgb_array, width: 64, height: 64}}",
        "env.run_in=process",
        "env.processes=2",
        "group_size=2",
        "agent.args={max_turns: 3, actions: {chunk: 1, dimensions: 2}, reward: total, frames: 8}",
        "rollout.filters=[]",
    )
    assert [sample.episode for sample in samples] == [0, 0, 0, 1, 1, 1]
    assert all(sample.reward < 0 for sample in samples), "Reacher's reward is a distance"
    frames = samples[2].frames
    assert [frame.size for frame in frames] == [(64, 64)] * 4
    assert len({frame.sha256 for frame in frames}) == 4, "it moves"
    assert {frame.sha256 for frame in frames[:3]} <= {picture.sha256 for picture in policy.pictures}


async def test_without_action_tokens_it_is_refused() -> None:
    agent: Any = VLAAgent(tokenizer=CharTokenizer(), chat=True)
    prompt = Prompt("p", 0, {"prompt": "go"}, (1,), 1, SamplingParams())
    with pytest.raises(ValueError, match=r"rollout\.sampling\.allowed_token_ids"):
        await agent.run(prompt, None, None)
