"""A published model on disk, as a source to write again: unchanged, or with its adapters merged into their base."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from asyncrl.models.model_config import CONFIG_FILE, for_all_versions, read_model_config
from asyncrl.models.transformers_internals import language_model_on_meta
from asyncrl.weights.adapters import described_by
from asyncrl.weights.folder_tensors import TensorSpec, folder_tensors
from asyncrl.weights.loading import checkpoint_files
from asyncrl.weights.manifest import Manifest, TensorEntry
from asyncrl.weights.publishing import tokenizer_assets
from asyncrl.weights.tensor_file import DTYPES

Read = Callable[[str, TensorEntry], Tensor]


class ExportError(RuntimeError):
    """There is nothing to export, or the target is not usable; the message gives the reason and the alternatives."""


class StoredModel:
    """A model on disk as a source for publishing: the tensors of `manifest`, each fetched by `read`."""

    def __init__(self, manifest: Manifest, read: Read) -> None:
        self._entries, self._read = manifest.tensors, read

    def published_specs(self) -> list[TensorSpec]:
        """See `asyncrl.weights.folder_tensors.Published`."""
        return [TensorSpec(name, entry.shape, DTYPES[entry.dtype]) for name, entry in self._entries.items()]

    def gather(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """See `asyncrl.weights.folder_tensors.Published`."""
        return ((name, self._read(name, entry)) for name, entry in self._entries.items() if name in owners)


class MergedModel:
    """The base model with the adapters of `stored` merged into it, as a source for publishing.

    Args:
        config: content of peft's configuration of the adapters.

    Raises:
        ExportError: the base does not exist.
        WeightUpdateError: the adapters do not fit the base.
    """

    def __init__(self, stored: StoredModel, config: bytes) -> None:
        specs = stored.published_specs()
        names = {spec.name: 0 for spec in specs}
        self._adapters = described_by(config, dict(stored.gather(names)), Path())
        self._base = Path(str(self._adapters.base))
        if not self._base.is_dir():
            raise ExportError(
                f"the adapters' base model {self._adapters.base!r} is not there; put it back there, or give "
                "--adapter to write them alone"
            )
        self._dtype = specs[0].dtype
        self._files = checkpoint_files(self._base)
        self._layers = _layers_in(self._base, self._adapters.layers, self._files)

    def published_specs(self) -> list[TensorSpec]:
        """See `asyncrl.weights.folder_tensors.Published`."""
        return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors()]

    def gather(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """See `asyncrl.weights.folder_tensors.Published`."""
        return ((name, tensor) for name, tensor in self._tensors() if name in owners)

    def beside(self) -> dict[str, bytes]:
        """Return the base's configuration, with the type of the trained weights, and its tokenizer's files."""
        config = read_model_config(self._base)
        config.pop("torch_dtype", None)
        config["dtype"] = str(self._dtype).removeprefix("torch.")
        files = {name: path.read_bytes() for name, path in tokenizer_assets(self._base).items()}
        files[CONFIG_FILE] = json.dumps(config, indent=2).encode()
        return {name: for_all_versions(name, content) for name, content in files.items()}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, file in self._files.items():
            with safe_open(file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
            if name in self._layers:
                tensor = self._adapters.merged(self._layers[name], tensor)
            yield name, tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _layers_in(base: Path, layers: Collection[str], files: Collection[str]) -> dict[str, str]:
    """Return the adapted `layers` of a model by their names among the tensors `files` of its folder `base`.

    Adapters are named after modules, and folders of many models with pictures use other names.
    """
    names = {layer: layer for layer in layers}
    if not set(files).issuperset(layers):
        parts = folder_tensors(language_model_on_meta(AutoConfig.from_pretrained(base)))
        names |= {part.parameter: part.name for part in parts if part.parameter in names}
    if missing := sorted(layer for layer, name in names.items() if name not in files):
        raise ExportError(f"{base} has no {missing[0]!r}, for which there are adapters")
    return {name: layer for layer, name in names.items()}


def from_folder(folder: Path) -> Read:
    """Return a function that reads the tensors of the model in `folder`."""

    def read(name: str, entry: TensorEntry) -> Tensor:
        with safe_open(folder / entry.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    return read
