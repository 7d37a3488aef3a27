"""Everything a training run needs to continue, written so that a kill at any moment leaves a whole checkpoint.

Each rank writes its share at the same time: a slice of the tensors of every part (a role whose weights or optimizer
change) and its random number state. The leading rank adds `state.json` (what the parts have beside tensors, and the
caller's own state, which is opaque here) and the manifest, and renames the directory into place. The slices are read by
any number of ranks. Tensors are safetensors, the rest is JSON: nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.runtime.run_dir import CHECKPOINT_STATE_FILE
from asyncrl.weights import atomic_dir
from asyncrl.weights.checkpoint_dir import latest, prune
from asyncrl.weights.manifest import Manifest, file_entry, write_manifest
from asyncrl.weights.tensor_file import write_tensors

if TYPE_CHECKING:
    from asyncrl.trainer.engines.base import TrainingEngine
    from asyncrl.trainer.parallel import Ranks

    Parts = Mapping[str, TrainingEngine]
    """By role."""


def save(parts: Parts, path: Path, ranks: Ranks, *, version: int, state: Mapping[str, Any], keep: int) -> None:
    """Write a checkpoint of policy `version` to `path` and delete old ones beside it. Called by all ranks.

    Args:
        state: any JSON values; `load` returns them.
        keep: checkpoints kept in the folder of `path`.

    Raises:
        PeerFailed: another rank could not write its part.
    """
    directory = atomic_dir.aside(path)

    def begin() -> None:
        if ranks.leads:
            atomic_dir.begin(path)

    def finish() -> None:
        if ranks.leads:
            # The key is older than averaged weights among the parts.
            metadata = {role: {**part.state()[1], "slices": ranks.world} for role, part in parts.items()}
            document = {"version": version, "optimizers": metadata, **state}
            atomic_dir.write_file(directory / CHECKPOINT_STATE_FILE, json.dumps(document).encode())
            files = {file.name: file_entry(file) for file in sorted(directory.iterdir())}
            write_manifest(directory, Manifest("checkpoint", version, files))
            atomic_dir.commit(path)
            prune(path.parent, keep)

    ranks.together(begin, f"creating {path}")
    ranks.together(lambda: write_share(parts, directory, ranks), f"writing {path}")
    ranks.together(finish, f"completing {path}")


def load(parts: Parts, root: Path, ranks: Ranks) -> dict[str, Any] | None:
    """Restore the newest whole checkpoint in `root`. Called by all ranks, which restore the same one.

    Returns:
        The state that `save` was given; None where there is no checkpoint, and nothing is changed then.

    Raises:
        ValueError: the checkpoint is of another model.
    """
    path = _agree_on_latest(root, ranks)
    if path is None:
        return None
    state: dict[str, Any] = json.loads((path / CHECKPOINT_STATE_FILE).read_bytes())
    for role, part in parts.items():
        if role not in state["optimizers"]:
            raise ValueError(f"{path} has no state of role {role!r}: it is of another graph; set resume=restart")
        meta = state["optimizers"][role]
        stored, mine = read_slices(path, role, meta["slices"]), part.state()[0]
        if {name: tensor.shape for name, tensor in stored.items()} != {name: mine[name].shape for name in mine}:
            raise ValueError(
                f"{path}: its {role} is a model with other parameters; start a new trial, or set resume=restart"
            )
        for name, tensor in mine.items():
            tensor.copy_(stored[name])
        part.load_state(meta)
    _restore_rng(path / _rng_file(ranks.rank))
    return state


def write_share(parts: Parts, directory: Path, ranks: Ranks) -> None:
    """Write this rank's files of a checkpoint into `directory`, synced."""
    for role, part in parts.items():
        share = {
            key: tensor.detach().tensor_split(ranks.world)[ranks.rank] if tensor.dim() else tensor
            for key, tensor in part.state()[0].items()
        }
        _write(directory / _slice_file(role, ranks.rank, ranks.world), share)
    _write(directory / _rng_file(ranks.rank), _rng_state())


def _agree_on_latest(root: Path, ranks: Ranks) -> Path | None:
    """The leading rank checks the files; the others follow it, so that no two ranks choose differently."""
    number = -1

    def look() -> None:
        nonlocal number
        if ranks.leads and (found := latest(root)) is not None:
            number = int(found.name[1:])

    ranks.together(look, f"looking for a checkpoint in {root}")
    chosen = int(ranks.all_reduce_max(torch.tensor([number], dtype=torch.int64)).item())
    return None if chosen < 0 else root / f"v{chosen}"


def read_slices(path: Path, name: str, world: int) -> dict[str, Tensor]:
    """The tensors of the part `name` in the checkpoint `path`, which `world` ranks wrote."""
    parts = [load_file(str(path / _slice_file(name, index, world))) for index in range(world)]
    return {
        key: torch.cat([part[key] for part in parts]) if tensor.dim() else tensor for key, tensor in parts[0].items()
    }


def _write(file: Path, tensors: Mapping[str, Tensor]) -> None:
    write_tensors(file, tensors)
    atomic_dir.sync_file(file)


def _slice_file(name: str, rank: int, world: int) -> str:
    return f"{name}-{rank}-of-{world}.safetensors"


def _rng_file(rank: int) -> str:
    return f"rng-{rank}.safetensors"


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_rng(file: Path) -> None:
    if not file.is_file():  # this run has more ranks than the one that wrote the checkpoint
        return
    state = load_file(str(file))
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
