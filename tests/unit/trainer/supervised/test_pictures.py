"""Supervised training on conversations with pictures: what carries loss, and the loss that transformers computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from asyncrl.api.picture import Picture
from asyncrl.data.demonstrations import BadDemonstration, Demonstration, EncodedRows, LazyRows
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.models.pictures import Pictures
from asyncrl.trainer.settings import OptimizerName, VisionMode
from asyncrl.trainer.supervised.checks import check
from asyncrl.trainer.supervised.settings import SFTConfig, SFTPhaseConfig
from asyncrl.trainer.supervised.supervised_loop import SFTProgress, make_base_model, phases_of, row_format
from tests.tiny_vlm import picture, render

BEGIN, END = "<|vision_start|>", "<|vision_end|>"
Folder = Callable[[str], Path]


@pytest.fixture
def shown() -> list[Picture]:
    return [picture(1), picture(2, 112, 56)]


@pytest.fixture
def config(tmp_path: Path, vlm_folder: Folder, shown: list[Picture]) -> SFTConfig:
    rows: list[dict[str, Any]] = []
    for number, each in enumerate(shown):
        (tmp_path / f"{number}.png").write_bytes(each.data)
    asked = {"role": "user", "content": "how <image>"}
    later = [
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "image", "image": "1.png"}]},
        {"role": "assistant", "content": "3"},
    ]
    rows.append({"messages": [asked, {"role": "assistant", "content": "2"}], "images": ["0.png"]})
    rows.append({"messages": [asked | {"content": [{"type": "image", "image": "0.png"}]}, *later]})
    rows.append({"messages": [{"role": "user", "content": "how"}, {"role": "assistant", "content": "7"}]})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = SFTConfig()
    made.model.path, made.dataset.path = str(vlm_folder("qwen2_vl")), str(tmp_path / "train.jsonl")
    made.optimizer, made.phases, made.batch_size = OptimizerName.adamw, [SFTPhaseConfig(steps=3)], 3
    return made


def _encoded(config: SFTConfig) -> EncodedRows:
    assert config.model.path is not None
    (phase,) = phases_of(config)
    form = row_format(config, load_tokenizer(config.model.path))
    return EncodedRows.of(phase.dataset, form, config.dataset.max_tokens)


def test_placeholders_stand_where_the_prompts_of_rl_have_them_and_carry_no_loss(
    config: SFTConfig, shown: list[Picture]
) -> None:
    folder = Path(str(config.model.path))
    encoded = _encoded(config)
    assert isinstance(encoded.rows, LazyRows), "pictures are not held in memory"
    assert "3 pictures" in encoded.notes
    (one,), (both,), (text,) = encoded.rows
    asked = render(folder, f"<u>how {BEGIN}", shown[0], f"{END}<end><a>")
    assert one.token_ids[: len(asked.ids)] == asked.ids
    assert one.pictures == asked.placed
    assert not any(one.loss_mask[: len(asked.ids)])
    assert one.answer_length == 2, "the answer and its end"
    between = f"{END}<end><a>red<end><u>and {BEGIN}"
    whole = render(folder, f"<u>{BEGIN}", shown[0], between, shown[1], f"{END}<end><a>3<end>")
    assert (both.token_ids, both.pictures) == (whole.ids, whole.placed)
    assert both.answer_length == 4
    assert text.pictures == ()


def test_the_loss_is_that_of_transformers_and_the_processor_is_in_the_result(
    config: SFTConfig, tmp_path: Path, shown: list[Picture]
) -> None:
    folder = Path(str(config.model.path))
    reported: list[SFTProgress] = []
    made = make_base_model(config, tmp_path / "made", progress=reported.append)
    expected = _loss(folder, [each for row in _encoded(config).rows for each in row])
    assert reported[0].loss == pytest.approx(expected, abs=2e-4)
    assert reported[2].loss < reported[0].loss
    assert (made / "preprocessor_config.json").read_bytes() == (folder / "preprocessor_config.json").read_bytes()
    assert _loss(made, [each for row in _encoded(config).rows for each in row]) < reported[0].loss


def _loss(folder: Path, batch: list[Demonstration]) -> float:
    """Mean over answer tokens by transformers' own forward of pixels, one sequence at a time."""
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    pictures = Pictures.of(model, folder)
    assert pictures is not None
    total, count = 0.0, 0
    for each in batch:
        shown, _held = pictures.ids.shown(each.token_ids, each.pictures)
        inputs = pictures.plain_inputs(shown)
        with torch.no_grad():
            logprobs = model(**inputs, use_cache=False).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(-1, inputs["input_ids"][0, 1:, None])[:, 0]
        total -= float(chosen[torch.tensor(each.loss_mask[1:])].sum())
        count += each.answer_length
    return total / count


def test_adapters_that_are_trained_on_pictures_are_merged(config: SFTConfig, tmp_path: Path) -> None:
    config.model.lora.rank, config.model.vision = 2, VisionMode.freeze
    made = make_base_model(config, tmp_path / "made")
    assert not (made / "adapter_config.json").exists()
    demonstrations = [each for row in _encoded(config).rows for each in row]
    assert _loss(made, demonstrations) < _loss(Path(str(config.model.path)), demonstrations)


def test_what_is_not_supported_is_named(config: SFTConfig, tmp_path: Path) -> None:
    config.model.vision = VisionMode.none
    with pytest.raises(BadDemonstration, match=r"train.jsonl:1: it has pictures, and this training takes none"):
        _encoded(config)
    config.model.vision, config.optimizer = VisionMode.train, OptimizerName.muon
    assert any("optimizer=muon trains models from scratch" in problem for problem in check(config))
    answer = {"role": "assistant", "content": [{"type": "image", "image": "0.png"}]}
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "how"}, answer]}))
    with pytest.raises(BadDemonstration, match="an assistant's turn has a picture"):
        _encoded(config)
    (tmp_path / "0.png").write_bytes(b"no picture")
    (tmp_path / "train.jsonl").write_text(
        json.dumps({"prompt": "<image>how", "images": ["0.png"], "completion": "3"}) + "\n"
    )
    with pytest.raises(BadDemonstration, match=r"train.jsonl:1: "):
        _encoded(config)
