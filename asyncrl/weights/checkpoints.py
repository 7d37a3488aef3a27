"""Everything a training run needs to continue, written so that a kill at any moment leaves a whole checkpoint.

Each rank writes its share at the same time: a slice of every trained role's flat vectors (master weights and AdamW's
moments) and its random number state. Rank 0 adds `state.json` (schedules, KL coefficient, value normalisation, and the
master's own state, which is opaque here) and the manifest, and renames the directory into place. The slices are read by
any number of ranks. Tensors are safetensors, the rest is JSON: nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.trainer.parallel import Ranks
from asyncrl.trainer.roles import TrainingRank
from asyncrl.weights import atomic_dir
from asyncrl.weights.checkpoint_dir import STATE_FILE, latest, prune
from asyncrl.weights.manifest import Manifest, file_entry, write_manifest
from asyncrl.weights.tensor_file import write_tensors

_SLICED = ("flat", "exp_avg", "exp_avg_sq")
"""Optimizer tensors as long as the model, which ranks share out; the rest is a few bytes."""


def save(rank: TrainingRank, path: Path, *, version: int, master_state: Any, keep: int) -> None:
    """Write a checkpoint of policy `version` to `path` and delete old ones beside it. Called by all ranks.

    Args:
        master_state: the master's own state, any JSON value; `load` returns it.
        keep: checkpoints kept in the folder of `path`.

    Raises:
        PeerFailed: another rank could not write its part.
    """
    ranks = rank.ranks
    ranks.together(lambda: _begin(path, ranks), f"creating {path}")
    ranks.together(lambda: write_share(rank, atomic_dir.aside(path)), f"writing {path}")
    ranks.together(lambda: _finish(rank, path, version, master_state, keep), f"completing {path}")


def load(rank: TrainingRank, root: Path) -> Any:
    """Restore the newest whole checkpoint in `root`. Called by all ranks, which restore the same one.

    Returns:
        The master's state; None where there is no checkpoint, and nothing is changed then.

    Raises:
        ValueError: the checkpoint is of another model.
    """
    path = _agree_on_latest(root, rank.ranks)
    if path is None:
        return None
    state = json.loads((path / STATE_FILE).read_bytes())
    for role, engine in rank.engines.items():
        if engine.optimizer is not None:
            if role not in state["optimizers"]:
                raise ValueError(f"{path} has no state of role {role!r}: it is of another graph; set resume=restart")
            meta = state["optimizers"][role]
            engine.optimizer.load_state(read_slices(path, role, meta["slices"]), meta)
        elif role in rank.averaged:
            engine.module.load_state_dict(load_file(str(path / _averaged_file(role))))
    rank.state.load_state_dict(state["train_state"])
    _restore_rng(path / _rng_file(rank.ranks.rank))
    return state["master_state"]


def _begin(path: Path, ranks: Ranks) -> None:
    if ranks.rank == 0:
        atomic_dir.begin(path)


def write_share(rank: TrainingRank, directory: Path) -> None:
    """Write this rank's files of a checkpoint into `directory`, synced."""
    ranks = rank.ranks
    for role, engine in rank.engines.items():
        if engine.optimizer is not None:
            tensors, _ = engine.optimizer.state()
            share = {key: _slice(tensor, ranks) for key, tensor in tensors.items() if key in _SLICED}
            share |= {key: tensor for key, tensor in tensors.items() if key not in _SLICED}
            _write(directory / _slice_file(role, ranks.rank, ranks.world), share)
        elif role in rank.averaged and ranks.rank == 0:
            _write(directory / _averaged_file(role), dict(engine.module.state_dict()))
    _write(directory / _rng_file(ranks.rank), _rng_state())


def _finish(rank: TrainingRank, path: Path, version: int, master_state: Any, keep: int) -> None:
    if rank.ranks.rank != 0:
        return
    directory = atomic_dir.aside(path)
    optimizers = {
        role: {**engine.optimizer.state()[1], "slices": rank.ranks.world}
        for role, engine in rank.engines.items()
        if engine.optimizer is not None
    }
    state = {
        "version": version,
        "optimizers": optimizers,
        "train_state": rank.state.state_dict(),
        "master_state": master_state,
    }
    atomic_dir.write_file(directory / STATE_FILE, json.dumps(state).encode())
    files = {file.name: file_entry(file) for file in sorted(directory.iterdir())}
    write_manifest(directory, Manifest("checkpoint", version, files))
    atomic_dir.commit(path)
    prune(path.parent, keep)


def _agree_on_latest(root: Path, ranks: Ranks) -> Path | None:
    """Rank 0 checks the files; the others follow it, so that no two ranks choose differently."""
    number = -1

    def look() -> None:
        nonlocal number
        if ranks.rank == 0 and (found := latest(root)) is not None:
            number = int(found.name[1:])

    ranks.together(look, f"looking for a checkpoint in {root}")
    chosen = int(ranks.all_reduce_max(torch.tensor([number], dtype=torch.int64)).item())
    return None if chosen < 0 else root / f"v{chosen}"


def _slice(tensor: Tensor, ranks: Ranks) -> Tensor:
    return tensor.detach().tensor_split(ranks.world)[ranks.rank]


def read_slices(path: Path, role: str, world: int) -> dict[str, Tensor]:
    """The optimizer tensors of `role` in the checkpoint `path`, which `world` ranks wrote."""
    parts = [load_file(str(path / _slice_file(role, index, world))) for index in range(world)]
    return {
        key: torch.cat([part[key] for part in parts]) if key in _SLICED else tensor for key, tensor in parts[0].items()
    }


def _write(file: Path, tensors: Mapping[str, Tensor]) -> None:
    write_tensors(file, tensors)
    atomic_dir.sync_file(file)


def _slice_file(role: str, rank: int, world: int) -> str:
    return f"{role}.optimizer-{rank}-of-{world}.safetensors"


def _averaged_file(role: str) -> str:
    return f"{role}.averaged.safetensors"


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
