"""Leases where a test asks whether they are kept: a machine that stands still for some seconds must not end them."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from asyncrl.comm import name_resolve
from asyncrl.comm.name_resolve import NameResolveError, NameResolver, NameResolveTimeout

LONG_S = 60.0
PATIENCE_S = 60.0


def renew_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of `LONG_S` are renewed three times a second, as short ones are."""
    monkeypatch.setattr(name_resolve, "RENEWALS_PER_LEASE", 3 * LONG_S)
    with contextlib.suppress(ImportError, NameResolveError):  # where etcd3 is installed
        from asyncrl.hosts import etcd

        monkeypatch.setattr(etcd, "_LOOKS_PER_LEASE", 6 * LONG_S)


class Renewals:
    """For how long `owner`, from now on, left its entries without a renewal: from the beginning of one that worked to
    the end of the next.
    """

    def __init__(self, owner: NameResolver) -> None:
        self._owner, self._renew = owner, owner._renew_all
        owner._renew_all = self._renew_and_note  # type: ignore[method-assign]
        self._lock = threading.Lock()
        self._last, self._longest_s = time.monotonic(), 0.0

    @property
    def longest_pause_s(self) -> float:
        with self._lock:
            return max(self._longest_s, time.monotonic() - self._last)

    def _renew_and_note(self) -> None:
        began = time.monotonic()
        self._renew()
        if not self._owner.outage_s:  # else it is made again soon
            with self._lock:
                self._longest_s, self._last = max(self._longest_s, time.monotonic() - self._last), began


def assert_stays(owner: NameResolver, other: NameResolver, name: str, value: str, *, lease_s: float) -> None:
    """The entry of `owner` is there for two leases. It is gone only where it could not be renewed for a whole one, as
    where the machine stands still, and comes back.
    """
    renewals = Renewals(owner)
    try:
        assert other.watch(name, 2 * lease_s, value) is None
    except NameResolveTimeout:
        return
    assert renewals.longest_pause_s >= lease_s
    assert other.wait(name, PATIENCE_S) == value
