"""Puts proxies between a run's processes and its servers, by the addresses in name resolution alone.

A server's entry is replaced by one with the address of its proxy as soon as it appears. Its owner then finds that the
entry is another's; this one is renewed from here instead, and taken away where the owner's status is gone, so that a
death shows as late as it would have. A successor enters its own address, and so does an owner that was only stopped
(`NameResolver.fences`); it is replaced again.

Who read an address in the few milliseconds between goes past the proxy until its connection breaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import msgspec

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolver
from asyncrl.comm.name_resolve.errors import NameEntryNotFound
from asyncrl.verify.chaos.proxy import LinkProxy


def through(key: str, value: str, port: int) -> tuple[str, tuple[str, int]]:
    """The entry's `value` with another port, and the host and port that it had."""
    is_server = key.startswith(f"{names.GENERATION_SERVERS}/")
    entry = names.GenerationServerEntry.decode(value) if is_server else None
    parts = urlsplit(value if entry is None else entry.url)
    if parts.hostname is None or parts.port is None:
        raise ValueError(f"name {key!r} holds {value!r:.200}, which has no host and port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    address = urlunsplit(parts._replace(netloc=f"{host}:{port}"))
    changed = address if entry is None else msgspec.structs.replace(entry, url=address).encode()
    return changed, (parts.hostname, parts.port)


@dataclass(slots=True)
class _Link:
    """A server that is reached through a proxy."""

    owner: str
    key: str
    proxy: LinkProxy
    port: int
    value: str | None = None
    """The entry as it was put there; None: there is none."""


class Links:
    """The proxies of a run; `look` is to be called often.

    Args:
        host: where the run's processes listen.
        lease_s: of the entries.
        keys: the entries of name resolution to replace, by the process that is reached by each.
    """

    def __init__(self, host: str, lease_s: float, keys: Mapping[str, str]) -> None:
        self._host, self._lease_s = host, lease_s
        self._keys = dict(keys)
        self._links: dict[str, _Link] = {}

    async def start(self) -> None:
        """Open the proxies."""
        for owner, key in self._keys.items():
            proxy = LinkProxy(self._host)
            self._links[owner] = _Link(owner, key, proxy, await proxy.start())

    def proxy(self, owner: str) -> LinkProxy:
        """The one before `owner`."""
        return self._links[owner].proxy

    def look(self, resolver: NameResolver) -> None:
        """Replace the entries that are new, take away those whose owner is gone."""
        for link in self._links.values():
            value = _value(resolver, link.key)
            if value is None:
                link.value = None
            elif value != link.value:
                link.value, link.proxy.upstream = through(link.key, value, link.port)
                resolver.add(link.key, link.value, lease_s=self._lease_s, replace=True)
            elif _value(resolver, f"{names.STATUSES}/{link.owner}") is None:
                resolver.withdraw(link.key)
                link.value = None

    async def close(self) -> None:
        """Close the proxies."""
        for link in self._links.values():
            await link.proxy.close()


def _value(resolver: NameResolver, key: str) -> str | None:
    try:
        return resolver.get(key)
    except NameEntryNotFound:
        return None
