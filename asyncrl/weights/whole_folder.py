"""Check that a model folder's files hold the model that its `config.json` describes: every tensor, in its shape.

transformers only warns of a tensor that is missing or unknown, and draws random values for it. Which names a folder may
have is known to transformers alone: it renames, joins and ties tensors. So its own loader places tensors without values
in a model without memory (`trial_load`), which takes well below a second for any size.

As a program, `python -m asyncrl.weights.whole_folder`, it reads folders from its input, for processes without torch
(`asyncrl.launch.before_start.models`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.utils import logging

from asyncrl.comm.typed import decode_json
from asyncrl.models.folder_checks import ModelPart, WantedFolder, folder_faults, read_header, weight_files
from asyncrl.models.parity import UnsupportedModelError
from asyncrl.models.transformers_internals import TrialLoad, language_model, trial_load
from asyncrl.weights.tensor_file import DTYPES

HEAD = "score"
"""Name of the head of transformers' sequence and token classifiers."""
_OUTPUT = "lm_head.weight"
_SHOWN = 3


class IncompleteModelError(UnsupportedModelError):
    """A folder's files do not hold the model that its config describes; the message says what to do."""


def check_whole(path: str | Path, part: ModelPart = ModelPart.language) -> None:
    """Check that the files in `path` hold `part` of the model.

    Raises:
        IncompleteModelError: they do not.
    """
    folder = Path(path).expanduser()
    if (fault := _fault(folder, part)) is not None:
        raise IncompleteModelError(f"{str(folder)!r}: {fault}")


def head_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a classifier's head in the folder `path`, by their names there; empty if it has none."""
    return {name: tuple(tensor.shape) for name, tensor in _stored(Path(path).expanduser()).items() if _is_head(name)}


def read_tensor(folder: Path, name: str) -> Tensor:
    """Return the tensor `name` of the model in `folder`.

    Raises:
        KeyError: it has none.
    """
    for file in weight_files(folder):
        if name in read_header(file):
            with safe_open(file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
            return tensor
    raise KeyError(name)


def _fault(folder: Path, part: ModelPart) -> str | None:
    """Return an error message if `folder` does not hold `part` of a model; None if it does."""
    if (fault := next(folder_faults(folder), None)) is not None:
        return fault
    stored = _stored(folder)
    if part != ModelPart.language and (why := _wrong_head(stored, needed=part == ModelPart.reward)) is not None:
        return why
    try:
        return _difference(_loaded(folder, part, stored))
    except Exception as error:  # an architecture's own code may raise any
        return f"transformers makes no model of it: {type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _loaded(folder: Path, part: ModelPart, stored: dict[str, Tensor]) -> TrialLoad:
    """Try to load `part` of the model with the tensors `stored`."""
    config = AutoConfig.from_pretrained(str(folder))

    def load(kind: object) -> TrialLoad:
        return trial_load(kind, config, stored, lambda name: read_tensor(folder, name))

    if part == ModelPart.language:
        return load(language_model(folder))
    if part == ModelPart.reward:
        return load(AutoModelForSequenceClassification)
    found = load(AutoModel)
    if not found.unexpected:
        return found
    # A language model's head is left out on purpose, any other tensor is not.
    known = {name for name in load(language_model(folder)).unexpected if not _is_head(name)}
    return found._replace(unexpected=[name for name in found.unexpected if name in known])


def _wrong_head(stored: dict[str, Tensor], *, needed: bool) -> str | None:
    """Return an error message if the head of a classifier does not give one score; None if there is none."""
    head = {name: tensor for name, tensor in stored.items() if _is_head(name)}
    weight = head.get(f"{HEAD}.weight")
    if not head and not needed:
        return None
    if weight is None or weight.ndim != 2 or head.keys() - {f"{HEAD}.weight", f"{HEAD}.bias"}:
        what = f"has {_listed(head)}" if head else "has none"
        return f"its head is to be one linear layer called {HEAD}, and it {what}; train it with num_labels=1"
    if weight.shape[0] != 1:
        return (
            f"its head {HEAD} gives {weight.shape[0]} labels, and a value or a reward is a single score; use a model "
            "that was trained with num_labels=1"
        )
    return None


def _difference(found: TrialLoad) -> str | None:
    """Return an error message that names what differs between files and model; None if nothing does."""
    faults = []
    if found.missing:
        faults.append(f"its files lack {_listed(found.missing)}, which would get random values")
    if found.unexpected:
        faults.append(f"its files have {_listed(found.unexpected)}, which the model of its config.json does not have")
    if found.misshapen:
        shapes = [f"{name} is {list(there)}, not {list(here)}" for name, (there, here) in found.misshapen.items()]
        faults.append(f"in its files {_listed(sorted(shapes))} as in its config.json")
    if found.failed:
        faults.append(f"its files do not fill {_listed(sorted(found.failed))}")
    if found.torn:
        one, other = found.torn[0]
        return (
            f"its config.json ties {one} to {other}, and its files have both with different values; set "
            "tie_word_embeddings to false in config.json if both are meant, or remove one of the two"
        )
    if not faults:
        return None
    prefix = _common_prefix(found)
    mend = f"rename the tensors (without {prefix!r})" if prefix else "take config.json and files of the same model"
    if found.missing == [_OUTPUT]:
        mend += ", or set tie_word_embeddings to true in config.json if its output embedding is the input's"
    return f"{'; '.join(faults)}; {mend}"


def _common_prefix(found: TrialLoad) -> str | None:
    """Return what other programs put before all names; None if that is not the difference."""
    missing = set(found.missing)
    for name in found.unexpected[:1]:
        parts = name.split(".")
        for count in range(1, len(parts)):
            if ".".join(parts[count:]) in missing:
                return ".".join(parts[:count]) + "."
    return None


def _listed(names: Collection[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(list(names)[:_SHOWN]) + more


def _is_head(name: str) -> bool:
    return name.split(".")[0] == HEAD


def _stored(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the folder's files, on the meta device."""
    headers = (read_header(file) for file in weight_files(folder))
    return {
        name: torch.empty(tensor["shape"], dtype=DTYPES.get(tensor["dtype"], torch.float32), device="meta")
        for header in headers
        for name, tensor in header.items()
    }


def _faults(folders: Collection[WantedFolder]) -> Iterator[str]:
    for wanted in folders:
        if (fault := _fault(Path(wanted.path).expanduser(), wanted.part)) is not None:
            yield f"{wanted.setting}={wanted.path!r}: {fault}"


if __name__ == "__main__":
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    asked = decode_json(sys.stdin.buffer.read(), list[WantedFolder])
    sys.stdout.buffer.write(msgspec.json.encode(list(_faults(asked))))
