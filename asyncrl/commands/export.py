"""`asyncrl export RUN [--step N] OUT`: the policy of a step as a plain Hugging Face folder.

The weights are those that were published as that version, bit by bit: from their folder where it is still there, else
from the checkpoint, whose fp32 master values are rounded as the trainer rounds them. What a checkpoint does not hold,
configuration, tokenizer and whatever training never changes, comes from any version that was published.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.comm.names import ACTOR
from asyncrl.runtime.run_dir import CHECKPOINTS_DIR, CONFIG_FILE, WEIGHTS_DIR, versions_in
from asyncrl.trainer.parallel import Ranks
from asyncrl.weights.canary import CANARY_FILE
from asyncrl.weights.checkpoints import read_state
from asyncrl.weights.distributed_checkpoint import StoredTensors
from asyncrl.weights.manifest import MANIFEST_FILE, Manifest, ManifestError, TensorEntry, verify
from asyncrl.weights.model_folder import FolderTensor, folder_tensors
from asyncrl.weights.published import TensorSpec
from asyncrl.weights.publishing import write_model
from asyncrl.weights.tensor_file import DTYPE_NAMES

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class ExportError(RuntimeError):
    """There is nothing to export, or nowhere to export it to; the message says why and what there is."""


def main(argv: Sequence[str], program: str) -> int:
    """The command line after `export`; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"{program} export", description="Write a policy as a Hugging Face folder.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run: <fileroot>/<experiment>/<trial>")
    parser.add_argument("--step", type=int, metavar="N", help="train steps of the policy; the newest by default")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; it must not exist")
    args = parser.parse_intermixed_args(argv)
    try:
        step = export(args.run.expanduser(), args.step, args.out.expanduser())
    except (ExportError, ManifestError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: the policy after {step} steps of {args.run}")
    return 0


def export(run: Path, step: int | None, out: Path) -> int:
    """Write the policy of the run `run` after `step` steps (None: the newest) to the new folder `out`; returns `step`.

    Raises:
        ExportError: there is no such run or step, or `out` exists.
        ManifestError, ValueError, OSError: what there is of the step cannot be read, or `out` not be written.
    """
    if not (run / CONFIG_FILE).is_file():
        raise ExportError(f"{run} is no run: it has no {CONFIG_FILE}; give a folder <fileroot>/<experiment>/<trial>")
    if out.exists():
        raise ExportError(f"{out} exists; give a folder that does not")
    published, saved = run / WEIGHTS_DIR / ACTOR, run / CHECKPOINTS_DIR
    there = {f"published in {published}": versions_in(published), f"checkpoints in {saved}": versions_in(saved)}
    steps = sorted({version for versions in there.values() for version in versions})
    if step is None and steps:
        step = steps[-1]
    if step is None or step not in steps:
        listed = "; ".join(f"{where}: {', '.join(map(str, versions)) or 'none'}" for where, versions in there.items())
        wanted = "no weights yet" if step is None else f"nothing of step {step}"
        raise ExportError(f"{run} has {wanted}. Steps there are, {listed}")
    if step in versions_in(published):
        template = published / f"v{step}"
        model = _Stored(verify(template), _from_folder(template))
    else:
        template = _any_version(published)
        model = _Stored(verify(template), _from_checkpoint(saved / f"v{step}", template))
    beside = [path for path in sorted(template.iterdir()) if not _is_ours(path)]
    write_model(model, out, beside, Ranks())
    return step


_Read = Callable[[str, TensorEntry], Tensor]


class _Stored:
    """A model on disk, as what can be published: the tensors of `manifest`, each as `read` finds it."""

    def __init__(self, manifest: Manifest, read: _Read) -> None:
        self._entries, self._read = manifest.tensors, read

    def published_specs(self) -> list[TensorSpec]:
        """See `asyncrl.weights.published.Published`."""
        return [TensorSpec(name, entry.shape, _DTYPES[entry.dtype]) for name, entry in self._entries.items()]

    def gather(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """See `asyncrl.weights.published.Published`."""
        return ((name, self._read(name, entry)) for name, entry in self._entries.items() if name in owners)


def _from_folder(folder: Path) -> _Read:
    def read(name: str, entry: TensorEntry) -> Tensor:
        with safe_open(folder / entry.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    return read


def _from_checkpoint(checkpoint: Path, template: Path) -> _Read:
    verify(checkpoint)
    read_state(checkpoint)
    stored, other = StoredTensors(checkpoint), _from_folder(template)

    parts = {part.name: part for part in _parts_in(template)}
    parameter = lru_cache(maxsize=1)(stored.read)  # of which the next tensor may be a part too

    def read(name: str, entry: TensorEntry) -> Tensor:
        part = parts.get(name)
        key = f"{ACTOR}.weights.{name if part is None else part.parameter}"
        if key not in stored.shapes:
            return other(name, entry)
        whole = parameter(key)
        return (whole if part is None else part.of(whole)).to(_DTYPES[entry.dtype]).contiguous()

    return read


def _parts_in(folder: Path) -> list[FolderTensor]:
    """Where the tensors of the model in `folder` lie in the parameters that a checkpoint has."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))  # type: ignore[no-untyped-call]
    return folder_tensors(model)


def _any_version(published: Path) -> Path:
    """A published version, for what all of them share."""
    versions = versions_in(published)
    if not versions:
        raise ExportError(
            f"{published} has no version: a checkpoint holds neither configuration nor tokenizer, which come from one; "
            "continue the run for a step, or give the step of a run that has published"
        )
    return published / f"v{versions[-1]}"


def _is_ours(path: Path) -> bool:
    return path.name in (MANIFEST_FILE, CANARY_FILE) or path.name.endswith((".safetensors", ".safetensors.index.json"))
