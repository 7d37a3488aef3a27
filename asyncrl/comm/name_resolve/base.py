"""The interface of name resolution: a small shared dictionary in which the processes of a run find each other.

Names are paths (`workers/model_worker/0`) relative to the resolver's root. An entry added with a lease lives as long as
its owner's resolver renews it. If the owner dies, the entry is gone once the lease has run out. An owner that was only
stalled gets its entry back with the next renewal, unless another owner took the name.

Fences. An owner that was replaced while it was cut off must not get its entries back or add others, even before its
successor has registered. Otherwise other processes would reach the wrong owner. So an owner may set `fences`: names
with values, without leases, that its replacement changes first. Its entries are added and put back only while the
fences have these values. During this time the owner keeps the name: an entry that was deleted, or taken and left by
another owner, is put back. Without fences a deletion is final.

Outages. A call that fails with `NameResolveUnavailable` is retried (`patience`), and raises the error only if the
outage has lasted too long. Renewals are retried for ever. An entry whose lease ran out meanwhile is added again.

A name that is read repeatedly is followed instead: `follow` returns a `Subtree`, which a thread of the resolver keeps
up to date, through any outage. So an idle process makes no calls, however many other processes there are.

A back end implements the underscored primitives; all methods for users are here. Every method may be called from any
thread. Calls take micro- to milliseconds, except `wait` and `watch`, and any call in an outage. In an event loop, use
`asyncio.to_thread`. A resolver does not survive `fork`: create one per process.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from asyncrl.comm.name_resolve.errors import (
    NameEntryExists,
    NameEntryNotFound,
    NameResolveError,
    NameResolveTimeout,
    NameResolveUnavailable,
    OwnerFenced,
)
from asyncrl.comm.name_resolve.lease_renewal import LeaseRenewer
from asyncrl.comm.name_resolve.patience import BACKOFF, Patience
from asyncrl.comm.name_resolve.subtree import Subtree

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_@.:=-]*(/[A-Za-z0-9_][A-Za-z0-9_@.:=-]*)*")
MAX_NAME_LENGTH = 200  # leaves room for the prefix and suffix of a temporary file within a file name's 255 bytes
MIN_LEASE_S = 0.05
PATIENCE_S = 60.0
HURRY_S = 2.0
"""Longest outage, in s, that a process waits for after it was asked to stop."""
_LAST_RENEWAL_S = 0.5
"""Longest wait, in s, for a running renewal when the process is about to end."""
FIRST_POLL_S = 0.002
LAST_POLL_S = 0.05
FOLLOW_POLL_S, FOLLOW_IDLE_POLL_S = 0.1, 0.5
"""Time in s between two looks at followed names: just after a change, and later."""
"""Interval, in s, between polls of a back end that reports no changes by itself."""
_SETTLED_S = 5.0
"""A subscription that breaks after this time, in s, counts as successful until then."""


def check_name(name: str) -> str:
    """Return `name` if it is a valid entry name.

    Raises:
        ValueError: it is not valid.
    """
    if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        raise ValueError(
            f"name {name!r} is not valid: use components of letters, digits and _@.:=- that begin with a letter, digit "
            f"or underscore, joined by '/', at most {MAX_NAME_LENGTH} characters"
        )
    return name


class NameResolver(ABC):
    """A shared dictionary of names, with leases.

    Args:
        root: folder or key prefix of the names.
        patience_s: longest outage of the back end, in s.
    """

    def __init__(self, root: str, patience_s: float = PATIENCE_S) -> None:
        self.root = root
        self._patience = Patience(root, patience_s)
        self._renewer = LeaseRenewer(self._keep, self._patience, self._lost)
        self._leased: dict[str, tuple[str, float]] = {}  # value and lease in s, by name
        self._adding: list[str] = []
        self.on_lost: Callable[[str], None] = lambda name: None
        """Called once, in a thread of the resolver, with the name of a leased entry that this owner has lost."""
        self.on_fenced: Callable[[], None] = lambda: None
        """Called, in the calling thread, if adding or restoring an entry finds that this owner was replaced."""
        self.fences: dict[str, str] = {}
        """Entries are added, and restored after their lease ran out, only while each of these names has this value or
        does not exist."""
        self._closing = threading.Event()
        self._followed: dict[str, Subtree] = {}
        self._following = threading.Lock()

    @property
    def outage_s(self) -> float:
        """Seconds for which the back end has not answered; 0 while it does."""
        return self._patience.outage_s

    def add(self, name: str, value: str, *, lease_s: float | None = None, replace: bool = False) -> None:
        """Publish `value` under `name`.

        Args:
            lease_s: seconds without renewal after which the entry ends, so that it ends with this process; None: never.
            replace: True to replace an entry of any owner.

        Raises:
            NameEntryExists: the name is taken by a living entry and `replace` is False.
            OwnerFenced: this owner was replaced, according to its `fences`.
            NameResolveUnavailable: the back end was away for too long. Every method below may raise this too.
            ValueError: the name or the lease is not valid.
        """
        check_name(name)
        if lease_s is not None and not lease_s >= MIN_LEASE_S:
            raise ValueError(f"lease_s={lease_s!r} of name {name!r} is too short: use None or at least {MIN_LEASE_S}")
        self._check_open()
        self._adding.append(name)
        try:
            self._patiently("add", self._create, name, value, lease_s, replace)
            if lease_s is not None:
                self._leased[name] = value, lease_s
        except OwnerFenced:
            self.on_fenced()
            raise
        finally:
            self._adding.remove(name)
        if lease_s is None:
            self._renewer.forget(name)
        else:
            self._renewer.keep(name, lease_s)

    def get(self, name: str) -> str:
        """Return the value of the entry `name`.

        Raises:
            NameEntryNotFound: there is no such entry.
        """
        value = self._patiently("get", self._read, check_name(name))
        if value is None:
            raise NameEntryNotFound(name, self.root)
        return value

    def get_subtree(self, root: str = "") -> dict[str, str]:
        """Return all living entries at or below `root` ("" is everything), by full name, sorted."""
        found = self._patiently("get_subtree", self._read_subtree, check_name(root) if root else "")
        return dict(sorted(found.items()))

    def follow(self, root: str) -> Subtree:
        """Return the living entries at or below `root` ("" is everything), kept up to date from now on until `close`.

        Every call with the same `root` returns the same object; only the first call reads from the back end.

        Raises:
            NameResolveError: the back end refuses access.
        """
        with self._following:
            if root not in self._followed:
                self._check_open()
                subtree = Subtree(check_name(root) if root else "")
                subtree.replace(self.get_subtree(root))
                self._followed[root] = subtree
                name = f"follow {root or 'names'}"
                threading.Thread(target=self._keep_following, args=(subtree,), name=name, daemon=True).start()
            return self._followed[root]

    def wait(self, name: str, timeout_s: float) -> str:
        """Wait for the entry `name` and return its value.

        Raises:
            NameResolveTimeout: it did not appear within `timeout_s` seconds.
        """
        try:
            value = self.watch(name, timeout_s, last=None)
        except NameResolveTimeout:
            raise NameResolveTimeout(name, self.root, timeout_s, "appear") from None
        assert value is not None  # it differs from `last`
        return value

    def watch(self, name: str, timeout_s: float, last: str | None = None) -> str | None:
        """Wait until the value of `name` differs from `last`, and return the value. None stands for no entry in both.

        Raises:
            NameResolveTimeout: it did not change within `timeout_s` seconds.
        """
        check_name(name)
        deadline = time.monotonic() + timeout_s
        for failures in itertools.count(1):
            left_s = max(0.0, deadline - time.monotonic())
            try:
                value = self._await_change(name, last, left_s)
            except NameResolveUnavailable as error:
                self._pause("watch", error, failures, left_s)
                if left_s:
                    continue
            else:
                self._patience.worked("watch")
                if value != last:
                    return value
            raise NameResolveTimeout(name, self.root, timeout_s, f"change from {last!r}")
        raise AssertionError("unreachable")

    def delete(self, name: str) -> None:
        """Remove the entry, of any owner.

        Raises:
            NameEntryNotFound: there is no such entry.
        """
        self._renewer.forget(check_name(name))
        if not self._patiently("delete", self._remove, name):
            raise NameEntryNotFound(name, self.root)

    def withdraw(self, name: str) -> bool:
        """Remove the entry if this resolver owns it; return True if a living entry was removed."""
        self._renewer.forget(check_name(name))
        return self._patiently("delete", self._remove, name, only_own=True)

    def delete_value(self, name: str, value: str) -> bool:
        """Remove the entry if it has exactly this value, of any owner; return True if this call removed it."""
        return self._patiently("delete", self._remove_value, check_name(name), value)

    def clear_subtree(self, root: str = "", *, keep: Collection[str] = ()) -> None:
        """Remove every entry at or below `root` ("" is everything) except those named `keep`, of any owner."""
        if root:
            check_name(root)
        for name in self._renewer.names():
            if is_below(name, root) and name not in keep:
                self._renewer.forget(name)
        self._patiently("delete", self._remove_subtree, root, keep)

    def hurry(self) -> None:
        """Limit outages to `HURRY_S` from now on: the process was asked to stop."""
        self._patience.limit_s = min(HURRY_S, self._patience.limit_s)

    def end_soon(self) -> None:
        """Retry no call from now on: the process is about to end, and no other process waits for its entries."""
        self._patience.limit_s = 0.0
        self._renewer.stop_limit_s = _LAST_RENEWAL_S

    def close(self) -> None:
        """Stop renewing, and remove the leased entries of this resolver; entries without a lease stay.

        If the back end is away, the entries end with their leases.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        owned = self._renewer.names()
        self._renewer.stop()
        try:
            self._give_up(owned)
        except NameResolveUnavailable as error:
            _log.warning("entries under %r are left to run out: %s", self.root, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await_change(self, name: str, last: str | None, timeout_s: float) -> str | None:
        """Return the first value that differs from `last`, or `last` after `timeout_s`. Polls by default."""
        deadline = time.monotonic() + timeout_s
        pause = FIRST_POLL_S
        while (value := self._read(name)) == last:
            left = deadline - time.monotonic()
            if left <= 0:
                return last
            self._closing.wait(min(pause, left))
            self._check_open()
            pause = min(2 * pause, LAST_POLL_S)
        return value

    def _keep_following(self, subtree: Subtree) -> None:
        """Follow `subtree` through any outage, in a thread."""
        failures = 0
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                self._follow(subtree)
            except NameResolveUnavailable as error:
                if self._closing.is_set():
                    return
                subtree.trouble()
                failures = 1 if time.monotonic() > began + _SETTLED_S else failures + 1
                # No call waits for this thread, so an outage may last for ever.
                with contextlib.suppress(NameResolveUnavailable):
                    self._patience.failed(_kind_of_following(subtree), error, failures)
                self._closing.wait(BACKOFF.delay(failures))
            except NameResolveError as error:
                if not self._closing.is_set():
                    subtree.refuse(error)
                return
            except Exception as error:  # a defect: the readers must not take old entries for the present ones
                if not self._closing.is_set():
                    _log.exception("the names under %r are not followed any more", subtree.root)
                    subtree.refuse(NameResolveError(f"names under {subtree.root!r} are not followed: {error!r}"))
                return

    def is_fenced(self) -> bool:
        """True if this owner was replaced, according to its `fences`."""
        return self._patiently("get", self._fenced)

    def _fenced(self) -> bool:
        found = {name: self._read(name) for name in self.fences}
        return any(value not in (None, self.fences[name]) for name, value in found.items())

    def _found(self, subtree: Subtree, found: Mapping[str, str], *, in_trouble: bool = False) -> None:
        """Store all entries of `subtree`; the back end works. `in_trouble`: it may have failed until just now."""
        subtree.replace(found, in_trouble=in_trouble)
        self._patience.worked(_kind_of_following(subtree))

    def _follow(self, subtree: Subtree) -> None:
        """Keep `subtree` up to date until the resolver is closed. This default polls.

        Raises:
            NameResolveUnavailable: the back end is away; the caller retries.
        """
        while not self._closing.is_set():
            self._found(subtree, self._read_subtree(subtree.root))
            self._closing.wait(FOLLOW_POLL_S)

    def _keep(self, name: str) -> bool:
        """Renew the lease of the entry, or restore the entry if its name is free.

        Returns:
            False if another owner has the entry, or if it was deleted and this owner has no fences.

        Raises:
            OwnerFenced: this owner was replaced.
        """
        before = self._leased.get(name)
        kept = self._renew(name) or (bool(self.fences) and self._put_back(name))
        return kept or name in self._adding or self._leased.get(name) is not before  # this owner has replaced it itself

    def _put_back(self, name: str) -> bool:
        """Add the entry again if its name is free; False if another owner has it.

        Raises:
            OwnerFenced: this owner was replaced.
        """
        value, lease_s = self._leased[name]
        try:
            self._create(name, value, lease_s, replace=False)
        except NameEntryExists:
            return False
        except OwnerFenced:
            self.on_fenced()
            raise
        if name not in self._renewer.names():  # its owner deleted it meanwhile
            self._remove_value(name, value)
        else:
            _log.warning("name %r was gone; it is put back", name)
        return True

    def _lost(self, name: str) -> bool:
        """Report that this owner lost an entry; return True if the entry may return to it."""
        self.on_lost(name)
        return bool(self.fences)

    def _give_up(self, names: Collection[str]) -> None:
        """Remove these leased entries if this resolver still owns them."""
        for name in names:
            self._remove(name, only_own=True)

    def _patiently(self, kind: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Retry `call` until it succeeds, and return its result."""
        for failures in itertools.count(1):
            try:
                result = call(*args, **kwargs)
            except NameResolveUnavailable as error:
                self._pause(kind, error, failures, math.inf)
            else:
                self._patience.worked(kind)
                return result
        raise AssertionError("unreachable")

    def _pause(self, kind: str, error: NameResolveUnavailable, failures: int, limit_s: float) -> None:
        """Wait before a failed call is retried, `limit_s` at most.

        Raises:
            NameResolveUnavailable: the call has been failing for too long.
        """
        self._closing.wait(min(self._patience.failed(kind, error, failures), limit_s))
        self._check_open()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise NameResolveError(f"the name resolver of {self.root!r} is closed")

    @abstractmethod
    def _create(self, name: str, value: str, lease_s: float | None, replace: bool) -> None:
        """Store the entry with this resolver as owner, unless the resolver is `_fenced`. Raises NameEntryExists,
        OwnerFenced.
        """

    @abstractmethod
    def _read(self, name: str) -> str | None:
        """Return the value of the living entry; None if there is no such entry."""

    @abstractmethod
    def _read_subtree(self, root: str) -> dict[str, str]:
        """Return the living entries at or below `root`."""

    @abstractmethod
    def _remove(self, name: str, only_own: bool = False) -> bool:
        """Remove the entry (with `only_own`: unless it is another owner's); True if a living entry was removed."""

    @abstractmethod
    def _remove_value(self, name: str, value: str) -> bool:
        """Remove the entry if its value is `value`, in one step; True if it was removed."""

    @abstractmethod
    def _remove_subtree(self, root: str, keep: Collection[str]) -> None:
        """Remove all entries at or below `root` but `keep`."""

    @abstractmethod
    def _renew(self, name: str) -> bool:
        """Extend the lease of this resolver's entry. Put the entry back if its lease has run out, unless the resolver
        is `_fenced`. Return False if the entry is gone or belongs to another owner.
        """


def _kind_of_following(subtree: Subtree) -> str:
    """Return the kind of call for `Patience`."""
    return f"follow {subtree.root}"


def is_below(name: str, root: str) -> bool:
    """True if `name` is `root` or below it; everything is below ""."""
    return not root or name == root or name.startswith(root + "/")
