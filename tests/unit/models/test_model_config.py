"""The `config.json` of a model folder, read in one way everywhere, and written for transformers 4 and 5."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.optional_checks import optional_problems
from asyncrl.manager.settings import PolicyConfig
from asyncrl.models.model_config import for_all_versions, read_model_config
from asyncrl.trainer.checks import check


@pytest.mark.parametrize("content", ["[]", "1", "{"])
def test_a_file_without_an_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError):
        read_model_config(tmp_path)


def test_a_policys_config_without_an_object_ends_no_check(tmp_path: Path, llama_dir: str) -> None:
    (tmp_path / "config.json").write_text("[]")
    config = ExperimentConfig()
    config.model.path = llama_dir
    config.policies = [PolicyConfig("judge", path=str(tmp_path), trained=True)]
    problems = [*check(config), *optional_problems(config)]
    assert not any("its vocabulary has" in problem for problem in problems), "the folder's own check reports it"


_BY_TRANSFORMERS_4: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "qwen2": {"rope_theta": 1000000.0, "rope_scaling": None},
    "gemma3_text": {
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 20000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "phi3": {
        "rope_theta": 20000.0,
        "rope_scaling": {"long_factor": [2.0] * 4, "short_factor": [1.0] * 4, "type": "longrope"},
        "original_max_position_embeddings": 64,
    },
    "gpt_neox": {"rotary_emb_base": 20000, "rotary_pct": 0.5, "rope_scaling": None},
    "phi": {"rope_theta": 20000.0, "partial_rotary_factor": 0.25, "rope_scaling": None},
    "qwen3_moe": {"rope_theta": 1000000.0, "num_experts": 6},
    "modernbert-decoder": {"global_rope_theta": 50000.0, "local_rope_theta": 20000.0},
}
"""Fields of `config.json` as transformers 4.57.6 wrote them (`AutoConfig.for_model(kind, **fields).to_json_string()`).
"""
_SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize("kind", _BY_TRANSFORMERS_4)
def test_a_config_tells_transformers_4_and_5_the_same(kind: str, tmp_path: Path) -> None:
    recorded = _BY_TRANSFORMERS_4[kind]
    config = AutoConfig.for_model(kind, **_SIZES, **copy.deepcopy(recorded), dtype="bfloat16")
    plain = config.to_json_string().encode()
    assert not recorded.items() <= json.loads(plain).items(), "transformers 5 writes the older form itself"
    written = for_all_versions("config.json", plain)
    described = json.loads(written)
    assert {name: described[name] for name in recorded} == recorded
    assert (described["torch_dtype"], described["dtype"]) == ("bfloat16", "bfloat16")
    (tmp_path / "config.json").write_bytes(written)
    read = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert read["rope_parameters"].items() >= config.to_dict()["rope_parameters"].items()
    assert for_all_versions("config.json", written) == written


def test_the_language_model_in_a_larger_config_is_told_too() -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    content = json.dumps({"model_type": "x", "text_config": {"rope_parameters": rope, "dtype": "float16"}}).encode()
    text = json.loads(for_all_versions("config.json", content))["text_config"]
    assert (text["rope_theta"], text["rope_scaling"], text["torch_dtype"]) == (5e5, None, "float16")


def test_a_tokenizer_s_config_has_names_that_transformers_4_knows_and_5_reads() -> None:
    written = for_all_versions(
        "tokenizer_config.json",
        b'{"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>"], "eos_token": "\xc3\xa9"}',
    )
    assert json.loads(written) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<a>"],
        "eos_token": "é",
    }
    named = b'{"extra_special_tokens": {"image_token": "<image>"}}'
    assert for_all_versions("tokenizer_config.json", named) == named
    assert for_all_versions("tokenizer.json", b"{}") == b"{}"
    assert for_all_versions("config.json", b"{") == b"{"


@pytest.mark.smollm2
def test_a_real_model_s_export_has_both_forms(chat_model: Path) -> None:
    described = json.loads(for_all_versions("config.json", (chat_model / "config.json").read_bytes()))
    assert described["rope_theta"] == described["rope_parameters"]["rope_theta"] == 100000
