"""How a generation server that is paused gets the weights of a version: it reads them, or the trainer sends them.

    manager ── pause ──▶ server
    manager ── update_weights_from_disk(path) ──▶ server                       DiskDelivery
    manager ── send_weights(server, version) ──▶ ModelWorker 0 ── weights ──▶ server        TrainerDelivery
    manager ── continue, canary ──▶ server

Everything else (pausing, versions, the canary, quarantine) is the same. ModelWorker 0 keeps a copy of each version that
may still be wanted, so a server that comes late or starts again is brought to the newest version in the same way.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolver
from asyncrl.comm.name_resolve.errors import NameResolveError
from asyncrl.comm.request_reply import PeerGone, RemoteError, RequestClient, RequestTimeout
from asyncrl.comm.security import SocketSecurity
from asyncrl.inference.client import GenerationServerClient, UpdateFailed
from asyncrl.manager.fleet.decisions import BeginUpdate
from asyncrl.trainer.messages import SendWeights

SENDER = 0
"""The ModelWorker that sends: every rank has all weights, one of them is enough."""


class WeightDelivery(Protocol):
    """Brings weights into a paused server."""

    async def deliver(self, order: BeginUpdate, client: GenerationServerClient, timeout_s: float) -> None:
        """Load the order's target; returns once the server names its version.

        Raises:
            HttpError: it does not; what weights it has is unknown.
        """
        ...


class DiskDelivery:
    """The server reads the version's folder."""

    async def deliver(self, order: BeginUpdate, client: GenerationServerClient, timeout_s: float) -> None:
        """See `WeightDelivery`."""
        target = order.target
        await client.update_weights(target.path, target.version, keep_cache=order.keeps_cache, timeout_s=timeout_s)


class TrainerDelivery:
    """ModelWorker 0 sends what it holds of the version. Make and use it in one running loop."""

    def __init__(self, resolver: NameResolver, security: SocketSecurity | None) -> None:
        self._resolver, self._security = resolver, security
        self._sender: tuple[str, RequestClient] | None = None

    async def deliver(self, order: BeginUpdate, client: GenerationServerClient, timeout_s: float) -> None:
        """See `WeightDelivery`."""
        version = order.target.version
        send = SendWeights(order.server, client.url, version, order.keeps_cache, timeout_s)
        try:
            sender = await self._find()
            await sender.call(send, timeout_s=timeout_s)
        except (NameResolveError, RequestTimeout, PeerGone) as error:
            raise UpdateFailed(f"the trainer did not send v{version} to {client.url}: {error}") from error
        except RemoteError as error:
            raise UpdateFailed(
                f"the trainer could not send v{version} to {client.url}: {error.kind}: {error.message}"
            ) from error
        served = await client.served_version()
        if served != version:
            raise UpdateFailed(f"{client.url} was sent version {version} but names {served}")

    async def _find(self) -> RequestClient:
        """The sender's client; a new one where it was started again at another address."""
        key = names.worker_key("model_worker", SENDER)
        endpoint = names.WorkerAddress.decode(await asyncio.to_thread(self._resolver.get, key)).endpoint
        if self._sender is None or self._sender[0] != endpoint:
            self.close()
            self._sender = (endpoint, RequestClient(endpoint, self._security, name=key))
        return self._sender[1]

    def close(self) -> None:
        """Disconnect."""
        if self._sender is not None:
            self._sender[1].close()
            self._sender = None
