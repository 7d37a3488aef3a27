"""SRPO's reward over episodes as agents give them: what is embedded, compared and reported; V-JEPA 2 as its eyes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.api import Episode, RunIn
from asyncrl.api.picture import Picture, evenly
from asyncrl.api.reward import marked_run_in
from asyncrl.plugins.rewards.srpo import NEAREST, SRPOReward, distances, pixels, shaped

HERE = "asyncrl.plugins.rewards.srpo:pixels"
ENCODER = Path(__file__).parents[4] / "experiments" / "recipes" / "base_models" / "embodied_srpo_encoder"


def grey(level: int) -> Picture:
    return Picture.from_array(np.full((4, 4, 3), level, np.uint8))


def sample(number: int, success: float = 0.0, level: int | None = None, **others: Any) -> Episode:
    """A turn of episode `number`; the last one has frames up to one of `level`."""
    frames = () if level is None else (grey(255), grey(level))
    metrics = {"success": success, **others.pop("metrics", {})}
    fields = {"data": {"task": "t"}, "version": 3, **others}
    return Episode(fields["data"], "", ("go",), "go", 1, False, success, number, fields["version"], metrics, frames)


def test_all_turns_of_a_failure_are_worth_its_nearness_and_a_success_gains_nothing() -> None:
    score = SRPOReward(encoder=HERE, frames=2, end=True)
    group = [sample(0), sample(0, level=0), sample(1, 1.0, 100), sample(2, level=90), sample(2), sample(3, level=40)]
    d = distances(pixels([[grey(level)] * 2 for level in (0, 90, 40)]), pixels([[grey(100)] * 2]))
    far, near, middle = shaped(d, d, NEAREST)
    given = score(group)
    assert [each["score"] for each in given] == pytest.approx([far, far, 0.0, near, near, middle])
    assert near > middle > far
    assert given[0]["references"] == 1
    assert "progress_correlation" not in given[0]


def test_successes_of_earlier_groups_are_references_of_the_same_task_alone() -> None:
    score = SRPOReward(encoder=HERE, frames=1)
    failures = [sample(0, level=0), sample(1, level=90, metrics={"progress": 0.5})]
    assert [each["score"] for each in score(failures)] == [0.0, 0.0]
    score([sample(0, 1.0, 100), sample(1, 1.0, 110)])
    assert min(each["score"] for each in score(failures)) > 0
    assert [each["score"] for each in score([sample(n, level=9, data={"task": "u"}) for n in range(2)])] == [0.0, 0.0]
    older = [sample(n, level=9, version=2) for n in range(2)]
    assert [each["score"] for each in score(older)] == [0.0, 0.0], "the successes are of version 3"
    within = SRPOReward(encoder=HERE, frames=1, task=None)
    within([sample(0, 1.0, 100), sample(1, 1.0, 110)])
    assert [each["score"] for each in within(failures)] == [0.0, 0.0]


def test_true_progress_is_compared_with_the_rewards_and_an_evaluation_is_left_alone() -> None:
    score = SRPOReward(encoder=HERE, frames=1)
    levels = ((0, 0.1), (50, 0.2), (90, 0.9))
    group = [sample(n, level=level, metrics={"progress": progress}) for n, (level, progress) in enumerate(levels)]
    assert score([*group, sample(3, 1.0, 100)])[0]["progress_correlation"] == pytest.approx(1.0)
    assert score([sample(0, level=9)]) == [{"score": 0.0}]


def test_equal_frames_are_embedded_once() -> None:
    score, asked = SRPOReward(encoder=HERE, frames=2), []

    def encode(clips: Sequence[Sequence[Picture]]) -> Any:
        asked.append(len(clips))
        return pixels(clips)

    assert score._encoder is not None
    score._encoder._encoder = encode
    for _ in range(2):
        score([sample(0, level=7), sample(1, level=7), sample(2, 1.0, 100)])
    assert asked == [2]


def test_what_it_cannot_work_with_is_said() -> None:
    score = SRPOReward(encoder=HERE)
    with pytest.raises(ValueError, match="VLAAgent"):
        score([sample(0), sample(1, level=3)])
    with pytest.raises(ValueError, match="no field 'task'"):
        score([sample(n, level=3, data={}) for n in range(2)])
    with pytest.raises(ValueError, match="choose nearest or siirl"):
        SRPOReward(preset="other")
    with pytest.raises(ValueError, match="most is"):
        SRPOReward(encoder=HERE, frames=1, settings={"most": 2.0})
    with pytest.raises(ValueError, match=r"has to give finite numbers \[N, D\]"):
        SRPOReward(encoder="builtins:len")([sample(n, level=3) for n in range(2)])
    assert marked_run_in(SRPOReward) == RunIn.process


def test_frames_are_chosen_from_first_to_last() -> None:
    frames = [grey(level) for level in range(10)]
    assert evenly(frames, 4) == [frames[0], frames[3], frames[6], frames[9]]
    assert evenly(frames[:2], 4) == [frames[0], frames[0], frames[1], frames[1]]
    assert evenly(frames, 1) == frames[-1:]


def test_v_jepa_2_without_all_its_tensors_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from asyncrl.plugins.rewards.video_encoder import VJEPA2Encoder

    shutil.copytree(ENCODER, tmp_path / "encoder")
    tensors = load_file(ENCODER / "model.safetensors")
    lost = next(name for name in tensors if name.startswith("encoder.layer.0"))
    del tensors[lost]
    save_file(tensors, tmp_path / "encoder" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"its files lack {lost} \(1 missing\)"):
        VJEPA2Encoder(folder=str(tmp_path / "encoder"))


def test_v_jepa_2_embeds_as_transformers_own_forward_does() -> None:
    import torch
    from transformers import VJEPA2Model

    from asyncrl.plugins.rewards.video_encoder import MEAN, STD, VJEPA2Encoder

    encoder = VJEPA2Encoder(folder=str(ENCODER), batch=2)
    draw = np.random.default_rng(0)
    clips = [[Picture.from_array(draw.integers(0, 256, (24, 24, 3), np.uint8)) for _ in range(8)] for _ in range(3)]
    video = torch.stack([torch.from_numpy(np.stack([f.pixels() for f in clip])) for clip in clips])
    normal = (video.permute(0, 1, 4, 2, 3) / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    model = VJEPA2Model.from_pretrained(ENCODER).eval()
    with torch.no_grad():
        wanted = model(pixel_values_videos=normal, skip_predictor=True).last_hidden_state.mean(1)
    np.testing.assert_allclose(encoder(clips), wanted.numpy(), atol=1e-5)
    with pytest.raises(ValueError, match="V-JEPA 2 model"):
        VJEPA2Encoder(folder=str(ENCODER.parent / "embodied_srpo"))
