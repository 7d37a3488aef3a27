"""The base model of an RL experiment: made by a supervised experiment on first use, then reused.

The folder's name holds a digest of every setting that affects the result, so a changed recipe is a new model. The
folder is searched under `fileroot`, then in the default cache: an experiment with another `fileroot` need not train it
again.
The models of the built-in recipes come with the package, in `experiments/base_models`. They are copied to `fileroot`,
which all hosts of a run share. `experiments/recipes/ship_base_models.py` makes them from their recipes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.comm.files import NotPrivate, check_tree, make_private_folder
from asyncrl.config.load import experiments_dir
from asyncrl.data.settings import is_data_path
from asyncrl.data.tokenizers import CharTokenizer, model_files
from asyncrl.models.model_config import for_all_versions, read_model_config
from asyncrl.observe.display import wrapped
from asyncrl.trainer.settings import VisionMode
from asyncrl.trainer.supervised.settings import CROSS_ENTROPY, DEFAULT_FILEROOT, DEMO_MODEL, SFTConfig
from asyncrl.weights import atomic_dir

NOT_IN_DIGEST = ("fileroot", "experiment_name", "tokens_per_micro_batch", "eval", "checkpoint")
"""Settings that change the place or the speed of training, but not the model."""
SHIPPED_DIR = "base_models"
"""Folder beside the built-in experiments that holds their base models."""
SHIPPED_FILE = "base_model.json"
"""File beside a model that comes with the package: its recipe, the SHA-256 of its files, its accuracy."""


class BaseModelError(RuntimeError):
    """Supervised training failed; the message ends with its last lines."""


def base_model_dir(config: SFTConfig) -> Path:
    """Return the folder of the model of `config`, which need not exist: under its `fileroot`, unless only the default
    cache has it.
    """
    name = _name(config)
    folders = [Path(root).expanduser().resolve() / "models" / name for root in (config.fileroot, DEFAULT_FILEROOT)]
    return next((folder for folder in folders if _is_model(folder)), folders[0])


def shipped_dir(config: SFTConfig) -> Path:
    """Return the folder in which the package has the model of `config`; it exists for built-in recipes only."""
    return experiments_dir() / SHIPPED_DIR / _name(config)


def existing_base_model(config: SFTConfig) -> Path | None:
    """Return the folder of the model of `config`, or of the copy in the package; None if it must be trained first."""
    return next((folder for folder in (base_model_dir(config), shipped_dir(config)) if _is_model(folder)), None)


def described(config: SFTConfig) -> dict[str, Any]:
    """Return the `config.json` of `config`'s model, as far as it decides sizes; the model need not exist yet.

    Raises:
        OSError, ValueError: `model.path` has no readable `config.json`.
    """
    if config.model.path is not None:
        return read_model_config(config.model.path)
    return {"vocab_size": CharTokenizer().vocab_size, **(config.model.architecture or DEMO_MODEL)}


def _name(config: SFTConfig) -> str:
    decisive = {key: value for key, value in asdict(config).items() if key not in NOT_IN_DIGEST}
    if (tokenizer := decisive["model"].pop("tokenizer")) is not None:  # the content of the folder counts, not its path
        decisive["tokenizer"] = _content(Path(tokenizer).expanduser())
    if (data := Path(config.dataset.path).expanduser()).exists() and is_data_path(config.dataset.path):
        from asyncrl.data.files import files_of

        files = files_of(data, config.dataset.args.get("files", ""))
        decisive["rows"] = [_sum(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    if decisive["model"]["lora"]["rank"] == 0:
        del decisive["model"]["lora"]
    if decisive["loss"]["name"] == CROSS_ENTROPY:
        del decisive["loss"]
    if decisive["model"]["vision"] == VisionMode.train:
        del decisive["model"]["vision"]
    if decisive["trainer"]["parallel"] == "d1":  # other layouts add in another order
        del decisive["trainer"]
    digest = hashlib.blake2b(json.dumps(decisive, sort_keys=True).encode(), digest_size=4).hexdigest()
    return f"{config.experiment_name}-{digest}"


@cache
def _sum(file: Path, size: int, changed_ns: int) -> str:
    """Return the digest of the content of `file`, which has this size and time of its last change."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def _content(folder: Path) -> dict[str, str]:
    """Return the digest of each file in `folder`."""
    files = model_files(folder).items()
    return {name: hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest() for name, file in files}


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def ensure_base_model(config: SFTConfig) -> Path:
    """Return the folder of `config`'s model. If there is none, copy it from the package or train it, with progress.

    Raises:
        BaseModelError: training failed, or the folder cannot be used.
    """
    folder = base_model_dir(config)
    if not _is_model(folder):
        try:
            make_private_folder(folder.parent)  # other users must not be able to hold its lock
        except (NotPrivate, OSError) as error:
            raise BaseModelError(f"fileroot={config.fileroot!r}: {error}") from error
        with _only_one(folder.parent):
            if not _is_model(folder):  # else another launch has made the model meanwhile
                _copy(shipped, folder) if _is_model(shipped := shipped_dir(config)) else _make(config, folder)
    elif folder.lstat().st_uid != 0:  # else of an image that root made
        try:
            check_tree(folder)  # another user of a shared folder could have put anything there
        except (NotPrivate, OSError) as error:
            raise BaseModelError(f"fileroot={config.fileroot!r}: {error}") from error
    if folder.parents[1] != Path(config.fileroot).expanduser().resolve():
        _note(f"base model: {folder} (fileroot={config.fileroot} has none of its own)")
    return folder


def _copy(shipped: Path, folder: Path) -> None:
    aside = atomic_dir.begin(folder)
    for name, file in model_files(shipped).items():
        atomic_dir.write_file(aside / name, for_all_versions(name, file.read_bytes()))
    atomic_dir.commit(folder)
    _note(f"base model: {folder}, copied from the package")


def _note(text: str) -> None:
    console = Console(highlight=False)
    console.print(wrapped(text, console), markup=False, soft_wrap=True)


def _make(config: SFTConfig, folder: Path) -> None:
    from asyncrl.trainer.supervised.child import make_in_child  # on a model's first use

    if (why := make_in_child(config, folder)) is not None:
        raise BaseModelError(why)


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the lock on `folder`, so that of several launches one makes the model and the others find it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
