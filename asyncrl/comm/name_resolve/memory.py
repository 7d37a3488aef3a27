"""Name resolution within one process, for tests: resolvers over one `MemoryStore` see each other's entries."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.comm.name_resolve.base import NameResolver, is_below
from asyncrl.comm.name_resolve.errors import NameEntryExists


@dataclass(slots=True)
class _Entry:
    value: str
    owner: object
    lease_s: float | None
    expires: float


@dataclass(slots=True)
class MemoryStore:
    """The shared dictionary; `clock` gives seconds."""

    clock: Callable[[], float] = time.monotonic
    entries: dict[str, _Entry] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class MemoryResolver(NameResolver):
    """Resolver over a `MemoryStore`; without one, over a private store."""

    def __init__(self, root: str = "", store: MemoryStore | None = None) -> None:
        super().__init__(root)
        self._store = store or MemoryStore()
        self._prefix = f"{root}/" if root else ""

    def _create(self, name: str, value: str, lease_s: float | None, replace: bool) -> None:
        with self._store.lock:
            if not replace and self._living(name) is not None:
                raise NameEntryExists(name, self.root)
            self._store.entries[self._prefix + name] = _Entry(value, self, lease_s, self._expiry(lease_s))

    def _read(self, name: str) -> str | None:
        with self._store.lock:
            entry = self._living(name)
            return None if entry is None else entry.value

    def _read_subtree(self, root: str) -> dict[str, str]:
        with self._store.lock:
            names = [key.removeprefix(self._prefix) for key in self._store.entries if key.startswith(self._prefix)]
            entries = {name: self._living(name) for name in names if is_below(name, root)}
            return {name: entry.value for name, entry in entries.items() if entry is not None}

    def _remove(self, name: str, only_own: bool = False) -> bool:
        with self._store.lock:
            entry = self._living(name)
            if only_own and entry is not None and entry.owner is not self:
                return False
            self._store.entries.pop(self._prefix + name, None)
            return entry is not None

    def _remove_subtree(self, root: str) -> None:
        with self._store.lock:
            for key in list(self._store.entries):
                if key.startswith(self._prefix) and is_below(key.removeprefix(self._prefix), root):
                    del self._store.entries[key]

    def _renew(self, name: str) -> bool:
        with self._store.lock:
            entry = self._store.entries.get(self._prefix + name)
            if entry is None or entry.owner is not self:
                return False
            entry.expires = self._expiry(entry.lease_s)
            return True

    def _living(self, name: str) -> _Entry | None:
        entry = self._store.entries.get(self._prefix + name)
        return entry if entry is not None and self._store.clock() < entry.expires else None

    def _expiry(self, lease_s: float | None) -> float:
        return float("inf") if lease_s is None else self._store.clock() + lease_s
