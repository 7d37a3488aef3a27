"""A process group of trainer and server, at any distance: NCCL between GPUs, else gloo.

Weights are sent in flat buckets: one broadcast of the bytes of many tensors, which both sides cut alike (SGLang's
`flattened_bucket`). On a GPU a bucket goes from pinned host memory to the device, and from there to the servers.
Both are done on a separate stream, so that the bucket does not wait for the queued work of training.

Each server has its own group, in which the trainer is rank 0 and the server's ranks are the others. The group's
rendezvous, torch's `TCPStore`, listens on `system.host` only and checks no secret: use a trusted network.

NCCL requires separate GPUs for trainer and servers, and the same version of it in both environments; both are checked
before the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.comm.http_client import HttpError, JsonHttp
from asyncrl.comm.names import GENERATION_SERVER, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device
from asyncrl.inference.client import UpdateFailed
from asyncrl.runtime.plan import WorkerPlan, plan_if_valid
from asyncrl.runtime.process.hardware import LOOPBACK
from asyncrl.weights.transports.from_memory import BUCKET_BYTES, MemoryTransport, ServerConnection, sending_rank

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from asyncrl.weights.transports.from_memory import NamedTensors

_ASK = "import torch; print(torch.__version__, '.'.join(map(str, torch.cuda.nccl.version())))"
_ASK_LIMIT_S = 120.0
"""Time limit in seconds: the first import of a torch on a machine is slow."""


class DistributedTransport(MemoryTransport):
    """Sends weights by a process group of trainer and server."""

    def check(self, config: ExperimentConfig) -> Iterator[str]:
        """See the base class. In addition, both sides need the same NCCL on GPUs."""
        yield from super().check(config)
        yield from nccl_problems(config)

    def check_distance(self, url: str, host: str) -> Iterator[str]:
        """Require that the server can reach the trainer."""
        if host in LOOPBACK:
            yield (
                f"manager.weight_transport={self.name!r}: server {url!r} cannot reach the trainer at "
                f"system.host={host!r}; set it to this machine's address on their network"
            )

    def connection(
        self, config: ExperimentConfig, url: str, http: JsonHttp, timeout_s: float, device: torch.device
    ) -> ProcessGroupConnection:
        on_gpus = device.type == "cuda" and config.generation.device != Device.cpu
        return ProcessGroupConnection(
            url,
            http,
            host=config.system.host,
            backend="nccl" if on_gpus else "gloo",
            timeout_s=timeout_s,
            group=f"asyncrl-{uuid.uuid4().hex}",
            device=device if on_gpus else None,
            tensor_parallel=config.generation.engine.shape.tensor,
        )


class ProcessGroupConnection(ServerConnection):
    """Broadcasts to one server.

    Args:
        host: address at which the server reaches this process.
        backend: `gloo` or `nccl`.
        group: the group's name; never used before on that server.
        device: device that `backend` needs this side's tensors on; None for the CPU.
    """

    def __init__(
        self,
        url: str,
        http: JsonHttp,
        *,
        host: str,
        backend: str,
        timeout_s: float,
        group: str,
        device: torch.device | None = None,
        tensor_parallel: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(url, http, timeout_s=timeout_s, tensor_parallel=tensor_parallel, bucket_bytes=bucket_bytes)
        self._host, self._backend, self._group_name = host, backend, group
        self._device = device
        self._group: dist.ProcessGroup | None = None
        self._stream: torch.cuda.Stream | None = None

    async def open(self) -> None:
        """Form the group; returns once the server has joined.

        Raises:
            UpdateFailed: the server did not join.
        """
        world = 1 + self._tensor_parallel
        listener = socket.create_server((self._host, 0))
        body: dict[str, object] = {
            "master_address": self._host,
            "master_port": listener.getsockname()[1],
            "rank_offset": 1,
            "world_size": world,
            "group_name": self._group_name,
            "backend": self._backend,
        }
        await _both(asyncio.to_thread(self._form, listener, world), self._call("/init_weights_update_group", body))

    def _form(self, listener: socket.socket, world: int) -> None:
        """Rank 0's side of SGLang's `init_custom_process_group`: a group beside the trainer's default one."""
        from torch._C._distributed_c10d import TCPStore
        from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

        timeout = timedelta(seconds=self._timeout_s)
        store = TCPStore(
            self._host,
            listener.getsockname()[1],
            world,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._group, _ = _new_process_group_helper(
            world,
            0,
            [],
            Backend(self._backend),
            PrefixStore(self._group_name, store),
            group_name=self._group_name,  # type: ignore[arg-type]  # torch's NewType of str, which it does not export
            timeout=timeout,
        )
        _world.pg_group_ranks[self._group] = {rank: rank for rank in range(world)}

    async def _send_bucket(self, bucket: NamedTensors, label: dict[str, str], *, flush_cache: bool) -> None:
        bucket = sorted(bucket, key=lambda named: -named[1].dtype.itemsize)  # largest elements first: each is aligned
        body: dict[str, object] = {
            "load_format": "flattened_bucket",
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._group_name,
            "flush_cache": flush_cache,
            **label,
        }
        await _both(asyncio.to_thread(self._broadcast, bucket), self._call("/update_weights_from_distributed", body))

    def _broadcast(self, bucket: NamedTensors) -> None:
        """Send the bytes of `bucket` end to end, in one call. On a GPU this runs concurrently with training, on a
        separate stream, and the memory is free again when this returns.
        """
        import torch
        import torch.distributed as dist

        assert self._group is not None, "not opened"
        parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in bucket]
        if self._device is None:
            dist.broadcast(torch.cat(parts), src=0, group=self._group)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            flat = torch.empty(sum(map(len, parts)), dtype=torch.uint8, device=self._device)
            for place, part in zip(torch.split(flat, [len(part) for part in parts]), parts, strict=True):
                place.copy_(part, non_blocking=True)
            dist.broadcast(flat, src=0, group=self._group)
            self._stream.synchronize()

    async def close(self) -> None:
        """Dissolve the group. It is not an error if the server is gone."""
        import torch.distributed as dist

        if self._group is None:
            return
        with contextlib.suppress(HttpError):
            await self._call("/destroy_weights_update_group", {"group_name": self._group_name})
        dist.destroy_process_group(self._group)
        self._group = None


async def _both(here: Awaitable[None], there: Awaitable[None]) -> None:
    """Wait for both parts even if one fails: this side's, in a thread that cannot be cancelled, and the server's."""
    ours, theirs = await asyncio.gather(here, there, return_exceptions=True)
    if isinstance(theirs, BaseException):  # the cause, if both failed
        raise theirs
    if isinstance(ours, BaseException):
        raise UpdateFailed(f"sending weights failed: {type(ours).__name__}: {ours}") from ours


class Installed(NamedTuple):
    """The versions of torch and of its NCCL in one environment."""

    torch: str
    nccl: str


@cache
def installed(python: str) -> Installed | None:
    """Return the versions in the environment of the interpreter `python`; None if unknown, for example without NCCL."""
    try:
        command = [str(Path(python).expanduser()), "-c", _ASK]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ASK_LIMIT_S).stdout
        return Installed(*answer.split())
    except (OSError, subprocess.SubprocessError, TypeError):
        return None


def nccl_problems(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message if the trainer shares its GPU with a server, or if both are on this host's GPUs and have
    two versions.
    """
    engine = config.generation.engine
    if engine.program is None or engine.urls:
        return  # unknown for servers that asyncrl did not start
    plans = plan_if_valid(config)
    yield from _shared_gpu(config, plans)
    on_gpus = {plan.kind for plan in plans if plan.resources.gpus and not plan.host.name}
    if not {MODEL_WORKER, GENERATION_SERVER} <= on_gpus:
        return
    here, there = installed(sys.executable), installed(engine.program.python or sys.executable)
    if here is not None and there is not None and here.nccl != there.nccl:
        yield (
            f"manager.weight_transport={config.manager.weight_transport!r}: NCCL connects processes of one version "
            f"only, and the trainer has NCCL {here.nccl} (torch {here.torch}), {engine.label} {there.nccl} (torch "
            f"{there.torch}, {engine.program.python}); install torch=={there.torch.partition('+')[0]} beside "
            "asyncrl, or use weight_transport=disk or tensor"
        )


def _shared_gpu(config: ExperimentConfig, plans: Sequence[WorkerPlan]) -> Iterator[str]:
    """Yield an error message for the first server on the GPU of the rank that sends the weights."""
    if (sender := sending_rank(config, plans)) is None:
        return
    for plan in plans:
        shared = set(plan.resources.gpus).intersection(sender.resources.gpus)
        if plan.kind == GENERATION_SERVER and plan.host.name == sender.host.name and shared:
            yield (
                f"manager.weight_transport={config.manager.weight_transport!r}: NCCL connects no two processes on one "
                f"GPU, and {sender.name}, which sends the weights, shares GPU {min(shared)} with {plan.name}; use "
                "weight_transport=tensor or disk, or give servers other GPUs than the first training rank"
            )
            return
