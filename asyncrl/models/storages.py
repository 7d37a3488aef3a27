"""Memory of tensors, emptied and filled while the tensors stay the objects that they are, and so do their views."""

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
    """Yield each storage that can be emptied, once. On a CPU a storage shared with numpy cannot be, and need not be."""
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.nbytes() and storage.resizable():
            seen.add(storage._cdata)
            yield tensor.device, storage
