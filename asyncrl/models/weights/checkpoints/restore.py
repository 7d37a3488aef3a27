"""Restore a checkpoint of `CheckpointWriter`, in any current layout of the ranks."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.config.run_dir import CHECKPOINT_STATE_FILE
from asyncrl.models.ranks import Ranks
from asyncrl.models.weights.checkpoints.checkpoint_folder import latest
from asyncrl.models.weights.checkpoints.distributed_checkpoint import StoredTensors
from asyncrl.models.weights.checkpoints.shard_copies import Parts, all_tensors
from asyncrl.models.weights.checkpoints.writer import FORMAT


def restore_newest(parts: Parts, root: Path, ranks: Ranks) -> dict[str, Any] | None:
    """Restore the newest whole checkpoint in `root`. Called by all ranks, which restore the same one.

    Returns:
        The state that was passed to `CheckpointWriter.begin`; None if there is no checkpoint, and then nothing changes.

    Raises:
        ValueError: the checkpoint is of another model or graph, or of an older asyncrl; nothing is changed then.
    """
    path = _agree_on_latest(root, ranks)
    if path is None:
        return None
    state = read_state(path)
    for role in parts:
        if role not in state["roles"]:
            raise ValueError(f"{path} has no state of role {role!r}: it is of another graph; set resume=restart")
    _check_same_model(path, StoredTensors(path), all_tensors(parts), parts, ranks)
    return restore(parts, path, ranks)


def restore(parts: Parts, path: Path, ranks: Ranks) -> dict[str, Any]:
    """Restore the checkpoint in the folder `path`, which is known to be of this model. Called by all ranks.

    If ranks are on several hosts, the folder of each host has what its ranks hold.

    Returns:
        The state that was passed to `CheckpointWriter.begin`.

    Raises:
        PeerFailed: another rank could not restore it.
        ValueError: the folder lacks a tensor that this rank holds.
    """
    state = read_state(path)
    mine = all_tensors(parts)
    stored = StoredTensors(path, {name: tensor.shape for name, tensor in mine.items()})

    def read() -> None:
        for role, part in parts.items():
            with part.on_device():
                stored.read_into({n: tensor for n, tensor in mine.items() if n.startswith(f"{role}.")})
                part.load_state(state["roles"][role])
        _restore_rng(stored, ranks.rank)

    ranks.together(read, f"reading {path}")
    return state


def read_state(path: Path) -> dict[str, Any]:
    """Read the state of the checkpoint `path` beside its tensors.

    Raises:
        ValueError: an older asyncrl wrote it.
    """
    state: dict[str, Any] = json.loads((path / CHECKPOINT_STATE_FILE).read_bytes())
    if state.get("format") != FORMAT:
        raise ValueError(
            f"{path} was written by another version of asyncrl (format {state.get('format', 2)}, this one reads "
            f"{FORMAT}); continue with the version that wrote it, or set resume=restart to start over"
        )
    return state


def _check_same_model(
    path: Path, stored: StoredTensors, mine: Mapping[str, Tensor], roles: Collection[str], ranks: Ranks
) -> None:
    """Check that the ranks together hold exactly the tensors that are stored of `roles`, in the same shapes.

    Raises:
        ValueError: the tensors differ; the message names the difference.
    """
    names = sorted(name for name in stored.shapes if name.partition(".")[0] in roles)
    wanted = ranks.all_reduce_max(torch.tensor([float(name in mine) for name in names]))
    wrong = [name for name, tensor in mine.items() if stored.shapes.get(name) != tuple(tensor.shape)]
    wrong += [name for name, flag in zip(names, wanted.tolist(), strict=True) if not flag]

    def refuse() -> None:
        if wrong:
            raise ValueError(
                f"{path} is of a model with other parameters ({len(wrong)} differ, for example {wrong[0]!r}); start a "
                "new trial, or set resume=restart"
            )

    ranks.together(refuse, f"comparing the model with {path}")


def _agree_on_latest(root: Path, ranks: Ranks) -> Path | None:
    """Return the newest checkpoint.

    The leading rank checks the files and the others follow, so that all choose the same.
    """
    number = -1

    def look() -> None:
        nonlocal number
        if ranks.leads and (found := latest(root)) is not None:
            number = int(found.name[1:])

    ranks.together(look, f"looking for a checkpoint in {root}")
    chosen = int(ranks.all_reduce_max(torch.tensor([number], dtype=torch.int64)).item())
    return None if chosen < 0 else root / f"v{chosen}"


def _restore_rng(stored: StoredTensors, rank: int) -> None:
    """Restore this rank's random number state.

    A rank that did not exist at the time of saving keeps its current state.
    """
    if (name := f"rng.{rank}.cpu") in stored.shapes:
        torch.set_rng_state(stored.read(name))
    if (name := f"rng.{rank}.cuda") in stored.shapes and torch.cuda.is_available():
        torch.cuda.set_rng_state(stored.read(name))
