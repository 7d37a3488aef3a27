"""Keep leased entries alive from one daemon thread.

An entry with a lease of L seconds is renewed every L/3, so two renewals may fail or be late before the entry lapses. A
failed renewal is retried soon, and for ever: an entry that lapsed in an outage returns after it. The thread starts with
the first lease and ends with `stop`. It is a daemon, so it ends with its process. So the entries of a killed owner
disappear.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from asyncrl.comm.name_resolve.errors import NameResolveError, NameResolveUnavailable, OwnerFenced
from asyncrl.comm.name_resolve.patience import Patience

_log = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 3
AGAIN_S = 0.5
"""Delay, in s, before a failed renewal is retried."""
STOP_LIMIT_S = 5.0
"""Longest wait, in s, for a running renewal at the end."""


class LeaseRenewer:
    """Calls `renew(name)` for every kept name, RENEWALS_PER_LEASE times per lease.

    Args:
        renew: returns False while the entry is deleted or taken by another owner. OwnerFenced ends the renewals of the
            name; after any other error the renewal is retried.
        patience: records outages.
        lost: called once with the name when `renew` first returns False; returns True if `renew` must be called again.
    """

    def __init__(
        self, renew: Callable[[str], bool], patience: Patience, lost: Callable[[str], bool] = lambda name: False
    ) -> None:
        self._renew, self._patience, self._lost = renew, patience, lost
        self._leases: dict[str, tuple[float, float]] = {}  # time of the next renewal, and seconds between renewals
        self._missed: set[str] = set()  # entries that are not this owner's now
        self._changed = threading.Condition()
        self._stopped = False
        self.stop_limit_s = STOP_LIMIT_S
        """Longest wait of `stop` for a running renewal, in s."""
        self._thread: threading.Thread | None = None

    def keep(self, name: str, lease_s: float) -> None:
        """Renew `name` from now on; a name that is kept already gets the new lease."""
        with self._changed:
            interval_s = lease_s / RENEWALS_PER_LEASE
            self._leases[name] = (time.monotonic() + interval_s, interval_s)
            self._missed.discard(name)
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name="lease-renewer", daemon=True)
                self._thread.start()
            self._changed.notify()

    def forget(self, name: str) -> None:
        """Stop renewing `name`; unknown names are ignored."""
        with self._changed:
            self._leases.pop(name, None)
            self._missed.discard(name)
        self._patience.worked(_kind(name))

    def names(self) -> list[str]:
        """Return the names that are being renewed."""
        with self._changed:
            return list(self._leases)

    def stop(self) -> None:
        """End the thread; wait up to `stop_limit_s` seconds for a running renewal."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(self.stop_limit_s)

    def _run(self) -> None:
        while (name := self._next_due()) is not None:
            try:
                self._renew_once(name)
            except Exception:  # a defect: the other leases must not end with this one
                _log.exception("the lease of %r was not renewed; it is tried again at the next renewal", name)

    def _renew_once(self, name: str) -> None:
        try:
            kept = self._renew(name)
        except OwnerFenced as error:
            _log.warning("%s", error)
            self.forget(name)
            return
        except NameResolveError as error:
            self._again_soon(name, error)
            return
        self._patience.worked(_kind(name))
        if self._note(name, kept):
            _log.warning("name %r was deleted or taken by another owner", name)
            if not self._lost(name):
                self.forget(name)

    def _note(self, name: str, kept: bool) -> bool:
        """Record whether the entry is this owner's; True if it has just been lost."""
        with self._changed:
            if kept or name not in self._leases:  # forgotten while it was renewed
                self._missed.discard(name)
                return False
            lost = name not in self._missed
            self._missed.add(name)
            return lost

    def _again_soon(self, name: str, error: NameResolveError) -> None:
        with contextlib.suppress(NameResolveUnavailable):  # no limit: other processes may need this entry
            self._patience.failed(_kind(name), error, 1)
        with self._changed:
            if name in self._leases:
                _, interval_s = self._leases[name]
                self._leases[name] = (time.monotonic() + min(interval_s, AGAIN_S), interval_s)

    def _next_due(self) -> str | None:
        """Wait until a renewal is due and return its name; None once stopped."""
        with self._changed:
            while not self._stopped:
                wait_s = None
                if self._leases:
                    name, (due, interval_s) = min(self._leases.items(), key=lambda item: item[1])
                    wait_s = due - time.monotonic()
                    if wait_s <= 0:
                        self._leases[name] = (time.monotonic() + interval_s, interval_s)
                        return name
                self._changed.wait(wait_s)
            return None


def _kind(name: str) -> str:
    """Return the kind of call for `Patience`: one entry may fail while another does not."""
    return f"renew {name}"
