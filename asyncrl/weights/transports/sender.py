"""ModelWorker 0's side of `manager.weight_transport`: copies of the published weights, and their way to the servers.

A copy is made when a version is published, as training goes on with the tensors themselves, and is kept as long as a
server may want that version (the same rule by which folders are kept). A send under way keeps its copy alive.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.comm.http import JsonHttp
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device
from asyncrl.inference.client import UpdateFailed
from asyncrl.weights.transports.transfer import (
    NamedTensors,
    ProcessGroupTransport,
    Receiver,
    SharedMemoryTransport,
    WeightTransport,
)


class NotHeld(LookupError):
    """The wanted version is not in memory; the message names those that are."""


class HeldWeights:
    """Copies of published weights on the CPU, by version. Used by several threads."""

    def __init__(self) -> None:
        self._versions: dict[int, NamedTensors] = {}

    def hold(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors`, as version `version`."""
        held = self._versions
        copies = [(name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in tensors.items()]
        self._versions = {**held, version: copies}  # replaced as a whole: readers are other threads

    def keep(self, versions: Collection[int]) -> None:
        """Forget all but these."""
        self._versions = {version: held for version, held in self._versions.items() if version in versions}

    def get(self, version: int) -> NamedTensors:
        """The weights of `version`.

        Raises:
            NotHeld: see there.
        """
        held = self._versions
        if version not in held:
            raise NotHeld(f"v{version} is not held in memory (held: {sorted(held)}); a newer one will be announced")
        return held[version]


@dataclass(slots=True, eq=False)
class _Channel:
    """The connection to one server; a new address is a new server."""

    url: str
    transport: WeightTransport
    opened: bool = False
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def close(self) -> None:
        """End it, once what is under way has ended."""
        async with self.busy:
            await self.transport.close()


class WeightSender:
    """Sends held weights to servers, each over a connection of its own. Make and use it in one running loop.

    Args:
        config: which transport, and of what size the servers are.
        held: what is sent.
        token: the servers' bearer token.
        device: the trainer's; NCCL is used where it is a GPU.
    """

    def __init__(self, config: ExperimentConfig, held: HeldWeights, token: str | None, device: torch.device) -> None:
        self._config, self._held, self._device = config, held, device
        self._http = JsonHttp(token)
        self._channels: dict[int, _Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def send(self, server: int, url: str, version: int, *, keep_cache: bool, timeout_s: float) -> None:
        """Send `version` to the paused server with index `server` at `url`; `keep_cache` as of `WeightTransport.send`.

        Raises:
            NotHeld: the version is not held.
            HttpError: the server did not take it; the next `send` makes a new connection.
        """
        tensors = self._held.get(version)
        channel = self._channels.get(server)
        if channel is None or channel.url != url:
            self._give_up(server)
            channel = self._channels[server] = _Channel(url, self._make(url, timeout_s))
        async with channel.busy:
            if self._channels.get(server) is not channel:
                raise UpdateFailed(f"the connection to {url} broke in an earlier update")
            try:
                if not channel.opened:
                    await channel.transport.open()
                    channel.opened = True
                await channel.transport.send(tensors, version, keep_cache=keep_cache)
            except BaseException:
                self._give_up(server)
                raise

    async def close(self) -> None:
        """End every connection."""
        for server in list(self._channels):
            self._give_up(server)
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._http.close()
        self._held.keep(())  # what is in shared memory goes with its last user

    def _give_up(self, server: int) -> None:
        channel = self._channels.pop(server, None)
        if channel is not None:
            task = asyncio.create_task(channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _make(self, url: str, timeout_s: float) -> WeightTransport:
        receiver = Receiver(url, self._config.generation.sglang.tensor_parallel)
        if self._config.manager.weight_transport == "tensor":
            return SharedMemoryTransport(receiver, self._http, timeout_s=timeout_s)
        on_gpus = self._device.type == "cuda" and self._config.generation.device != Device.cpu
        return ProcessGroupTransport(
            receiver,
            self._http,
            host=self._config.system.host,
            backend="nccl" if on_gpus else "gloo",
            timeout_s=timeout_s,
            group=f"asyncrl-{uuid.uuid4().hex}",
            device=self._device if on_gpus else None,
        )
