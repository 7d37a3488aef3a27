"""Empty and fill the memory of tensors; the tensors and their views stay the same objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


def own_storage(module: nn.Module) -> None:
    """Give each tensor whose storage cannot be emptied a new one: on a CPU, weights that are a memory map of their
    file.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()


def storages(tensors: Iterable[Tensor]) -> Iterator[tuple[torch.device, torch.UntypedStorage]]:
    """Yield each storage that can be emptied, once. Storages shared with numpy, on a CPU, cannot and need not be."""
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.nbytes() and storage.resizable():
            seen.add(storage._cdata)
            yield tensor.device, storage
