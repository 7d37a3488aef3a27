"""Shared memory of one machine: a server maps the trainer's tensors in place.

Only a handle of a few kilobytes is sent over HTTP, as SGLang's `/update_weights_from_tensor` defines it: a pickle of
torch's shared-memory reductions. It is sent to the server only; asyncrl never reads one.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING

from asyncrl.comm.http.calls import JsonHttp
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.models.weights.transports.from_memory import MemoryTransport, ServerConnection

if TYPE_CHECKING:
    import torch

    from asyncrl.models.weights.transports.from_memory import NamedTensors

_sharing = threading.Lock()  # the sharing strategy is per process, and a tensor moves into shared memory only once


class TensorTransport(MemoryTransport):
    """Sends weights by shared memory to servers on the trainer's machine."""

    def check_distance(self, url: str, host: str) -> Iterator[str]:
        """Require a server on the same machine, because memory cannot be shared otherwise."""
        yield (
            f"manager.weight_transport={self.name!r}: server {url!r} is not on system.host={host!r}, and memory is "
            "shared on one machine only; use distributed or disk"
        )

    def connection(
        self, config: ExperimentConfig, url: str, http: JsonHttp, timeout_s: float, device: torch.device
    ) -> SharedMemoryConnection:
        ranks = config.generation.engine.shape.tensor
        return SharedMemoryConnection(url, http, timeout_s=timeout_s, tensor_parallel=ranks)


class SharedMemoryConnection(ServerConnection):
    """Sends a server on this machine handles of the tensors."""

    async def _send_bucket(self, bucket: NamedTensors, label: dict[str, str], *, flush_cache: bool) -> None:
        handle = await asyncio.to_thread(_shared_handle, bucket)
        handles = [handle] * self._tensor_parallel
        body: dict[str, object] = {"serialized_named_tensors": handles, "flush_cache": flush_cache}
        await self._call("/update_weights_from_tensor", body | label)


def _shared_handle(bucket: NamedTensors) -> str:
    """Return the handle by which another process of this host maps the tensors; valid as long as the tensors live.

    Raises:
        OSError: /dev/shm has no room for them.
    """
    import torch.multiprocessing

    with _sharing:
        strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
        # The other strategy passes file descriptors, which only a child process can use.
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        try:
            buffer = io.BytesIO()
            ForkingPickler(buffer).dump([(name, tensor.detach()) for name, tensor in bucket])
        except RuntimeError as error:
            if "shared memory" not in str(error):
                raise
            raise OSError(
                errno.ENOSPC,
                f"manager.weight_transport=tensor: /dev/shm has no room for a version of the weights: {error}; free it "
                "(df -h /dev/shm), or set manager.weight_transport=disk",
            ) from error
        finally:
            torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
    return base64.b64encode(buffer.getvalue()).decode()
