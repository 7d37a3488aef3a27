"""Name resolution: a small shared dictionary in which the processes of a run find each other. The interface.

Names are paths (`workers/model_worker/0`) relative to the resolver's root. Four verbs: `add`, `get` (and
`get_subtree`), `follow`, `delete`. `watch` and `wait` follow one name.

Leases. An entry added with a lease lives as long as its owner renews it, three times per lease, from a daemon thread.
So two renewals may fail or be late, and the entries of a killed process disappear. A stalled owner gets its entry back
with the next renewal, unless another owner took the name. What has no lease outlives its owner.

Fences. An owner that was replaced while it was cut off must not get its entries back or add others, even before its
successor has registered: processes would reach the wrong owner. So an owner may set `fences`: names with values,
without leases, that its replacement changes first. Its entries are added and put back only while the fences have these
values. During this time the owner keeps the name: an entry that was deleted, or taken and left by another owner, is put
back. Without fences a deletion is final.

Outages (`asyncrl.comm.name_resolve.outages`). A call that fails with `NameResolveUnavailable` is retried, and raises
the error only if the outage has lasted too long. Renewals are retried for ever.

Followers. One thread keeps all `Subtree`s up to date, through any outage, and wakes who waits for a name. So an idle
process makes no calls, however many other processes there are.

A back end implements the underscored primitives at the end. Every method may be called from any thread. Calls take
micro- to milliseconds, except `wait` and `watch`, and any call in an outage. In an event loop, use `asyncio.to_thread`.
A resolver does not survive `fork`: create one per process.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, ParamSpec, Self, TypeVar

from asyncrl.comm.name_resolve.outages import NameResolveError, NameResolveUnavailable, Outages, Subtree
from asyncrl.comm.waits.limits import ANSWER_S, CLOSE_S, LOOK_S

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_@.:=-]*(/[A-Za-z0-9_][A-Za-z0-9_@.:=-]*)*")
MAX_NAME_LENGTH = 200  # leaves room for the prefix and suffix of a temporary file within a file name's 255 bytes
MIN_LEASE_S = 0.05
"""Shortest lease, which a busy process can still renew."""
RENEWALS_PER_LEASE = 3
OUTAGE_S = 60.0
"""For which an outage of name resolution is waited out, unless the settings say otherwise."""
HURRY_S = 2.0
"""As `OUTAGE_S`, of a process that was asked to stop."""


class NameEntryExists(NameResolveError):
    """`add` without `replace` found a living entry under the name."""

    def __init__(self, name: str, root: str) -> None:
        super().__init__(f"name {name!r} under {root!r} is taken: delete it or add with replace=True")


class OwnerFenced(NameResolveError):
    """An owner that was replaced, according to its `fences`, tried to add an entry."""

    def __init__(self, name: str, root: str) -> None:
        super().__init__(
            f"name {name!r} under {root!r} no longer belongs to this process: another process has replaced it"
        )


class NameEntryNotFound(NameResolveError):
    """No living entry under the name."""


class NameResolveTimeout(NameResolveError):
    """The entry did not appear or change in time."""


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


def is_below(name: str, root: str) -> bool:
    """True if `name` is `root` or below it; everything is below ""."""
    return not root or name == root or name.startswith(root + "/")


@dataclass(slots=True)
class _Leased:
    """An entry that this resolver keeps alive; `due` is the time of its next renewal (monotonic s)."""

    value: str
    lease_s: float
    due: float
    is_missed: bool = False  # it is not this owner's now


class NameResolver(ABC):
    """A shared dictionary of names, with leases.

    Args:
        root: folder or key prefix of the names.
        patience_s: longest outage of the back end, in s.
    """

    def __init__(self, root: str, patience_s: float = OUTAGE_S) -> None:
        self.root = root
        self.on_lost: Callable[[str], None] = lambda name: None
        """Called once, in a thread of the resolver, with the name of a leased entry that this owner has lost."""
        self.on_fenced: Callable[[], None] = lambda: None
        """Called, in the calling thread, if adding or restoring an entry finds that this owner was replaced."""
        self.fences: dict[str, str] = {}
        """Entries are added, and restored after their lease ran out, only while each of these names has this value or
        does not exist."""
        self._outages = Outages(root, patience_s)
        self._closing = threading.Event()
        self._leased: dict[str, _Leased] = {}
        self._leased_changed = threading.Condition()
        self._adding: list[str] = []
        self._renewer: threading.Thread | None = None
        self._renews = True
        self._stop_limit_s = ANSWER_S
        self._followed: dict[str, Subtree] = {}
        self._following = threading.Lock()
        self._follower: threading.Thread | None = None
        self._refused: NameResolveError | None = None
        self._woken = threading.Event()  # of the follower

    @property
    def outage_s(self) -> float:
        """Seconds for which the back end has not answered; 0 while it does."""
        return self._outages.outage_s

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
            if lease_s is None:
                self._forget(name)
            else:
                self._keep(name, value, lease_s)
        except OwnerFenced:
            self.on_fenced()
            raise
        finally:
            self._adding.remove(name)

    def get(self, name: str) -> str:
        """Return the value of the entry `name`.

        Raises:
            NameEntryNotFound: there is no such entry.
        """
        value = self._patiently("get", self._read, check_name(name))
        if value is None:
            raise NameEntryNotFound(f"name {name!r} under {self.root!r} does not exist, or its lease has run out")
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
        subtree = self._joined(check_name(root) if root else "", waits=False)
        if not subtree.is_read:
            subtree.replace(self.get_subtree(root), first=True)
        return subtree

    def watch(self, name: str, timeout_s: float, last: str | None = None) -> str | None:
        """Wait until the value of `name` differs from `last`, and return the value. None stands for no entry in both.

        Raises:
            NameResolveTimeout: it did not change within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        subtree, failures = self._joined(check_name(name), waits=True), 0
        try:
            while True:
                left_s, seen = max(0.0, deadline - time.monotonic()), subtree.changes
                try:
                    value = self._read(name)  # not the follower's, which may be older than `last`
                except NameResolveUnavailable as error:
                    failures += 1
                    self._pause("watch", error, failures, left_s)
                else:
                    failures = 0
                    self._outages.worked("watch")
                    if value != last:
                        return value
                    subtree.await_change(seen, left_s)
                    self._check_open()
                if not left_s:
                    awaited = "appear" if last is None else f"change from {last!r}"
                    raise NameResolveTimeout(
                        f"name {name!r} under {self.root!r} did not {awaited} within {timeout_s:g} s"
                    )
        finally:
            with self._following:
                subtree.waiting -= 1
                if not (subtree.waiting or subtree.is_followed):
                    del self._followed[name]

    def wait(self, name: str, timeout_s: float) -> str:
        """Wait for the entry `name` and return its value.

        Raises:
            NameResolveTimeout: it did not appear within `timeout_s` seconds.
        """
        value = self.watch(name, timeout_s)
        assert value is not None  # it differs from `last`
        return value

    def delete(self, name: str, *, value: str | None = None, own: bool = False) -> bool:
        """Remove the entry, of any owner; return True if this call removed a living entry.

        Args:
            value: remove it only if it has this value.
            own: remove it only if this resolver owns it.
        """
        check_name(name)
        if value is None:
            self._forget(name)
        return self._patiently("delete", self._remove, name, value, own)

    def is_fenced(self) -> bool:
        """True if this owner was replaced, according to its `fences`."""
        return self._patiently("get", self._fenced)

    def hurry(self, limit_s: float = HURRY_S) -> None:
        """Limit outages to `limit_s` seconds from now on: the process was asked to stop, or (0) is about to end."""
        self._outages.limit_s = min(limit_s, self._outages.limit_s)
        self._stop_limit_s = min(max(limit_s, CLOSE_S), self._stop_limit_s)

    def close(self) -> None:
        """Stop renewing, and remove the leased entries of this resolver; entries without a lease stay.

        If the back end is away, the entries end with their leases.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        with self._following:
            for subtree in self._followed.values():
                subtree.wake()
        self._stop_renewing()
        owned, self._leased = list(self._leased), {}
        try:
            for name in owned:
                self._remove(name, None, own=True)
        except NameResolveUnavailable as error:
            _log.warning("entries under %r are left to run out: %s", self.root, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Leases.

    def _keep(self, name: str, value: str, lease_s: float) -> None:
        """Renew the entry from now on."""
        with self._leased_changed:
            self._leased[name] = _Leased(value, lease_s, time.monotonic() + lease_s / RENEWALS_PER_LEASE)
            if self._renewer is None and self._renews:
                self._renewer = threading.Thread(target=self._renew_leases, name="lease-renewer", daemon=True)
                self._renewer.start()
            self._leased_changed.notify()

    def _forget(self, name: str) -> None:
        """Stop renewing `name`, if it is renewed."""
        with self._leased_changed:
            self._leased.pop(name, None)
        self._outages.worked(f"renew {name}")

    def _stop_renewing(self) -> None:
        """End the thread; wait for a running renewal. The entries stay until their leases run out."""
        with self._leased_changed:
            self._renews = False
            self._leased_changed.notify()
        if self._renewer is not None:
            self._renewer.join(self._stop_limit_s)

    def _renew_leases(self) -> None:
        while (name := self._next_due()) is not None:
            try:
                self._renew_entry(name)
            except Exception:  # a defect: the other leases must not end with this one
                _log.exception("the lease of %r was not renewed; it is tried again at the next renewal", name)

    def _next_due(self) -> str | None:
        """Wait until a renewal is due and return its name; None once stopped."""
        with self._leased_changed:
            while self._renews:
                wait_s = None
                if self._leased:
                    name, entry = min(self._leased.items(), key=lambda item: item[1].due)
                    wait_s = entry.due - time.monotonic()
                    if wait_s <= 0:
                        entry.due = time.monotonic() + entry.lease_s / RENEWALS_PER_LEASE
                        return name
                self._leased_changed.wait(wait_s)
            return None

    def _renew_entry(self, name: str) -> None:
        """Renew the entry once, or put it back; find out whether it was lost."""
        if (entry := self._leased.get(name)) is None:
            return
        try:
            state = self._renew(name)
            if state == "lapsed" or (state == "gone" and self.fences):
                state = "kept" if self._put_back(name, entry) else "gone"
        except OwnerFenced as error:
            _log.warning("%s", error)
            self._forget(name)
            return
        except NameResolveError as error:
            with contextlib.suppress(NameResolveUnavailable):  # no limit: other processes may need this entry
                self._outages.failed(f"renew {name}", error, 1)
            entry.due = min(entry.due, time.monotonic() + LOOK_S)
            return
        self._outages.worked(f"renew {name}")
        if name in self._adding or self._leased.get(name) is not entry:  # this owner has replaced or deleted it itself
            return
        was_missed, entry.is_missed = entry.is_missed, state == "gone"
        if entry.is_missed and not was_missed:
            _log.warning("name %r was deleted or taken by another owner", name)
            self.on_lost(name)
            if not self.fences:
                self._forget(name)

    def _put_back(self, name: str, entry: _Leased) -> bool:
        """Add the entry again if its name is free; False if another owner has it.

        Raises:
            OwnerFenced: this owner was replaced.
        """
        try:
            self._create(name, entry.value, entry.lease_s, replace=False)
        except NameEntryExists:
            return False
        except OwnerFenced:
            self.on_fenced()
            raise
        if name not in self._leased:  # its owner deleted it meanwhile
            self._remove(name, entry.value, own=True)
        else:
            _log.warning("name %r was gone; it is put back", name)
        return True

    def _fenced(self) -> bool:
        found = {name: self._read(name) for name in self.fences}
        return any(value not in (None, self.fences[name]) for name, value in found.items())

    # Followers.

    def _joined(self, root: str, *, waits: bool) -> Subtree:
        """Return the subtree at `root`, which the thread keeps up to date from now on."""
        with self._following:
            self._check_open()
            if self._refused is not None:
                raise self._refused
            subtree = self._followed.setdefault(root, Subtree(root))
            subtree.is_followed |= not waits
            subtree.waiting += waits
            if self._follower is None:
                self._follower = threading.Thread(target=self._keep_up_to_date, name="follow names", daemon=True)
                self._follower.start()
        self._wake(root)
        return subtree

    def _subtrees(self) -> list[Subtree]:
        with self._following:
            return list(self._followed.values())

    def _keep_up_to_date(self) -> None:
        """Follow all subtrees through any outage, in a thread."""
        while not self._closing.is_set():
            try:
                for found in self._snapshots():
                    self._outages.worked("follow")
                    for subtree in self._subtrees():
                        if subtree.root in found:
                            subtree.replace(found[subtree.root], in_trouble=self._outages.in_trouble)
            except NameResolveUnavailable as error:
                if self._closing.is_set():
                    return
                for subtree in self._subtrees():
                    subtree.away()
                with contextlib.suppress(NameResolveUnavailable):  # no limit: no call waits for this thread
                    self._outages.failed("follow", error, 1)
                self._closing.wait(LOOK_S)
            except NameResolveError as error:
                self._refuse(error)
            except Exception as error:  # a defect: the readers must not take old entries for the present ones
                if not self._closing.is_set():
                    _log.exception("the names under %r are not followed any more", self.root)
                self._refuse(NameResolveError(f"names under {self.root!r} are not followed: {error!r}"))
            if self._refused is not None:
                return

    def _refuse(self, error: NameResolveError) -> None:
        """Raise `error` from all reads of followed names, unless the resolver is closed."""
        if not self._closing.is_set():
            with self._following:
                self._refused = error
                for subtree in self._followed.values():
                    subtree.refuse(error)

    def _wake(self, root: str | None = None) -> None:
        """Let the follower look now: the resolver is closed, or `root` is awaited too."""
        self._woken.set()

    # Outages.

    def _patiently(self, kind: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Retry `call` until it succeeds, and return its result."""
        for failures in itertools.count(1):
            try:
                result = call(*args, **kwargs)
            except NameResolveUnavailable as error:
                self._pause(kind, error, failures, math.inf)
            else:
                self._outages.worked(kind)
                return result
        raise AssertionError("unreachable")

    def _pause(self, kind: str, error: NameResolveUnavailable, failures: int, limit_s: float) -> None:
        """Wait before a failed call is retried, `limit_s` at most.

        Raises:
            NameResolveUnavailable: the call has been failing for too long.
        """
        self._closing.wait(min(self._outages.failed(kind, error, failures), limit_s))
        self._check_open()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise NameResolveError(f"the name resolver of {self.root!r} is closed")

    # What a back end implements.

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
    def _remove(self, name: str, value: str | None, own: bool) -> bool:
        """Remove the entry, with `value` only if it has this value, with `own` only if it is this resolver's, in one
        step; True if a living entry was removed.
        """

    @abstractmethod
    def _renew(self, name: str) -> Literal["kept", "lapsed", "gone"]:
        """Extend the lease of this resolver's entry. Return `lapsed` if it has run out, and `gone` if the entry was
        deleted or belongs to another owner.
        """

    @abstractmethod
    def _snapshots(self) -> Iterator[Mapping[str, Mapping[str, str]]]:
        """Yield, from now on, the entries at or below the roots of `_subtrees` by root: at first all, later those that
        may have changed. End after `_wake` at the latest.

        Raises:
            NameResolveUnavailable: the back end is away; the caller retries.
        """
