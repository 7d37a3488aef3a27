"""Fit of a model to a layout, from its config.json alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.models.model_config import ModelFacts, facts_of
from asyncrl.trainer.parallel.checks import misfits, tensor_sizes
from asyncrl.trainer.parallel.placement import Layout

QWEN = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def shape(**changes: Any) -> ModelFacts:
    return ModelFacts.of({**QWEN, **changes})


def reported(layout: str, **changes: Any) -> str:
    return "; ".join(misfits(Layout.parse(layout), shape(**changes)))


@pytest.mark.parametrize("layout", ["d64", "t2", "t14", "p24", "d2t2p2", "c14", "t2c7"])
def test_what_fits(layout: str) -> None:
    assert reported(layout) == "", "tied embeddings are no obstacle"


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("t4", {}, "4 does not divide its 14 query heads; use t1, t2 or t14"),
        ("t7", {}, "7 neither divides nor is a multiple of its 2 key-value heads; use t1, t2 or t14"),
        ("t28", {}, "28 does not divide its 14 query heads"),
        ("p25", {}, "24 layers are fewer than the 25 stages; use p24 or less"),
        (
            "t2",
            {"num_experts": 5, "moe_intermediate_size": 32},
            "2 does not divide its 5 experts; use t1",
        ),
        ("t2", {"num_local_experts": 3}, "2 does not divide its 3 experts"),
        ("t14", {"vocab_size": 17}, "of a vocabulary of 17 the last slice would have nothing; use t1 or t2"),
        ("t2", {"num_attention_heads": None}, "its config.json names no attention heads; use t1"),
        ("c4", {}, "cut into 4 parts: 4 does not divide its 14 query heads; use c1, c2, c7 or c14"),
        ("t2c2", {}, "2 does not divide its 14 query heads in 2 tensor slices; use c1 or c7"),
        ("c2", {"layer_types": ["full_attention", "conv"]}, "its layers conv go along the sequence by other means"),
        ("c2", {"num_attention_heads": None}, "its config.json names no attention heads; use c1"),
        ("p2", {"num_kv_shared_layers": 10}, "qwen2 cannot be cut into stages: 10 layers take their keys and values"),
    ],
)
def test_what_does_not_fit_is_said_with_what_would(layout: str, changes: dict[str, Any], message: str) -> None:
    assert message in reported(layout, **changes)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("t2", {"intermediate_size": 33}),  # a dense feed-forward is cut unevenly
        ("t2", {"vocab_size": 131}),
        ("t2p2", {"layer_types": ["full_attention", "linear_attention"]}),
        ("d8", {"num_attention_heads": None}),
        ("t2", {"num_key_value_heads": None}),
    ],
)
def test_what_need_not_divide(layout: str, changes: dict[str, Any]) -> None:
    assert reported(layout, **changes) == ""


def test_several_reasons_are_told_in_one_message() -> None:
    message = reported("t4", num_experts=2)
    assert "14 query heads, 4 does not divide its 2 experts; use t1 or t2" in message


def test_the_sizes_that_fit_do_fit() -> None:
    assert tensor_sizes(shape(num_attention_heads=32, num_key_value_heads=8)) == [1, 2, 4, 8, 16, 32]
    assert tensor_sizes(shape(num_attention_heads=12, num_key_value_heads=3)) == [1, 3, 6, 12]


def test_the_sizes_of_a_nested_text_config_count_and_the_kind_of_the_whole(tmp_path: Path) -> None:
    described = {"model_type": "some_vlm", "text_config": QWEN, "vision_config": {"num_attention_heads": 5}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert facts_of(str(tmp_path)) == replace(shape(), model_type="some_vlm")


def test_a_folder_without_a_config_has_no_shape(tmp_path: Path) -> None:
    assert facts_of(None) is None
    assert facts_of(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("[")
    assert facts_of(str(tmp_path)) is None
