"""Weights from the trainer's memory into a running SGLang server, without the disk in between.

    SharedMemoryTransport       one host; the server maps the trainer's tensors (shared memory on the CPU)
    ProcessGroupTransport       any distance; broadcast in a process group of the two (gloo, or NCCL between GPUs)

Either is one connection to one server, so that no server waits for another. The server is paused by who asks for the
update (`asyncrl.manager.fleet.update`); here the weights are announced and sent in buckets, of which the last labels
them with their version and, unless it is to be kept, empties the cache. When something fails on the way the server
holds a mixture; it has to stay paused until a whole update succeeds.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from asyncrl.comm.http import HttpError, HttpRefused, JsonHttp
from asyncrl.inference.client import UpdateFailed

NamedTensors = Sequence[tuple[str, Tensor]]

_sharing = threading.Lock()  # the sharing strategy is the process's, and a tensor moves into shared memory once
BUCKET_BYTES = 512 << 20
"""Most bytes on their way at a time: bounds the second copy that a server holds meanwhile."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """A server, and the number of ranks that it spreads its weights over."""

    url: str
    tensor_parallel: int = 1


class WeightTransport(ABC):
    """Sends weights to one server. `open` it once, `send` every version, `close` it; one call at a time.

    Args:
        receiver: the server.
        http: the connections.
        timeout_s: limit of one call, seconds.
        bucket_bytes: see `BUCKET_BYTES`.
    """

    def __init__(
        self, receiver: Receiver, http: JsonHttp, *, timeout_s: float, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._receiver, self._http = receiver, http
        self._timeout_s, self._bucket_bytes = timeout_s, bucket_bytes

    async def open(self) -> None:
        """Make the connection; the default has nothing to do."""
        return None

    async def close(self) -> None:
        """End the connection; the default has nothing to do."""
        return None

    async def send(self, tensors: NamedTensors, version: int, *, keep_cache: bool = False) -> None:
        """Replace the weights of the paused server by `tensors` (names as in a Hugging Face checkpoint), labelled.

        Args:
            tensors: all of them.
            version: what they become.
            keep_cache: whether requests that are paused in place go on with what is cached for them.

        Raises:
            UpdateFailed: the server did not take them, or their connection failed.
            HttpError: the server could not be reached.
        """
        await self._call("/begin_weight_update", {}, missing_is_fine=True)
        buckets = list(into_buckets(tensors, self._bucket_bytes))
        for index, bucket in enumerate(buckets):
            last = index == len(buckets) - 1
            label = {"weight_version": str(version)} if last else {}
            await self._send_bucket(bucket, label, flush_cache=last and not keep_cache)
        await self._call("/end_weight_update", {}, missing_is_fine=True)

    @abstractmethod
    async def _send_bucket(self, bucket: NamedTensors, label: dict[str, str], *, flush_cache: bool) -> None:
        """Send one bucket."""

    async def _call(self, path: str, body: dict[str, object], *, missing_is_fine: bool = False) -> None:
        url = self._receiver.url + path
        try:
            reply = await self._http.call("POST", url, body, timeout_s=self._timeout_s)
        except HttpRefused as error:
            if error.status == 404 and missing_is_fine:  # servers up to 0.5.20 want no announcement
                return
            raise UpdateFailed(str(error)) from error
        if not isinstance(reply, dict) or reply.get("success") is not True:
            raise UpdateFailed(f"{url} answered {str(reply)[:300]}")


class SharedMemoryTransport(WeightTransport):
    """A server on this host maps the tensors where they lie; what crosses HTTP is a handle of some kilobytes.

    The handle is what `update_weights_from_tensor` defines, a pickle of torch's shared-memory reductions; it goes from
    here to the server only, nothing of the kind is ever read here.
    """

    async def _send_bucket(self, bucket: NamedTensors, label: dict[str, str], *, flush_cache: bool) -> None:
        handle = await asyncio.to_thread(_shared_handle, bucket)
        handles = [handle] * self._receiver.tensor_parallel
        body: dict[str, object] = {"serialized_named_tensors": handles, "flush_cache": flush_cache}
        await self._call("/update_weights_from_tensor", body | label)


class ProcessGroupTransport(WeightTransport):
    """A process group of its own in which the trainer is rank 0 and the server's ranks are the others.

    The group's rendezvous, torch's `TCPStore`, listens on `host` alone and knows no secret: keep to a trusted network.

    Args:
        host: address at which the server reaches this process.
        backend: `gloo` or `nccl`.
        group: the group's name; never used before on that server.
        device: where this side's tensors have to be for `backend`.
    """

    def __init__(
        self,
        receiver: Receiver,
        http: JsonHttp,
        *,
        host: str,
        backend: str,
        timeout_s: float,
        group: str,
        device: torch.device | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(receiver, http, timeout_s=timeout_s, bucket_bytes=bucket_bytes)
        self._host, self._backend, self._group_name = host, backend, group
        self._device = device or torch.device("cpu")
        self._group: dist.ProcessGroup | None = None

    async def open(self) -> None:
        """Form the group; returns once the server has joined.

        Raises:
            UpdateFailed: it did not join.
        """
        world = 1 + self._receiver.tensor_parallel
        listener = socket.create_server((self._host, 0))
        port = listener.getsockname()[1]
        timeout = timedelta(seconds=self._timeout_s)
        store = TCPStore(
            self._host,
            port,
            world,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        body: dict[str, object] = {
            "master_address": self._host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world,
            "group_name": self._group_name,
            "backend": self._backend,
        }
        await _both(asyncio.to_thread(self._form, store, world), self._call("/init_weights_update_group", body))

    def _form(self, store: TCPStore, world: int) -> None:
        """Rank 0's side of SGLang's `init_custom_process_group`: a group beside the trainer's default one."""
        self._group, _ = _new_process_group_helper(
            world,
            0,
            [],
            Backend(self._backend),
            PrefixStore(self._group_name, store),
            group_name=self._group_name,  # type: ignore[arg-type]  # torch's NewType of str, which it does not export
            timeout=timedelta(seconds=self._timeout_s),
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
        await _both(asyncio.to_thread(self._broadcast, bucket), self._call("/update_weights_from_distributed", body))

    def _broadcast(self, bucket: NamedTensors) -> None:
        assert self._group is not None, "not opened"
        for _, tensor in bucket:
            dist.broadcast(tensor.to(self._device).contiguous(), src=0, group=self._group)

    async def close(self) -> None:
        """Dissolve the group; a server that is gone already is no error."""
        if self._group is None:
            return
        with contextlib.suppress(HttpError):
            await self._call("/destroy_weights_update_group", {"group_name": self._group_name})
        dist.destroy_process_group(self._group)
        self._group = None


async def _both(here: Awaitable[None], there: Awaitable[None]) -> None:
    """Wait for this side's part, in a thread, and for the server's, whichever fails: a thread cannot be left behind.

    Raises:
        UpdateFailed: one failed.
    """
    ours, theirs = await asyncio.gather(here, there, return_exceptions=True)
    if isinstance(theirs, BaseException):  # the cause, where both failed
        raise theirs
    if isinstance(ours, BaseException):
        raise UpdateFailed(f"sending weights failed: {type(ours).__name__}: {ours}") from ours


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
    with _sharing:
        strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
        # The other strategy hands over file descriptors, which only a child process can take.
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        try:
            buffer = io.BytesIO()
            ForkingPickler(buffer).dump([(name, tensor.detach()) for name, tensor in bucket])
        finally:
            torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
    return base64.b64encode(buffer.getvalue()).decode()
