"""Replace a model's parameters by those of a Hugging Face checkpoint on disk, all or nothing.

`stage_weights` reads and checks everything without changing the model, so it may run while the engine decodes. Its
result is applied between two steps. If a tensor is missing, unknown or misshapen, or a file cannot be read, the whole
update is refused.

A folder with a manifest (`weights.manifest`) is verified while it is read: each file right before its tensors, so that
it is read from the disk once, and its checksum is computed from the page cache.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.models.folder_checks import weight_files
from asyncrl.weights.folder_tensors import WholeModel, held_tensors
from asyncrl.weights.manifest import (
    MANIFEST_FILE,
    DamagedWeights,
    ManifestError,
    WeightUpdateError,
    verify,
    verify_file,
)


def read_checkpoint(folder: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Read the tensors of the checkpoint in `folder`, by name, on the CPU; only those in `names`, if given.

    Raises:
        DamagedWeights: a file is not what the folder's manifest says.
        WeightUpdateError: the folder has no checkpoint, or it cannot be read.
    """
    tensors: dict[str, Tensor] = {}
    try:
        made_here = (folder / MANIFEST_FILE).is_file()  # else by another program
        manifest = verify(folder, checksums=False) if made_here else None
        for shard in _shards(folder):
            if manifest is not None:
                verify_file(shard, manifest)
            with _opened(shard) as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    if names is None or name in names:
                        tensors[name] = file.get_tensor(name)
    except ManifestError as error:
        raise DamagedWeights(str(error)) from error
    except (OSError, ValueError) as error:  # a path that is too long, or holds a null byte
        raise WeightUpdateError(f"model_path {str(folder)[:200]!r} cannot be read: {error}") from error
    return tensors


def checkpoint_files(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor of the checkpoint in `folder`.

    Raises:
        WeightUpdateError: the folder has no checkpoint, or it cannot be read.
    """
    files: dict[str, Path] = {}
    for shard in _shards(folder):
        with _opened(shard) as file:
            files |= dict.fromkeys(file.keys(), shard)
    return files


def _shards(folder: Path) -> list[Path]:
    """Return the checkpoint's safetensors files: those of a model, else all in the folder (adapters)."""
    if not folder.is_dir():
        raise WeightUpdateError(f"model_path {str(folder)!r} is not a folder; give a folder with *.safetensors")
    try:
        shards = weight_files(folder) or sorted(folder.glob("*.safetensors"))
    except (ValueError, TypeError, RecursionError) as error:
        raise WeightUpdateError(f"model_path {str(folder)!r}: {error}") from error
    if not shards:
        raise WeightUpdateError(f"model_path {str(folder)!r} holds no *.safetensors")
    for shard in shards:
        if not shard.is_file():  # opening a FIFO or a device could block forever, and the interpreter with it
            raise WeightUpdateError(f"{str(shard)!r} is not a regular file")
    return shards


@contextmanager
def _opened(shard: Path) -> Iterator[Any]:
    try:
        with safe_open(shard, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise WeightUpdateError(f"cannot read {str(shard)!r}: {error}") from error


def load_targets(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors into which a folder's tensors are copied, by every name that they may have in the folder.

    Raises:
        FolderFormatError: see `asyncrl.weights.folder_tensors.folder_tensors`.
    """
    views, parameters = WholeModel(model).tensors(), held_tensors(model)
    aliases = {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
    return views | aliases


def stage_weights(targets: Mapping[str, Tensor], folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Return pairs (parameter of the model or part of one, new value), after a check of completeness and shapes.

    `targets` are the model's parameters and buffers, or views of them, by their names in a folder (`load_targets`).
    Tied parameters may appear under several names; one of them in the checkpoint is enough, and all that are present
    must agree in shape.

    Raises:
        DamagedWeights: a file is not what the folder's manifest says; nothing was changed.
        WeightUpdateError: the checkpoint does not fit the model; nothing was changed.
    """
    return match_weights(targets, read_checkpoint(folder), folder)


def match_weights(
    targets: Mapping[str, Tensor], found: Mapping[str, Tensor], folder: Path
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs (parameter of the model, new value) for the tensors `found` in `folder`; see `stage_weights`.

    Raises:
        WeightUpdateError: the tensors do not fit the model.
    """
    unknown = sorted(set(found) - set(targets))
    if unknown:
        raise WeightUpdateError(
            f"{str(folder)!r} holds {unknown[0]!r} ({len(unknown)} such), which the model does not have"
        )
    values: dict[int, tuple[Tensor, Tensor]] = {}
    for name, target in targets.items():
        value = found.get(name)
        if value is None:
            continue
        if value.shape != target.shape:
            raise WeightUpdateError(f"{name} has shape {tuple(value.shape)}, the model's is {tuple(target.shape)}")
        values[target.data_ptr()] = (target, value)
    missing = sorted(name for name, target in targets.items() if target.data_ptr() not in values)
    if missing:
        raise WeightUpdateError(
            f"{str(folder)!r} lacks {missing[0]!r} ({len(missing)} missing); give a whole checkpoint"
        )
    return list(values.values())


@torch.no_grad()
def apply_weights(staged: list[tuple[Tensor, Tensor]]) -> None:
    """Copy staged values into the model, converting to its dtype and device."""
    for target, value in staged:
        target.copy_(value)
