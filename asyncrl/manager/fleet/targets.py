"""The weights that each generation server is to have: published or assigned, present on its host or not. Pure state."""

from __future__ import annotations

from asyncrl.manager.fleet.servers import ServerLife, Target, host_of


class ServerTargets:
    """Weights that servers are to have, and those that they can have now.

    Args:
        staged: hosts share no folder, so that a server can only have weights that `arrived` on its host.
        initial: folder of the initial model.

    Attributes:
        newest: newest published weights; None before the first.
    """

    def __init__(self, *, staged: bool = False, initial: str = "") -> None:
        self.newest: Target | None = None
        self._before: Target | None = None
        self._initial = Target(0, initial)
        self._assigned: dict[int, Target] = {}
        self._on_hosts: dict[str, Target] | None = {} if staged else None

    def publish(self, target: Target) -> None:
        """Set the newest weights. An older target than the present one is ignored."""
        if self.newest is None or target.version > self.newest.version:
            self._before, self.newest = self.newest, target

    def assign(self, server: int, target: Target) -> None:
        """Set this server's weights to `target`, even if they are older than its present ones. Published targets no
        longer apply to it.
        """
        self._assigned[server] = target

    def arrived(self, host: str, target: Target) -> None:
        """Record that the host at this address has these weights. Ignored if it has newer ones."""
        assert self._on_hosts is not None, "hosts share a folder"
        present = self._on_hosts.get(host)
        if present is None or target.version >= present.version:
            self._on_hosts[host] = target

    def lost(self, host: str) -> None:
        """Record that the host has no weights any more."""
        assert self._on_hosts is not None, "hosts share a folder"
        self._on_hosts.pop(host, None)

    def on_host(self, host: str | None = None) -> set[int]:
        """Return the version that arrived on this host, if any; without a host those on all hosts."""
        return {target.version for where, target in (self._on_hosts or {}).items() if host in (None, where)}

    def wanted(self, server: int) -> Target | None:
        """Return the weights that the server should have; None if it keeps those that it began with."""
        return self._assigned.get(server, self.newest)

    def available(self, life: ServerLife) -> Target | None:
        """Return the newest weights that the server can have now."""
        return self.wanted(life.index) if self._on_hosts is None else self._on_hosts.get(host_of(life.url))

    def goal(self, life: ServerLife) -> Target | None:
        """Return the weights that the next update loads.

        A server that has released its memory gets the initial model if there is no version. If it found the newest
        version's files damaged, it gets the previous version.
        """
        target = self.available(life)
        if not life.released:
            return target
        if target is not None and target.version == life.damaged:
            target = self._before
        return target or self._initial
