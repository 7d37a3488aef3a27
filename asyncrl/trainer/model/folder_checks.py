"""Check a model's folder before anything loads it. Torch-free: only the headers of the weight files are read.

Names, shapes and sizes in the headers reveal three mistakes: a download that was cut off, a pointer of Git LFS in place
of a file, and a `config.json` of another model. Values are not checked, nor are `*.bin` files, which are pickles.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_SAFETENSORS, _PICKLES = "*.safetensors", "*.bin"
_INDEX = "model.safetensors.index.json"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
"""Ends of the names of the matrix [vocabulary, hidden] of input embeddings."""
_EMBEDDING_WIDTHS = ("word_embed_proj_dim", "embedding_size")
"""Settings of a model whose embeddings are of another width than its layers."""
_GIT_LFS = b"version https://git-lfs"
_FIX = "give the folder of a downloaded model"
_AGAIN = "download the model again"


def hugging_face_folder(name: str, path: str) -> Iterator[str]:
    """Yield an error message for each problem of the model folder `path`, the value of the setting `name`."""
    folder, given = Path(path).expanduser(), f"{name}={path!r}"
    if not folder.is_dir():
        yield f"{given}: no such folder, so there is no config.json to read; {_FIX}"
        return
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        yield f"{given}: no Hugging Face model there (no config.json); {_FIX}"
        return
    except (OSError, ValueError) as error:
        yield f"{given}: its config.json cannot be read ({error}); {_AGAIN}, or {_FIX}"
        return
    if not isinstance(described, dict) or not isinstance(described.get("model_type"), str):
        yield f"{given}: its config.json names no model_type, so it is not of a transformers model; {_FIX}"
        described = {}
    elif (why := _unknown_architecture(described)) is not None:
        yield f"{given}: {why}"
    if not any(True for pattern in (_SAFETENSORS, _PICKLES) for _ in folder.glob(pattern)):
        yield f"{given}: it holds no weights ({_SAFETENSORS}, {_PICKLES}); download them too, or {_FIX}"
        return
    if (why := _wrong_weights(folder, described)) is not None:
        yield f"{given}: {why}; {_AGAIN}"


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


def _wrong_weights(folder: Path, described: Mapping[str, Any]) -> str | None:
    """Return an error message if the safetensors files in `folder` are damaged or contradict its `config.json`."""
    shapes: dict[str, list[int]] = {}
    try:
        for file in _files(folder):
            shapes |= {name: tensor.get("shape", []) for name, tensor in read_header(file).items()}
    except (OSError, ValueError) as error:
        return str(error)
    text = described.get("text_config") or described
    if not shapes or not isinstance(text, dict):
        return None
    matrices = {name: shape for name, shape in shapes.items() if name.endswith(_EMBEDDINGS) and len(shape) == 2}
    own_width = any(key in text for key in _EMBEDDING_WIDTHS)
    for axis, key in enumerate(("vocab_size",) if own_width else ("vocab_size", "hidden_size")):
        wanted = text.get(key)
        if matrices and isinstance(wanted, int) and all(shape[axis] != wanted for shape in matrices.values()):
            name, (rows, columns) = next(iter(matrices.items()))
            return f"its config.json says {key}={wanted}, and {name} in its weights is {rows} x {columns}"
    layers = {int(part) for name in shapes for part in _layer_numbers(name)}
    if layers and isinstance(wanted := text.get("num_hidden_layers"), int) and max(layers) + 1 < wanted:
        return f"its config.json says num_hidden_layers={wanted}, and its weights have {max(layers) + 1} layers"
    return None


def _files(folder: Path) -> list[Path]:
    """Return the safetensors files that the folder's index names, else all of it.

    Raises:
        ValueError: the index cannot be read, or names a missing file.
    """
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob(_SAFETENSORS))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{_INDEX} is no index of weights") from None
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{_INDEX} names {missing[0]}, which is not there ({len(missing)} of {len(names)} missing)")
    return [folder / name for name in names]


def _layer_numbers(tensor: str) -> Iterator[str]:
    """Yield the number of the decoder layer of `tensor`; nothing if its name does not contain one."""
    head, layers, rest = tensor.partition("model.layers.")
    number = rest.partition(".")[0]
    if layers and not head.replace("language_model.", "").strip("model.") and number.isdigit():
        yield number


def _unknown_architecture(described: Mapping[str, Any]) -> str | None:
    """Return why transformers has no causal language model for this `config.json`; None if it has one.

    A class of models for texts and pictures contains one; a classifier is for a critic or a reward.
    """
    kind = described["model_type"]
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
