"""Check a model's folder before anything loads it. Torch-free: only `config.json` and headers of files are read.

A folder that holds no trainable model is refused, with the way to make one of it: an adapter, a checkpoint of another
trainer, a folder one level above, quantised weights, a download that was cut off. Only transformers knows if the files
hold every tensor of the model; `asyncrl.weights.whole_folder` asks it.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum, auto
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_ADAPTER_CONFIG = "adapter_config.json"
_GIT_LFS = b"version https://git-lfs"
_FIX = "give the folder of a downloaded model"
_AGAIN = "download the model again"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx")
_QUANTISED_TYPES = re.compile(r"F(8|6|4)")
"""Types of tensors, in headers of safetensors files, of which each value needs a scale."""
_QUANTISED_NAMES = re.compile(
    r"[._](qweight|qzeros|g_idx|absmax|quant_map|quant_state[\w.]*|SCB|weight_packed|weight_scale(_inv|_2)?|"
    r"input_scale|(proj|weight)_(blocks|scales))$|:(qdata|scale|zero_point)$|_quantized\.|:_data$|:_scale$"
)
"""Names of the tensors that bitsandbytes, GPTQ, AWQ, compressed-tensors, fp8, mxfp4 and torchao store."""
_DEQUANTISE = {
    "fp8": "FineGrainedFP8Config(dequantize=True)",
    "mxfp4": "Mxfp4Config(dequantize=True)",
    "compressed-tensors": "CompressedTensorsConfig(dequantize=True)",
}
"""Arguments `quantization_config` with which transformers loads such weights as plain ones."""


class ModelPart(StrEnum):
    """Part of the model in a folder that a role needs."""

    language = auto()
    """A language model."""
    trunk = auto()
    """A trunk, and its head if it has one: a critic, or a reward model in training."""
    reward = auto()
    """A classifier with a single score."""


class WantedFolder(NamedTuple):
    """A model folder that a run loads: the setting that names it, and the part of the model that is needed."""

    setting: str
    path: str
    part: ModelPart


def hugging_face_folder(name: str, path: str, *, quantised: bool = False) -> Iterator[str]:
    """Yield an error message for each problem of the model folder `path`, the value of the setting `name`.

    Args:
        quantised: the model is served as it is, by a server that takes quantised weights.
    """
    return (f"{name}={path!r}: {fault}" for fault in folder_faults(Path(path).expanduser(), quantised=quantised))


def folder_faults(folder: Path, *, quantised: bool = False) -> Iterator[str]:
    """As `hugging_face_folder`, without the setting."""
    if folder.is_file():
        yield f"a file, not a folder{_gguf_mend([folder])}; {_FIX}"
        return
    if not folder.is_dir():
        yield f"no such folder, so there is no config.json to read; {_FIX}"
        return
    if (folder / _ADAPTER_CONFIG).is_file():
        yield _adapter(folder)
        return
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        yield f"no Hugging Face model there (no config.json); {_without_config(folder)}"
        return
    except (OSError, ValueError) as error:
        yield f"its config.json cannot be read ({error}); {_AGAIN}, or {_FIX}"
        return
    if not isinstance(described, dict) or not isinstance(described.get("model_type"), str):
        yield f"its config.json names no model_type, so it is not of a transformers model; {_FIX}"
        described = {}
    elif (why := _unknown_architecture(folder, described)) is not None:
        yield why
    try:
        files = weight_files(folder)
        headers = {file.name: read_header(file) for file in files}
    except (OSError, ValueError) as error:
        yield f"{error}; {_AGAIN}"
        return
    if not files:
        yield f"it holds no weights in safetensors files ({WEIGHTS_FILE}, {INDEX_FILE}); {_no_weights(folder)}"
    elif not quantised and (why := _quantised(described, headers)) is not None:
        yield why


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model, as transformers chooses them: those in the folder's index, or one file.

    Raises:
        ValueError: the index cannot be read, or names a missing file, or the folder has one file as well.
    """
    one, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if not index.is_file():
        return [one] if one.is_file() else []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{INDEX_FILE} is no index of weights") from None
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(
            f"{INDEX_FILE} names {missing[0]}, which is not there ({len(missing)} of {len(names)} missing)"
        )
    if one.is_file() and names != [WEIGHTS_FILE]:
        raise ValueError(f"it has {WEIGHTS_FILE} and {INDEX_FILE} with other files; remove the one that is not its own")
    return [folder / name for name in names]


def read_header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: by tensor its `dtype`, `shape` and `data_offsets`.

    Raises:
        ValueError: the file is not a safetensors file, or is not complete.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        if (start + opened.read(len(_GIT_LFS) - len(start))).startswith(_GIT_LFS):
            raise ValueError(f"{file.name} is a pointer of Git LFS, not the file (`git lfs pull` fetches it)")
        opened.seek(len(start))
        try:
            header = json.loads(opened.read(length)) if 8 + length <= size else None
        except ValueError:  # JSON, or UTF-8
            header = None
    if not isinstance(header, dict):
        raise ValueError(f"{file.name} is no safetensors file, or was cut off ({size} bytes)")
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    try:
        wanted = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"{file.name} has a header without the tensors' places") from None
    if size < wanted:
        raise ValueError(f"{file.name} was cut off: it has {size} bytes of {wanted}")
    return tensors


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


def _no_weights(folder: Path) -> str:
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


def _quantised(described: Mapping[str, Any], headers: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return an error message if the weights are quantised, or the config says so."""
    tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
    packed = next(
        (
            name
            for name, tensor in tensors.items()
            if _QUANTISED_TYPES.match(str(tensor.get("dtype"))) or _QUANTISED_NAMES.search(name)
        ),
        None,
    )
    text = described.get("text_config")
    quantisation = described.get("quantization_config") or described.get("compression_config")
    quantisation = quantisation or (text.get("quantization_config") if isinstance(text, dict) else None)
    if packed is None and not quantisation:
        return None
    method = quantisation.get("quant_method", "an unknown method") if isinstance(quantisation, dict) else None
    if packed is None:
        return (
            f"its config.json has quantization_config ({method}), and its weights are plain; remove "
            "quantization_config from config.json if they were dequantised, else use the model without quantisation"
        )
    if method is None:
        return (
            f"its weights are quantised ({packed} is {tensors[packed].get('dtype')}), and its config.json has no "
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


def _unknown_architecture(folder: Path, described: Mapping[str, Any]) -> str | None:
    """Return why transformers has no causal language model for this `config.json`; None if it has one.

    A class of models for texts and pictures contains one; a classifier is for a critic or a reward.
    """
    kind = described["model_type"]
    if described.get("is_encoder_decoder") is True:
        return (
            f"an encoder-decoder ({kind}), whose answers are of another kind; use a causal language model (for a model "
            "with pictures: one of docs/vision.md)"
        )
    if (folder / "modules.json").is_file():
        return "an embedding model (sentence-transformers), which answers nothing; use a causal language model"
    if kind in _model_types():
        return None
    if "auto_map" in described:
        return (
            f"its architecture {kind!r} is code in that folder, which is not executed (docs/security.md); use a model "
            "whose architecture transformers has"
        )
    if not _model_types():
        return None
    return (
        f"transformers as installed here has no language model of type {kind!r} that answers; use a causal language "
        "model, or a transformers that knows this one"
    )


@cache
def _model_types() -> frozenset[str]:
    """Return the model types that transformers can load as language models; empty if its source does not show them.

    Read from the source of `transformers.models.auto.modeling_auto`: importing it takes seconds, and loads torch.
    """
    spec = importlib.util.find_spec("transformers")
    folders = spec.submodule_search_locations if spec is not None else None
    file = Path(next(iter(folders or [""]))) / "models" / "auto" / "modeling_auto.py"
    if not file.is_file():
        return frozenset()
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[ast.List(elts=pairs)])) if name in (
                "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
                "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
            ):
                for pair in pairs:
                    match pair:
                        case ast.Tuple(elts=[ast.Constant(value=str(kind)), *_]):
                            found.add(kind)
    return frozenset(found)
