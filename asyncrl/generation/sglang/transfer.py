"""Weights from the trainer's memory into running SGLang servers, without the disk in between.

The default way is through the disk (`asyncrl.training.weights`, `update_weights_from_disk`): it works for every engine,
over any distance that a file system spans, and leaves every version behind for servers that come late. The two ways
here are for servers that are there now:

    SharedMemoryTransport       one host; the server maps the trainer's tensors (CPU shared memory, or CUDA IPC)
    ProcessGroupTransport       any distance; rank 0 broadcasts to all servers at once (gloo, or NCCL between GPUs)

Either way an update is: pause (`retract`: what runs goes back to the queue and is prefilled again under the new
weights), announce, send in buckets, finish with the new version's label and an empty cache, continue. When something
fails on the way the server holds a mixture; it is left paused, so that no token comes of it, until a whole update
succeeds.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from asyncrl.generation.client import GenerationServerClient, UpdateFailed
from asyncrl.generation.http import HttpError, HttpRefused, JsonHttp

NamedTensors = Sequence[tuple[str, Tensor]]

BUCKET_BYTES = 512 << 20
"""Most bytes on their way at a time: bounds the second copy that a server holds meanwhile."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the number of ranks that it spreads its weights over."""

    url: str
    tensor_parallel: int = 1


class WeightTransport(ABC):
    """Sends weights to the servers `targets`. Open it once, `send` every version, close it.

    Args:
        targets: all servers that take part; a group of processes is fixed when it is opened.
        http: the connections.
        timeout_s: limit of one call, seconds.
        bucket_bytes: see `BUCKET_BYTES`.
    """

    def __init__(
        self, targets: Sequence[Target], http: JsonHttp, *, timeout_s: float, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._targets, self._http = tuple(targets), http
        self._timeout_s, self._bucket_bytes = timeout_s, bucket_bytes

    async def open(self) -> None:
        """Make the connection; the default has nothing to do."""
        return None

    async def close(self) -> None:
        """End the connection; the default has nothing to do."""
        return None

    async def send(self, tensors: NamedTensors, version: int) -> None:
        """Replace the weights of all targets by `tensors` (names as in a Hugging Face checkpoint) and label them.

        Raises:
            UpdateFailed: a server did not take them; it stays paused.
            HttpError: a server could not be reached; it may stay paused.
        """
        clients = [GenerationServerClient(self._http, target.url) for target in self._targets]
        await asyncio.gather(*[client.pause("retract", timeout_s=self._timeout_s) for client in clients])
        await self._all("/begin_weight_update", {}, missing_is_fine=True)
        buckets = list(into_buckets(tensors, self._bucket_bytes))
        for index, bucket in enumerate(buckets):
            last = index == len(buckets) - 1
            await self._send_bucket(bucket, {"weight_version": str(version)} if last else {}, flush_cache=last)
        await self._all("/end_weight_update", {}, missing_is_fine=True)
        await asyncio.gather(*[client.resume() for client in clients])

    @abstractmethod
    async def _send_bucket(self, bucket: NamedTensors, label: dict[str, str], *, flush_cache: bool) -> None:
        """Send one bucket to all targets."""

    async def _all(self, path: str, body: dict[str, object], *, missing_is_fine: bool = False) -> None:
        await asyncio.gather(*[self._call(target, path, body, missing_is_fine) for target in self._targets])

    async def _call(self, target: Target, path: str, body: dict[str, object], missing_is_fine: bool = False) -> None:
        try:
            reply = await self._http.call("POST", target.url + path, body, timeout_s=self._timeout_s)
        except HttpRefused as error:
            if error.status == 404 and missing_is_fine:  # servers up to 0.5.20 want no announcement
                return
            raise UpdateFailed(str(error)) from error
        if not isinstance(reply, dict) or reply.get("success") is not True:
            raise UpdateFailed(f"{target.url}{path} answered {str(reply)[:300]}")


class SharedMemoryTransport(WeightTransport):
    """Servers on this host map the tensors where they lie; what crosses HTTP is a handle of some kilobytes.

    The handle is what `update_weights_from_tensor` defines, a pickle of torch's shared-memory reductions; it goes from
    here to the server only, nothing of the kind is ever read here.
    """

    async def _send_bucket(self, bucket: NamedTensors, label: dict[str, str], *, flush_cache: bool) -> None:
        handle = _shared_handle(bucket)
        await asyncio.gather(
            *[
                self._call(
                    target,
                    "/update_weights_from_tensor",
                    {"serialized_named_tensors": [handle] * target.tensor_parallel, "flush_cache": flush_cache} | label,
                )
                for target in self._targets
            ]
        )


class ProcessGroupTransport(WeightTransport):
    """A process group of its own in which the trainer is rank 0 and every server rank a receiver.

    Args:
        address: host and port at which this process can be reached; the port must be free.
        backend: `gloo` or `nccl`.
        group: the group's name; unique per server.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        http: JsonHttp,
        *,
        address: tuple[str, int],
        backend: str,
        timeout_s: float,
        group: str = "asyncrl_weights",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(targets, http, timeout_s=timeout_s, bucket_bytes=bucket_bytes)
        self._address, self._backend, self._group_name = address, backend, group
        self._group: dist.ProcessGroup | None = None
        self._store: TCPStore | None = None

    async def open(self) -> None:
        """Form the group; returns once every server has joined.

        Raises:
            UpdateFailed: a server did not join.
        """
        world = 1 + sum(target.tensor_parallel for target in self._targets)
        host, port = self._address
        joining, offset = [], 1
        for target in self._targets:
            body: dict[str, object] = {
                "master_address": host,
                "master_port": port,
                "rank_offset": offset,
                "world_size": world,
                "group_name": self._group_name,
                "backend": self._backend,
            }
            joining.append(self._call(target, "/init_weights_update_group", body))
            offset += target.tensor_parallel
        await asyncio.gather(asyncio.to_thread(self._form, world), *joining)

    def _form(self, world: int) -> None:
        """Rank 0's side of SGLang's `init_custom_process_group`: a group beside the trainer's default one."""
        timeout = timedelta(seconds=self._timeout_s)
        self._store = TCPStore(*self._address, world, is_master=True, timeout=timeout, wait_for_workers=False)
        self._group, _ = _new_process_group_helper(
            world,
            0,
            [],
            Backend(self._backend),
            PrefixStore(self._group_name, self._store),
            group_name=self._group_name,  # type: ignore[arg-type]  # torch's NewType of str, which it does not export
            timeout=timeout,
        )
        _world.pg_group_ranks[self._group] = {rank: rank for rank in range(world)}

    async def _send_bucket(self, bucket: NamedTensors, label: dict[str, str], *, flush_cache: bool) -> None:
        body: dict[str, object] = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._group_name,
            "flush_cache": flush_cache,
            **label,
        }
        await asyncio.gather(
            asyncio.to_thread(self._broadcast, bucket), self._all("/update_weights_from_distributed", body)
        )

    def _broadcast(self, bucket: NamedTensors) -> None:
        assert self._group is not None, "not opened"
        for _, tensor in bucket:
            dist.broadcast(tensor.contiguous(), src=0, group=self._group)

    async def close(self) -> None:
        """Dissolve the group; a server that is gone already is no error."""
        if self._group is None:
            return
        with contextlib.suppress(HttpError):
            await self._all("/destroy_weights_update_group", {"group_name": self._group_name})
        dist.destroy_process_group(self._group)
        self._group, self._store = None, None


def into_buckets(tensors: NamedTensors, limit: int) -> Iterator[NamedTensors]:
    """`tensors` in order, cut so that no bucket exceeds `limit` bytes unless a single tensor does."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _shared_handle(bucket: NamedTensors) -> str:
    """What another process of this host needs to map the tensors; valid as long as they live."""
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    # The other strategy hands over file descriptors, which only a child process can take.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump([(name, tensor.detach()) for name, tensor in bucket])
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
    return base64.b64encode(buffer.getvalue()).decode()
