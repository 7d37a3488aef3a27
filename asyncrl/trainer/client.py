"""Client of the publishing ModelWorker, for the GserverManager. Torch-free."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolveError, NameResolver
from asyncrl.comm.request_reply import PeerGone, RemoteError, RequestClient
from asyncrl.comm.security import SocketSecurity
from asyncrl.inference.client import UpdateFailed
from asyncrl.trainer.messages import AskPulse, SendWeights

ASK_S = 5.0
"""Time between two questions whether the worker still sends, at most a quarter of the limit."""


class PublisherClient:
    """Makes calls to the ModelWorker with index `worker`. Make and use it in one running loop."""

    def __init__(self, resolver: NameResolver, security: SocketSecurity | None, worker: int) -> None:
        self._resolver, self._security, self._key = resolver, security, names.worker_key(names.MODEL_WORKER, worker)
        self._connected: tuple[str, RequestClient] | None = None

    async def send_weights(self, order: SendWeights, sending: Callable[[], None]) -> None:
        """Have the worker send the weights that it holds in memory to a server, as `order` specifies: piece by piece,
        each with the limit of the order. `sending` is called whenever the worker answers meanwhile.

        Raises:
            UpdateFailed: the transfer failed; the server's weights are then unknown.
        """
        try:
            client = await self._find()
            call = asyncio.ensure_future(client.call(order, timeout_s=math.inf))
            try:
                while not (await asyncio.wait({call}, timeout=min(ASK_S, order.timeout_s / 4)))[0]:
                    await client.call(AskPulse(), timeout_s=order.timeout_s)
                    sending()
                call.result()
            finally:
                call.cancel()
        except (NameResolveError, TimeoutError, PeerGone) as error:
            raise UpdateFailed(f"the trainer did not send v{order.version} to {order.url}: {error}") from error
        except RemoteError as error:
            raise UpdateFailed(
                f"the trainer could not send v{order.version} to {order.url}: {error.kind}: {error.message}"
            ) from error

    async def _find(self) -> RequestClient:
        """Return a client of the worker; a new one if the worker was restarted at another address."""
        endpoint = names.WorkerAddress.decode(await asyncio.to_thread(self._resolver.get, self._key)).endpoint
        if self._connected is None or self._connected[0] != endpoint:
            self.close()
            self._connected = (endpoint, RequestClient(endpoint, self._security, name=self._key))
        return self._connected[1]

    def close(self) -> None:
        """Disconnect."""
        if self._connected is not None:
            self._connected[1].close()
            self._connected = None
