"""Pictures as tokens of their own in models of every family that transformers builds without torchvision."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.models.picture_rules import (
    KNOWN_SIZES,
    PictureModelError,
    PictureProcessor,
    PictureRules,
    PictureRulesError,
    picture_rules,
)
from asyncrl.models.pictures import Pictures
from tests.tiny_vlm import KINDS, picture, render, shown_inputs

Folder = Callable[[str], Path]


class Sizes(NamedTuple):
    """All that is asked of a picture."""

    size: tuple[int, int]


def _model(folder: Path) -> tuple[PreTrainedModel, Pictures]:
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    pictures = Pictures.of(model, folder)
    assert pictures is not None
    return model, pictures


def _logits(model: PreTrainedModel, pictures: Pictures, shown: list[int], *, keep: bool = True) -> Tensor:
    inputs = shown_inputs(pictures, shown)
    with pictures.holding(inputs["input_ids"].numpy(), keep=keep):
        logits: Tensor = model(**inputs, use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_rows_by_id_give_what_transformers_computes_of_pixels(kind: str, vlm_folder: Folder) -> None:
    folder = vlm_folder(kind)
    model, pictures = _model(folder)
    one, other = picture(1), picture(2, 112, 56)
    prompts = [render(folder, "<u>how ", *each, "?<end><a>3 ") for each in ([one], [picture(3)], [one, "red", other])]
    processor = PictureProcessor.of(folder)._processor
    with torch.no_grad():
        mine = []
        for ids, placed, text in prompts:
            images = [each.picture.image() for each in placed]
            marked = text
            for each in placed:
                marked = marked.replace(PictureProcessor.of(folder).text_of_size(*each.picture.size), "IMAGE", 1)
            made = processor(text=[marked.replace("IMAGE", processor.image_token)], images=images, return_tensors="pt")
            assert made["input_ids"][0].tolist() == ids
            made = {name: value for name, value in made.items() if name != "attention_mask"}
            if kind == "llava_onevision" and len(images) > 1:
                continue  # its own processor reads a picture otherwise in where there are several
            theirs = model(**made, use_cache=False).logits[0]
            shown, _held = pictures.ids.shown(ids, placed)
            mine.append(_logits(model, pictures, shown))
            assert float((mine[-1] - theirs).abs().max()) < 2e-5
    assert prompts[0].ids == prompts[1].ids
    assert float((mine[0] - mine[1]).abs().max()) > 0.05, "the model does not see its picture"


def test_a_sampled_placeholder_is_an_ordinary_token(vlm_folder: Folder) -> None:
    model, pictures = _model(vlm_folder("qwen3_vl"))
    ids, placed, _ = render(vlm_folder("qwen3_vl"), "<u>", picture(1), "?<end><a>")
    shown, _held = pictures.ids.shown([*ids, pictures.ids.token_id, 5], placed)
    before, _held = pictures.ids.shown(ids, placed)
    with torch.no_grad():
        assert torch.allclose(_logits(model, pictures, shown)[: len(ids)], _logits(model, pictures, before), atol=1e-6)


def test_a_picture_is_encoded_once_for_a_version_of_the_weights(vlm_folder: Folder) -> None:
    model, pictures = _model(vlm_folder("qwen2_5_vl"))
    ids, placed, _ = render(vlm_folder("qwen2_5_vl"), "<u>", picture(1), " ", picture(1), " ", picture(2), "<a>")
    shown, held = pictures.ids.shown(ids, placed)
    assert held[0] is held[1]
    with torch.no_grad():
        first = _logits(model, pictures, shown)
        assert pictures.tower.encoded == 2
        _logits(model, pictures, shown)
        assert pictures.tower.encoded == 2
        for parameter in model.base_model.visual.parameters():
            parameter.mul_(1.1)
        assert torch.equal(_logits(model, pictures, shown), first), "the rows are those of the version"
        pictures.tower.weights_changed()
        assert not torch.allclose(_logits(model, pictures, shown), first, atol=1e-3)
    assert pictures.tower.encoded == 4


def test_rows_have_gradients_by_the_tower_where_they_are_not_kept(vlm_folder: Folder) -> None:
    model, pictures = _model(vlm_folder("qwen3_vl"))
    ids, placed, _ = render(vlm_folder("qwen3_vl"), "<u>", picture(1), "?<a>")
    shown, _held = pictures.ids.shown(ids, placed)
    _logits(model, pictures, shown, keep=False)[-1].sin().sum().backward()
    mine = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    model(**pictures.plain_inputs(shown), use_cache=False).logits[0, -1].sin().sum().backward()
    theirs = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert mine.keys() == theirs.keys()
    assert any("visual" in name for name in mine)
    assert all(torch.allclose(mine[name], theirs[name], atol=2e-5) for name in mine)


def test_pictures_nobody_holds_are_forgotten(vlm_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.models.pictures.RECENT_BYTES", 0)
    _, pictures = _model(vlm_folder("llava"))
    for seed in range(20):
        pictures.ids.seen(picture(seed))
    gc.collect()
    assert len(pictures.ids._seen) == 1
    assert pictures.ids._recent_bytes == sum(seen.nbytes for seen in pictures.ids._recent.values())


def test_ids_are_taken_anew_from_the_beginning_but_never_twice(
    vlm_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pictures = _model(vlm_folder("qwen2_vl"))
    held = pictures.ids.seen(picture(0))
    monkeypatch.setattr("asyncrl.models.pictures.LAST_ID", pictures.ids.first + 3 * held.rows)
    more = [pictures.ids.seen(picture(seed)) for seed in (1, 2)]
    assert {each.first for each in (held, *more)} == {pictures.ids.first + held.rows * n for n in range(3)}
    gone = more.pop(0).first
    pictures.ids._recent.clear()
    gc.collect()
    assert pictures.ids.seen(picture(3)).first == gone


def test_a_span_with_another_number_of_placeholders_is_refused(vlm_folder: Folder) -> None:
    _, pictures = _model(vlm_folder("qwen2_vl"))
    ids, (placed,), _ = render(vlm_folder("qwen2_vl"), "<u>", picture(1), "?<a>")
    with pytest.raises(ValueError, match=r"has 4 rows, and its span from 1 to 4 has 3 placeholders"):
        pictures.ids.shown(ids, [PlacedPicture(placed.position, placed.length - 1, placed.picture)])


@pytest.mark.parametrize("kind", ["idefics3", "qwen2_vl", "mistral3"])
def test_rules_without_torch_say_what_the_processor_says(kind: str, vlm_folder: Folder) -> None:
    folder = vlm_folder(kind)
    rules, processor = picture_rules(folder), PictureProcessor.of(folder)
    assert rules is not None
    try:
        assert (rules.token_id, rules.marker) == (processor.token_id, processor.marker)
        for width, height in ((56, 56), (112, 56), (40, 130)):
            blank = Picture.from_image(Image.new("RGB", (width, height)))
            assert rules.text(blank) == processor.text_of_size(width, height)
            assert rules.rows(blank) == processor.read(blank.image())[1]
        if kind == "idefics3":
            rules._child.kill()  # type: ignore[union-attr]
        assert rules.rows(Picture.from_array(np.zeros((90, 60, 3), np.uint8))) > 0
    finally:
        rules.close()


def test_texts_are_remembered_for_the_sizes_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules, asked = PictureRules(tmp_path), []

    def ask(size: tuple[int, int]) -> dict[str, Any]:
        asked.append(size)
        return {"text": str(size)}

    monkeypatch.setattr(rules, "_asked", ask)
    sizes = [Sizes((width, 7)) for width in range(1, 3 * KNOWN_SIZES)]
    for size in sizes:
        assert rules.text(sizes[0]) == "(1, 7)"
        assert rules.text(size) == str(size.size)
    assert len(asked) == len(sizes), "the one that is always used stays"
    assert len(rules._texts) == KNOWN_SIZES


def test_what_takes_no_pictures_or_needs_torchvision_is_refused_by_name(
    vlm_folder: Folder, tiny_model: Path, tmp_path: Path
) -> None:
    assert picture_rules(tiny_model) is None
    with pytest.raises(PictureModelError, match=r"qwen2 in .* takes no pictures"):
        PictureProcessor.of(tiny_model)
    folder = tmp_path / "lfm2_vl"
    shutil.copytree(vlm_folder("smolvlm"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "lfm2_vl"}))
    reading = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(
        json.dumps(reading | {"image_processor_type": "Lfm2VlImageProcessor"})
    )
    with pytest.raises(PictureModelError, match="holds no image processor that works without torchvision"):
        PictureProcessor.of(folder)
    rules = picture_rules(folder)
    assert rules is not None
    with pytest.raises(PictureRulesError, match="holds no image processor that works without torchvision"):
        _ = rules.token_id
