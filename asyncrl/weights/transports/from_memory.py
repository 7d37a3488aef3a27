"""Transports from the trainer's memory into running SGLang servers: what they have in common, and `tensor`, by shared
memory (`distributed` is the other one).

    manager ── send_weights(server, version) ──▶ publishing ModelWorker ── weights in buckets ──▶ server

The publishing ModelWorker copies a version when it publishes it, because training continues to change the tensors. It
keeps the copy as long as a server may need that version, by the same rule as folders. So a server that comes late or
restarts gets the newest version in the same way. A running send keeps its copy alive.

Every server has its own connection, so that none waits for another. Weights are announced and sent in buckets. The last
bucket labels them with their version and empties the cache, unless the cache is to be kept. After a failure in between,
the server has mixed weights; it must stay paused until a whole update succeeds.

By shared memory, a server on the trainer's machine maps the trainer's tensors in place. Only a handle of a few
kilobytes is sent over HTTP, as SGLang's `/update_weights_from_tensor` defines it: a pickle of torch's shared-memory
reductions. It is sent to the server only; asyncrl never reads one.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from asyncrl.comm.http_client import HttpRefused, JsonHttp
from asyncrl.comm.names import GENERATION_SERVER, MODEL_WORKER
from asyncrl.comm.security import HttpSecurity
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.client import GenerationServerClient, UpdateFailed
from asyncrl.runtime.plan import WorkerPlan, plan_if_valid
from asyncrl.runtime.process.hardware import LOOPBACK
from asyncrl.trainer.client import PublisherClient
from asyncrl.trainer.messages import SendWeights
from asyncrl.trainer.parallel.placement import placement
from asyncrl.weights.transports.base import ManagerEnd, TrainerEnd, WeightTransport

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from asyncrl.models.host_copies import HostCopies, HostCopy

    NamedTensors = Sequence[tuple[str, Tensor]]

BUCKET_BYTES = 512 << 20
"""Bytes sent at a time, at most: bounds the second copy that a server holds meanwhile."""


class MemoryTransport(WeightTransport, ABC):
    """A transport in which the trainer sends weights from its memory."""

    needs_folders: ClassVar[bool] = False

    def check(self, config: ExperimentConfig) -> Iterator[str]:
        """Require servers whose ranks all receive weights, and that `check_distance` allows."""
        generation = config.generation
        here = {config.system.host, *LOOPBACK}
        elsewhere = [url for url in generation.engine.urls if urlsplit(url).hostname not in here]
        if elsewhere:
            yield from self.check_distance(elsewhere[0], config.system.host)
        try:
            shape = generation.engine.shape
        except ValueError as error:
            if generation.engine.urls:  # else the checks of generation report it
                yield f"manager.weight_transport={self.name!r}: {error}"
            return
        if shape.pipeline > 1 or shape.data > 1:
            yield (
                f"manager.weight_transport={self.name!r}: {shape.settings}: only the ranks of one tensor axis are sent "
                "weights; start more servers with generation.servers, or use weight_transport=disk"
            )

    @abstractmethod
    def check_distance(self, url: str, host: str) -> Iterator[str]:
        """Yield an error message if the transport cannot reach a server at `url` that is not on the trainer's machine
        `host`.
        """

    @abstractmethod
    def connection(
        self, config: ExperimentConfig, url: str, http: JsonHttp, timeout_s: float, device: torch.device
    ) -> ServerConnection:
        """Return a new connection from the trainer, which computes on `device`, to the server at `url`."""

    def manager_end(self, publisher: PublisherClient) -> ManagerEnd:
        return AskPublisher(publisher)

    def trainer_end(
        self, config: ExperimentConfig, security: HttpSecurity | None, device: torch.device
    ) -> MemoryTrainerEnd:
        return MemoryTrainerEnd(self, config, security, device)


class AskPublisher(ManagerEnd):
    """The manager's end: asks the publisher to send."""

    def __init__(self, publisher: PublisherClient) -> None:
        self._publisher = publisher

    async def bring(
        self, client: GenerationServerClient, order: SendWeights, path: str, sending: Callable[[], None]
    ) -> None:
        await self._publisher.send_weights(order, sending)
        served = await client.served_version()
        if served != order.version:
            raise UpdateFailed(f"{client.url} was sent version {order.version} but names {served}")


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """One version: its tensors in host memory, and the copies that fill them."""

    tensors: list[tuple[str, Tensor]]
    copies: list[HostCopy]

    def ready(self) -> NamedTensors:
        """Return the tensors once the copies have ended."""
        for copy in self.copies:
            copy.wait()
        return self.tensors


@dataclass(slots=True, eq=False)
class _Channel:
    """The connection to one server; a new address is a new server."""

    url: str
    connection: ServerConnection
    opened: bool = False
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def close(self) -> None:
        """Close the connection after the running send has ended."""
        async with self.busy:
            await self.connection.close()


class MemoryTrainerEnd(TrainerEnd):
    """Copies of published weights on the CPU, and the connections that send them.

    `hold` and `keep` may be called from any thread, the rest in one running loop.
    """

    def __init__(
        self, transport: MemoryTransport, config: ExperimentConfig, security: HttpSecurity | None, device: torch.device
    ) -> None:
        self._transport, self._config, self._device = transport, config, device
        self._http = JsonHttp(security)
        self._held: dict[int, HeldVersion] = {}
        self._copies: HostCopies | None = None
        self._channels: dict[int, _Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def hold(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `TrainerEnd`. The copies may still be in flight when this returns."""
        from asyncrl.models.host_copies import HostCopies, host_like

        if self._copies is None:
            self._copies = HostCopies()
        held = HeldVersion([], [])
        for name, tensor in tensors:
            host = host_like(tensor)
            copy = self._copies.begin([(host, tensor)])
            copy.wait_on_device()  # the next tensor may have the same memory
            held.tensors.append((name, host))
            held.copies.append(copy)
        self._held = {**self._held, version: held}  # replaced as a whole: readers are other threads

    def keep(self, versions: Collection[int]) -> None:
        self._held = {version: held for version, held in self._held.items() if version in versions}

    def held(self, version: int) -> HeldVersion:
        """Return the weights of `version`.

        Raises:
            LookupError: the version is not in memory.
        """
        held = self._held
        if version not in held:
            raise LookupError(f"v{version} is not held in memory (held: {sorted(held)}); a newer one will be announced")
        return held[version]

    async def send(self, order: SendWeights) -> None:
        """See `TrainerEnd`; after a failure the next `send` makes a new connection."""
        server, url = order.server, order.url
        held = self.held(order.version)
        channel = self._channels.get(server)
        if channel is None or channel.url != url:
            self._give_up(server)
            made = self._transport.connection(self._config, url, self._http, order.timeout_s, self._device)
            channel = self._channels[server] = _Channel(url, made)
        async with channel.busy:
            if self._channels.get(server) is not channel:
                raise UpdateFailed(f"the connection to {url} broke in an earlier update")
            try:
                if not channel.opened:
                    await channel.connection.open()
                    channel.opened = True
                tensors = await asyncio.to_thread(held.ready)
                await channel.connection.send(tensors, order.version, keep_cache=order.keep_cache)
            except BaseException:
                self._give_up(server)
                raise

    async def close(self) -> None:
        """End every connection and forget every version."""
        for server in list(self._channels):
            self._give_up(server)
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._http.close()
        self.keep(())  # shared memory is freed with its last user

    def _give_up(self, server: int) -> None:
        channel = self._channels.pop(server, None)
        if channel is not None:
            task = asyncio.create_task(channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class ServerConnection(ABC):
    """Sends weights to one server. `open` it once, `send` every version, `close` it; one call at a time.

    Args:
        url: URL of the server.
        http: HTTP connections.
        tensor_parallel: ranks that the server spreads its weights over.
        timeout_s: limit of one call, seconds.
        bucket_bytes: see `BUCKET_BYTES`.
    """

    def __init__(
        self,
        url: str,
        http: JsonHttp,
        *,
        timeout_s: float,
        tensor_parallel: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._url, self._http, self._tensor_parallel = url, http, tensor_parallel
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
            tensors: all tensors of the version.
            version: label of the weights.
            keep_cache: True if requests that are paused in place continue with their cached keys and values.

        Raises:
            UpdateFailed: the server did not accept them, or the connection failed.
            HttpError: the server could not be reached.
        """
        from asyncrl.models.host_copies import in_pieces

        await self._call("/begin_weight_update", {}, missing_is_fine=True)
        buckets = list(in_pieces(tensors, lambda named: named[1].nbytes, self._bucket_bytes))
        for index, bucket in enumerate(buckets):
            last = index == len(buckets) - 1
            label = {"weight_version": str(version)} if last else {}
            await self._send_bucket(bucket, label, flush_cache=last and not keep_cache)
        await self._call("/end_weight_update", {}, missing_is_fine=True)

    @abstractmethod
    async def _send_bucket(self, bucket: NamedTensors, label: dict[str, str], *, flush_cache: bool) -> None:
        """Send one bucket."""

    async def _call(self, path: str, body: dict[str, object], *, missing_is_fine: bool = False) -> None:
        url = self._url + path
        try:
            async with asyncio.timeout(self._timeout_s):  # a server that works may take as long to connect
                reply = await self._http.call("POST", url, body, timeout_s=math.inf)
        except TimeoutError as error:
            raise UpdateFailed(f"{url} did not answer within {self._timeout_s:g} s") from error
        except HttpRefused as error:
            if error.status == 404 and missing_is_fine:  # servers up to 0.5.20 want no announcement
                return
            raise UpdateFailed(str(error)) from error
        if not isinstance(reply, dict) or reply.get("success") is not True:
            raise UpdateFailed(f"{url} answered {str(reply)[:300]}")


_sharing = threading.Lock()  # the sharing strategy is per process, and a tensor moves into shared memory only once


def sending_rank(config: ExperimentConfig, plans: Sequence[WorkerPlan]) -> WorkerPlan | None:
    """Return the rank that sends the weights; None in a run without ranks.

    Raises:
        ValueError: no layout, or no graph.
    """
    ranks = [plan for plan in plans if plan.kind == MODEL_WORKER]
    return ranks[placement(config).actor.publisher] if ranks else None


class TensorTransport(MemoryTransport):
    """Sends weights by shared memory to servers on the trainer's machine."""

    def check(self, config: ExperimentConfig) -> Iterator[str]:
        """See the base class. In addition, the run's own servers have to be on the host of the rank that sends."""
        yield from super().check(config)
        if config.generation.engine.urls:
            return
        plans = plan_if_valid(config)
        sender = sending_rank(config, plans)
        for plan in plans:
            if sender and plan.kind == GENERATION_SERVER and plan.host.name != sender.host.name:
                yield (
                    f"manager.weight_transport={self.name!r}: {plan.name} runs on {plan.host.name or 'this host'!r} "
                    f"and {sender.name}, which sends the weights, on {sender.host.name or 'this host'!r}, and memory "
                    "is shared on one machine only; use distributed or disk, or change system.hosts"
                )
                return

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
    """Return the handle by which another process of this host maps the tensors; valid as long as the tensors live."""
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
