"""What is no model that can be trained is named, with the way to make one of it; without torch."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.models.folder_checks import hugging_face_folder, weight_files

CONFIG: dict[str, Any] = {"model_type": "qwen2"}


def safetensors(tensors: Mapping[str, str]) -> bytes:
    """Return a file of tensors of one byte, by name and type."""
    header = {
        name: {"dtype": kind, "shape": [1], "data_offsets": [place, place + 1]}
        for place, (name, kind) in enumerate(tensors.items())
    }
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + bytes(len(tensors))


PLAIN = safetensors({"model.norm.weight": "BF16"})


def make(folder: Path, files: Mapping[str, bytes | str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


NO_MODELS: dict[str, tuple[dict[str, bytes | str], str]] = {
    "an adapter": (
        {"adapter_config.json": '{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}', "adapter_model.safetensors": PLAIN},
        "an adapter (peft) of the base model 'Qwen/Qwen3-0.6B', not a model; merge it into its base",
    ),
    "an adapter beside a model": (
        {"config.json": json.dumps(CONFIG), "model.safetensors": PLAIN, "adapter_config.json": "{}"},
        "it has a model and an adapter beside it (adapter_config.json)",
    ),
    "a run": (
        {"config.yaml": "", "metrics.jsonl": "", "weights/actor/v3/config.json": "{}"},
        "it is the folder of a run: `asyncrl export",
    ),
    "GGUF alone": ({"m-Q4_K_M.gguf": "GGUF"}, "gguf_file='m-Q4_K_M.gguf').save_pretrained(FOLDER)"),
    "GGUF with a config": (
        {"config.json": json.dumps(CONFIG), "m.gguf": "GGUF"},
        "gguf_file='m.gguf').save_pretrained(FOLDER)",
    ),
    "a folder above": ({"checkpoint-500/config.json": "{}"}, "there are models below it: give"),
    "the hub's cache": ({"snapshots/abc/config.json": "{}", "refs/main": "abc"}, "/snapshots/abc"),
    "torch's checkpoint": ({".metadata": "", "__0_0.distcp": ""}, "a distributed checkpoint of another trainer"),
    "verl's checkpoint": (
        {"actor/model_world_size_8_rank_0.pt": "", "actor/huggingface/config.json": "{}"},
        "`python -m verl.model_merger merge`",
    ),
    "Megatron's": ({"latest_checkpointed_iteration.txt": "1", "iter_0000001/mp_rank_00/x.pt": ""}, "of Megatron"),
    "DeepSpeed's": ({"zero_to_fp32.py": "", "global_step1/x_optim_states.pt": ""}, "python zero_to_fp32.py"),
    "Llama's own": ({"params.json": "{}", "consolidated.00.pth": ""}, "in their maker's own format"),
    "weights alone": ({"model.safetensors": PLAIN}, "it has weights alone: copy config.json"),
    "a pickle": (
        {"config.json": json.dumps(CONFIG), "pytorch_model.bin": "x"},
        "pytorch_model.bin is a pickle, which is not read here; write it as safetensors",
    ),
    "Keras": ({"config.json": json.dumps(CONFIG), "tf_model.h5": "x"}, "tf_model.h5 is in a format that is not read"),
    "two sets of files": (
        {
            "config.json": json.dumps(CONFIG),
            "model.safetensors": PLAIN,
            "model.safetensors.index.json": '{"weight_map": {"a": "model-1.safetensors"}}',
            "model-1.safetensors": PLAIN,
        },
        "it has model.safetensors and model.safetensors.index.json with other files",
    ),
    "an encoder-decoder": (
        {"config.json": '{"model_type": "bart", "is_encoder_decoder": true}', "model.safetensors": PLAIN},
        "an encoder-decoder (bart)",
    ),
    "an embedding model": (
        {"config.json": json.dumps(CONFIG), "model.safetensors": PLAIN, "modules.json": "[]"},
        "an embedding model (sentence-transformers)",
    ),
}


@pytest.mark.parametrize("what", NO_MODELS)
def test_what_is_no_model_is_named_with_its_mend(what: str, tmp_path: Path) -> None:
    files, says = NO_MODELS[what]
    (message,) = hugging_face_folder("model.path", str(make(tmp_path, files)))
    assert message.startswith(f"model.path={str(tmp_path)!r}: ")
    assert says in message


def test_a_file_is_named(tmp_path: Path) -> None:
    file = make(tmp_path, {"m.gguf": "GGUF"}) / "m.gguf"
    (message,) = hugging_face_folder("model.path", str(file))
    assert "a file, not a folder: of GGUF take the model it was made from" in message


LINEAR = "model.layers.0.mlp.down_proj"
QUANTISED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "fp8": (
        {"quant_method": "fp8"},
        {f"{LINEAR}.weight": "F8_E4M3", f"{LINEAR}.weight_scale_inv": "F32"},
        "quantised (fp8), and training needs plain ones; use the model without quantisation, or dequantise it with "
        "transformers: AutoModelForCausalLM.from_pretrained(FOLDER, quantization_config="
        "FineGrainedFP8Config(dequantize=True)",
    ),
    "fp8 without its config": ({}, {f"{LINEAR}.weight": "F8_E4M3"}, f"({LINEAR}.weight is F8_E4M3)"),
    "scales without fp8": ({}, {f"{LINEAR}.weight_scale_inv": "F32"}, "has no quantization_config"),
    "mxfp4": ({"quant_method": "mxfp4"}, {"model.layers.0.mlp.experts.down_proj_blocks": "U8"}, "Mxfp4Config("),
    "gptq": ({"quant_method": "gptq"}, {f"{LINEAR}.qweight": "I32"}, "quantised (gptq)"),
    "awq": ({"quant_method": "awq"}, {f"{LINEAR}.qzeros": "I32"}, "quantised (awq)"),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, {f"{LINEAR}.weight.absmax": "U8"}, "quantised (bitsandbytes)"),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors"},
        {f"{LINEAR}.weight_packed": "I32"},
        "CompressedTensorsConfig(dequantize=True)",
    ),
    "torchao": ({"quant_method": "torchao"}, {f"{LINEAR}.weight:_data": "U8"}, "quantised (torchao)"),
    "what is left over": (
        {"quant_method": "gguf"},
        {f"{LINEAR}.weight": "BF16"},
        "has quantization_config (gguf), and its weights are plain; remove quantization_config",
    ),
}


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("where", ["config", "text_config"])
def test_quantised_weights_are_refused_by_their_config_and_by_their_files(
    kind: str, where: str, tmp_path: Path
) -> None:
    reported, tensors, says = QUANTISED[kind]
    quantised = {"quantization_config": reported} if reported else {}
    config = CONFIG | (quantised if where == "config" else {"text_config": quantised})
    make(tmp_path, {"config.json": json.dumps(config), "model.safetensors": safetensors(tensors)})
    (message,) = hugging_face_folder("model.path", str(tmp_path))
    assert says in message
    assert list(hugging_face_folder("model.path", str(tmp_path), quantised=True)) == []  # a server may take it


def test_buffers_of_whole_numbers_are_not_taken_for_quantised_weights(tmp_path: Path) -> None:
    tensors = {"h.0.attn.bias": "U8", "embeddings.position_ids": "I64", "h.0.attn.masked_bias": "F32"}
    make(tmp_path, {"config.json": '{"model_type": "gpt2"}', "model.safetensors": safetensors(tensors)})
    assert list(hugging_face_folder("model.path", str(tmp_path))) == []


def test_weights_are_the_files_that_transformers_would_read(tmp_path: Path) -> None:
    make(tmp_path, {"consolidated.safetensors": PLAIN})
    assert weight_files(tmp_path) == []
    make(tmp_path, {"model.safetensors": PLAIN})
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {"model.safetensors.index.json": json.dumps(index), "model-1.safetensors": PLAIN}
    shutil.move(tmp_path / "model.safetensors", tmp_path / "model-2.safetensors")
    make(tmp_path, files)
    assert [file.name for file in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]
