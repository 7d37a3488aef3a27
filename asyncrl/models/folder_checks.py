"""Check a model's folder before anything loads it. Torch-free: only `config.json` and headers of files are read.

What is no model that can be trained is named, with the way to make one of it (`folder_mends`). Whether the files hold
every tensor of the model is known to transformers alone; `asyncrl.weights.whole_folder` asks it.
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
_AGAIN = "download the model again"
_QUANTISED_TYPES = re.compile(r"F(8|6|4)")
"""Types of tensors, in headers of safetensors files, of which each value needs a scale."""
_QUANTISED_NAMES = re.compile(
    r"[._](qweight|qzeros|g_idx|absmax|quant_map|quant_state[\w.]*|SCB|weight_packed|weight_scale(_inv|_2)?|"
    r"input_scale|(proj|weight)_(blocks|scales))$|:(qdata|scale|zero_point)$|_quantized\.|:_data$|:_scale$"
)
"""Names of the tensors that bitsandbytes, GPTQ, AWQ, compressed-tensors, fp8, mxfp4 and torchao store."""


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
    try:
        described, unread = json.loads((folder / "config.json").read_text(encoding="utf-8")), None
    except (OSError, ValueError) as error:
        described, unread = {}, error
    if unread is not None or (folder / _ADAPTER_CONFIG).is_file():
        from asyncrl.models.folder_mends import no_model

        yield no_model(folder, unread)
        return
    if not isinstance(described, dict) or not isinstance(described.get("model_type"), str):
        yield (
            "its config.json names no model_type, so it is not of a transformers model; give the folder of a "
            "downloaded model"
        )
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
        from asyncrl.models.folder_mends import no_weights

        yield f"it holds no weights in safetensors files ({WEIGHTS_FILE}, {INDEX_FILE}); {no_weights(folder)}"
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
        raise ValueError(f"{file.name} has a header without the tensors' offsets") from None
    if size < wanted:
        raise ValueError(f"{file.name} was cut off: it has {size} bytes of {wanted}")
    return tensors


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
    from asyncrl.models.folder_mends import quantised

    return quantised(quantisation, packed and f"{packed} is {tensors[packed].get('dtype')}")


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
