"""What a folder is that is no model that can be trained, and the way to a model: an adapter, a checkpoint of another
trainer, a folder one level above, quantised weights. `folder_checks` asks here once it has found a fault.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ADAPTER_CONFIG = "adapter_config.json"
_FIX = "give the folder of a downloaded model"

_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx")
_DEQUANTISE = {
    "fp8": "FineGrainedFP8Config(dequantize=True)",
    "mxfp4": "Mxfp4Config(dequantize=True)",
    "compressed-tensors": "CompressedTensorsConfig(dequantize=True)",
}
"""Arguments `quantization_config` with which transformers loads such weights as plain ones."""


def no_model(folder: Path, unread: Exception | None) -> str:
    """Return the error message for a path without a readable `config.json`, or with an adapter.

    Args:
        unread: the error in reading `config.json`.
    """
    if folder.is_file():
        return f"a file, not a folder{_gguf_mend([folder])}; {_FIX}"
    if not folder.is_dir():
        return f"no such folder, so there is no config.json to read; {_FIX}"
    if (folder / _ADAPTER_CONFIG).is_file():
        return _adapter(folder)
    if unread is not None and not isinstance(unread, FileNotFoundError):
        return f"its config.json cannot be read ({unread}); download the model again, or {_FIX}"
    return f"no Hugging Face model there (no config.json); {_without_config(folder)}"


def _adapter(folder: Path) -> str:
    """Return the error message for a folder with an adapter."""
    try:
        base = json.loads((folder / _ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    if (folder / "config.json").is_file():
        return (
            f"it has a model and an adapter beside it ({_ADAPTER_CONFIG}), and it is not clear which is meant; remove "
            "the adapter's files, or merge it into the model first"
        )
    return (
        f"an adapter (peft) of the base model {base!r}, not a model; merge it into its base, and give the new folder: "
        f"`asyncrl export RUN FOLDER` of a run, else in Python peft.AutoPeftModelForCausalLM.from_pretrained("
        f"{str(folder)!r}).merge_and_unload().save_pretrained(FOLDER), and copy the tokenizer's files there"
    )


def _without_config(folder: Path) -> str:
    """Return what a folder without a config.json is, and what to do."""
    if (format_of_others := _other_format(folder)) is not None:
        return format_of_others
    below = [*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json"), *folder.glob("*/*/config.json")]
    if models := list(dict.fromkeys(str(file.parent) for file in sorted(below))):
        more = f" (and {len(models) - 3} more)" if len(models) > 3 else ""
        return f"there are models below it: give {', '.join(models[:3])}{more}"
    if any(True for pattern in ("model*.safetensors", "pytorch_model*.bin") for _ in folder.glob(pattern)):
        return f"it has weights alone: copy config.json and the tokenizer's files of their model there, or {_FIX}"
    return _FIX


def _other_format(folder: Path) -> str | None:
    """Return in which other format the folder's weights are, and how to make a model of them; None if it is unknown."""

    def has(*patterns: str) -> bool:
        return any(True for pattern in patterns for _ in folder.glob(pattern))

    if has("config.yaml") and has("weights/*", "checkpoints", "metrics.jsonl"):
        return f"it is the folder of a run: `asyncrl export {folder} FOLDER` writes its policy as a model"
    if has("*.gguf"):
        return f"it has GGUF files{_gguf_mend(sorted(folder.glob('*.gguf')))}"
    if has("zero_to_fp32.py", "global_step*/*_optim_states.pt"):
        return "it is a checkpoint of DeepSpeed: `python zero_to_fp32.py . FOLDER --safe_serialization` makes weights"
    if has(
        ".metadata", "*.distcp", "*/.metadata", "model_world_size_*.pt", "*/model_world_size_*.pt", "fsdp_config.json"
    ):
        return (
            "it is a distributed checkpoint of another trainer (FSDP, DCP): have that trainer export it as a Hugging "
            "Face model (verl: `python -m verl.model_merger merge`, accelerate: `accelerate merge-weights`)"
        )
    if has("latest_checkpointed_iteration.txt", "mp_rank_*", "iter_*", "release/*"):
        return "it is a checkpoint of Megatron: convert it to a Hugging Face model with the tools of its trainer"
    if has("consolidated*", "params.json"):
        return "it has weights in their maker's own format: take the same model's files for transformers"
    if has("model_index.json", "*/model_index.json"):
        return "it is a pipeline of diffusers, which makes pictures; use a causal language model"
    return None


def _gguf_mend(files: list[Path]) -> str:
    """Return how to make a model of GGUF `files`; nothing if they are something else."""
    if files[0].suffix != ".gguf":
        return ""
    return (
        ": of GGUF take the model it was made from, or turn it to plain weights with transformers, "
        f"AutoModelForCausalLM.from_pretrained({str(files[0].parent)!r}, gguf_file={files[0].name!r})"
        ".save_pretrained(FOLDER)"
    )


def no_weights(folder: Path) -> str:
    """Return what to do with a folder that has a config.json and no safetensors files."""
    other = next((file for pattern in _OTHER_WEIGHTS for file in sorted(folder.glob(pattern))), None)
    if (format_of_others := _other_format(folder)) is not None:
        return format_of_others
    if other is not None and other.suffix == ".bin":
        return (
            f"{other.name} is a pickle, which is not read here; write it as safetensors with transformers, "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype='auto').save_pretrained(FOLDER), and copy "
            "the tokenizer's files there"
        )
    if other is not None:
        return f"{other.name} is in a format that is not read here; take the model's safetensors files"
    return f"download them too, or {_FIX}"


def quantised(quantisation: Any, packed: str | None) -> str:
    """Return the error message for quantised weights.

    Args:
        quantisation: `quantization_config` of the model's `config.json`.
        packed: a tensor of the weights that needs a scale, and its type; None if there is none.
    """
    method = quantisation.get("quant_method", "an unknown method") if isinstance(quantisation, dict) else None
    if packed is None:
        return (
            f"its config.json has quantization_config ({method}), and its weights are plain; remove "
            "quantization_config from config.json if they were dequantised, else use the model without quantisation"
        )
    if method is None:
        return (
            f"its weights are quantised ({packed}), and its config.json has no "
            "quantization_config to tell how to read them; training needs plain weights: use the model without "
            f"quantisation, or put quantization_config back and load it with transformers' {_DEQUANTISE['fp8']} or the "
            "like, then save it"
        )
    loads = f"quantization_config={_DEQUANTISE[method]}" if method in _DEQUANTISE else ""
    plain = (
        f"AutoModelForCausalLM.from_pretrained(FOLDER, {loads}, dtype='bfloat16').save_pretrained(NEW)"
        if loads
        else "model.dequantize() and model.save_pretrained(NEW), where its method has that"
    )
    return (
        f"its weights are quantised ({method}), and training needs plain ones; use the model without quantisation, or "
        f"dequantise it with transformers: {plain}"
    )
