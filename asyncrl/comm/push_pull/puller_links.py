"""The pusher's connections, one to each puller: messages go out, replies come in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import zmq

from asyncrl.comm.push_pull import messages
from asyncrl.comm.security.peer_gate import SourceLog
from asyncrl.comm.security.run_secret import SocketSecurity
from asyncrl.comm.sockets import Context, PeerLink, connecting
from asyncrl.comm.trajectory_codec import CodecError

_SOCKET_HIGH_WATER = 16  # batches in libzmq's own buffer per puller; the outbox holds the rest


class PullerLinks:
    """One link to each puller. Create and use it in one running asyncio loop.

    Args:
        security: the run's keys, or None for plaintext.
        on_writable: called when a puller accepts messages again.
        on_reply: called with each valid reply; malformed ones are logged.
        on_lost: called with the address of a puller whose connection broke.
    """

    def __init__(
        self,
        security: SocketSecurity | None,
        *,
        on_writable: Callable[[], None],
        on_reply: Callable[[messages.Reply], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._context = Context()
        self._open_socket = partial(connecting, self._context, zmq.DEALER, security, high_water=_SOCKET_HIGH_WATER)
        self._on_writable, self._on_reply, self._on_lost = on_writable, on_reply, on_lost
        self._links: dict[str, PeerLink] = {}
        self.writable: dict[str, PeerLink] = {}
        """The links that accept a message now, by address."""
        self._log = SourceLog("reply")

    @property
    def addresses(self) -> list[str]:
        """Addresses of the pullers."""
        return list(self._links)

    @property
    def any_connected(self) -> bool:
        """True while at least one puller is connected."""
        return any(link.connected for link in self._links.values())

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Connect to exactly these pullers from now on.

        Raises:
            ValueError: an address is not an endpoint.
        """
        for gone in [address for address in self._links if address not in addresses]:
            self.writable.pop(gone, None)
            self._links.pop(gone).close()
        for address in addresses:
            if address not in self._links:
                self._links[address] = PeerLink(
                    address,
                    self._open_socket,
                    on_writable=self._writable_again,
                    on_message=self._receive,
                    on_lost=self._lost,
                )

    def send(self, address: str, batch: messages.Batch) -> bool:
        """Send `batch` to the puller at `address`; return False if its connection accepts no message now."""
        link = self._links[address]
        sent = link.writable and link.send(messages.pack(batch.entries))
        if not link.writable:
            self.writable.pop(address, None)
        return sent

    def close(self) -> None:
        """Disconnect from all pullers; unsent messages are discarded."""
        self.writable.clear()
        for link in self._links.values():
            link.close()
        self._context.term()

    def _writable_again(self, link: PeerLink) -> None:
        self.writable[link.address] = link
        self._on_writable()

    def _lost(self, link: PeerLink) -> None:
        self.writable.pop(link.address, None)
        self._on_lost(link.address)

    def _receive(self, link: PeerLink, frames: list[memoryview]) -> None:
        try:
            reply = messages.decode_reply(b"".join(frames))
        except CodecError as error:
            self._log.note(link.address, str(error))
            return
        self._on_reply(reply)
