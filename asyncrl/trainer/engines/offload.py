"""Keep a role on the device while it works, and in host memory while it is idle (`trainer.offload`).

    on the device   ──▶  storages filled: copied from the host
    idle            ──▶  copied to the host (pinned if the device is a GPU), storages emptied

Tensors and their views stay the same objects. Only storages are emptied and filled, as FSDP does with gathered
parameters. So the holders of a tensor (an optimizer, a flat vector's views, FSDP2) need not know. While a role is idle
its tensors have shape and type but no values, and reading them crashes.

On a CPU the host is the device: the same happens, without a benefit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from asyncrl.models.host_copies import host_buffer, storages

Kept = Callable[[], Iterable[Tensor]]


class HostOffload:
    """Keeps a role on its device only within `on_device`.

    Args:
        kept: returns the tensors to bring back; called each time, because FSDP2 replaces some of them.
        scratch: returns tensors whose values are not needed while the role is idle.
        leave: called before the role leaves the device.
    """

    def __init__(self, kept: Kept, scratch: Kept, leave: Callable[[], None]) -> None:
        self._kept, self._scratch, self._leave = kept, scratch, leave
        self._hosts: dict[int, Tensor] = {}
        self._away: list[tuple[torch.UntypedStorage, torch.device, int, Tensor | None]] = []
        self._users = 1  # the creator of the role
        self._release()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the role on its device within this block. Blocks may be nested."""
        self._enter()
        try:
            yield
        finally:
            self._release()

    def _enter(self) -> None:
        self._users += 1
        if self._users > 1:
            return
        away, self._away = self._away, []
        for storage, device, size, host in away:
            storage.resize_(size)
            if host is not None:
                _bytes_of(storage, device, size).copy_(host, non_blocking=True)

    def _release(self) -> None:
        self._users -= 1
        if self._users:
            return
        self._leave()
        for device, storage in storages(self._kept()):
            size = storage.nbytes()
            self._away.append((storage, device, size, self._on_host(storage, device, size)))
        self._away += [(storage, device, storage.nbytes(), None) for device, storage in storages(self._scratch())]
        for device in {device for _, device, _, _ in self._away if device.type == "cuda"}:
            torch.cuda.synchronize(device)  # the copied storages are freed below
        for storage, *_ in self._away:
            storage.resize_(0)

    def _on_host(self, storage: torch.UntypedStorage, device: torch.device, size: int) -> Tensor:
        key = storage._cdata
        if key not in self._hosts or len(self._hosts[key]) != size:  # pinning is slow, so each buffer is pinned once
            self._hosts[key] = host_buffer([size], torch.uint8, device)
        return self._hosts[key].copy_(_bytes_of(storage, device, size), non_blocking=True)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device, size: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))
