"""Name resolution: a small shared dictionary in which the processes of a run find each other. The interface; the back
ends are `NAME_BACKENDS`.

Names are paths (`workers/model_worker/0`) relative to the resolver's root. Four methods: `add`, `get` (`get_subtree`;
`watch` and `wait` repeat it until the value changes), `follow`, `delete`. Any thread may call them, and a call takes
micro- to milliseconds but in an outage; in an event loop, use `asyncio.to_thread`. A resolver does not survive `fork`.

Leases. An entry added with a lease lives as long as its owner renews it, three times per lease, from a daemon thread.
So the entries of a killed process disappear, and those of a stalled one come back with the next renewal, unless another
owner took the name. What has no lease outlives its owner.

Fences. An owner that was replaced while it was cut off must not get its entries back or add others, even before its
successor has registered: processes would reach the wrong owner. So an owner may set `fences`: names with values,
without leases, that its replacement changes first. Its entries are added and put back only while the fences have these
values, also entries that were deleted, or taken and left by another owner. Without fences a deletion is final.

Outages (etcd restarts or elects a leader, a file system is full or has a stale handle). A call that fails with
`NameResolveUnavailable` is retried, and raises the error once it has failed for too long. Renewals are retried for
ever. An outage is one line in the log, for all calls and retries together.

Followers. One thread keeps all `Subtree`s up to date. So who follows makes no calls, however many other processes there
are. Once the thread's calls have failed for too long, all reads raise the error. No lease can be renewed in an outage:
after it every entry is removed, and put back by its owner a moment later. It must not look as if all processes had
died, so in trouble (`NameResolver.in_trouble`) a `Subtree` holds removals back for `GRACE_S`.

    t=0 s     etcd stops answering, and the calls of this process fail
    t=30 s    etcd answers again, leases have run out      replace({}): "a" and "b" are held back until 38 s
    t=31 s    the owner of "a" has put it back             replace({"a": ...}): the reader never missed it
    t=38 s    no owner has put "b" back                    it is gone
"""

from __future__ import annotations

import logging
import math
import pkgutil
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Literal, ParamSpec, Self, TypeVar

from asyncrl.comm.waits import ANSWER_S, CLOSE_S, LOOK_S, Backoff

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_@.:=-]*(/[A-Za-z0-9_][A-Za-z0-9_@.:=-]*)*")
MAX_NAME_LENGTH = 200  # leaves room for a suffix within a file name's 255 bytes
NAME_BACKENDS = {"file": "asyncrl.comm.name_files:FileResolver", "etcd3": "asyncrl.hosts.etcd:EtcdResolver"}
"""Import paths of the back ends by their names in `system.name_resolve`; only the one in use is imported."""
MIN_LEASE_S = 0.05
"""Shortest lease, which a busy process can still renew."""
RENEWALS_PER_LEASE = 3
WATCH_S = 0.1
"""Between two looks at a name that is watched."""
OUTAGE_S = 60.0
"""For which an outage of name resolution is waited out, unless the settings say otherwise."""
HURRY_S = 2.0
"""As `OUTAGE_S`, of a process that was asked to stop."""
LATE_S = 0.5
"""After which a renewal that was due is a sign of trouble."""
GRACE_S = 8.0
"""By which removals are delayed in an outage: longer than an owner takes to put its entry back. That is a call that
hangs until its limit (4 s), a retried renewal (0.5 s), a new connection (1 s).
"""
_BACKOFF = Backoff(0.05, 1.0)
"""Delays between a failed call and its retry."""


class NameBackend(StrEnum):
    """Storage of the entries."""

    file = auto()
    """A folder: on one machine, or shared by several."""
    etcd3 = auto()
    """An etcd server."""


class NameResolveError(Exception):
    """Base of the errors of name resolution. Raised itself if a back end refuses access or is closed, or an entry is
    damaged.
    """


class NameResolveUnavailable(NameResolveError):
    """The back end does not answer, or fails (connection, stale handle, full disk). A later call may work."""


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


class Subtree:
    """The entries at or below a root, which the resolver keeps up to date. Reading makes no call. Any thread may call
    it.

    Args:
        root: root of the entries.
        clock: monotonic time in seconds.
    """

    def __init__(self, root: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.root, self._clock = root, clock
        self._present: dict[str, str] | None = None  # None: not read yet
        self._leaving: dict[str, tuple[str, float]] = {}  # entries held back: value, and end of the delay
        self._refused: Exception | None = None
        self._changed = threading.Condition()

    def entries(self) -> dict[str, str]:
        """Return the living entries by full name, sorted; during an outage the last known ones.

        Raises:
            NameResolveError: the back end refuses access.
        """
        with self._changed:
            if self._refused is not None:
                raise self._refused
            now = self._clock()
            self._leaving = {name: left for name, left in self._leaving.items() if now < left[1]}
            held_back = {name: value for name, (value, _) in self._leaving.items()}
            return dict(sorted((held_back | (self._present or {})).items()))

    def get(self, name: str) -> str | None:
        """Return the value under `name`; None without such an entry."""
        return self.entries().get(name)

    def await_first(self, timeout_s: float) -> bool:
        """Wait until the entries have been read once, for `timeout_s` seconds at most; return True if they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self._present is not None, timeout_s)

    def replace(self, found: Mapping[str, str], *, in_trouble: bool = False) -> None:
        """Store all entries. `in_trouble`: hold removals back."""
        with self._changed:
            before = self._present or {}
            if found == self._present:
                return
            if in_trouble:
                until = self._clock() + GRACE_S
                self._leaving |= {name: (before[name], until) for name in before.keys() - found.keys()}
            self._leaving = {name: left for name, left in self._leaving.items() if name not in found}
            self._present = dict(found)
            self._changed.notify_all()

    def away(self) -> None:
        """Record that the back end is away: the owners of what is held back need as long again."""
        with self._changed:
            until = self._clock() + GRACE_S
            self._leaving = {name: (value, until) for name, (value, _) in self._leaving.items()}

    def refuse(self, error: Exception) -> None:
        """Raise `error` from all reads: the back end refuses access for good."""
        with self._changed:
            self._refused = error


@dataclass(slots=True)
class _Leased:
    """An entry that this resolver keeps alive."""

    value: str
    lease_s: float
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
        self._patience_s = patience_s
        self._failing: dict[object, float] = {}
        """Since when calls fail that are being retried, by call (monotonic s)."""
        self._trouble_until = -math.inf
        self._closing = threading.Event()
        self._leased: dict[str, _Leased] = {}
        self._leasing = threading.Lock()
        self._adding: list[str] = []
        self._renewer: threading.Thread | None = None
        self._renews = True
        self._renewal_due = math.inf  # of all leases, monotonic s
        self._renewer_woken = threading.Event()
        self._followed: dict[str, Subtree] = {}
        self._following = threading.Lock()
        self._follower: threading.Thread | None = None
        self._refused: NameResolveError | None = None
        self._woken = threading.Event()  # of the follower

    @property
    def outage_s(self) -> float:
        """Seconds for which calls have failed that are being retried; 0 if there are none."""
        now = time.monotonic()
        return now - min(list(self._failing.values()), default=now)

    @property
    def in_trouble(self) -> bool:
        """True if owners may have lost their leases in an outage, and have not had time to put their entries back.

        A lease expires if its owner could not renew it for two thirds of its length, and every owner renews each third.
        So before any lease expires, a call of this process has failed, or its own renewals are late: the back end
        hangs, or this process was paused itself.
        """
        now = time.monotonic()
        return now < self._trouble_until or (bool(self._leased) and now > self._renewal_due + LATE_S)

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
            self._patiently(self._claim, name, value, lease_s, replace)
            if lease_s is None:
                self._forget(name)
            else:
                self._keep(name, value, lease_s)
        finally:
            self._adding.remove(name)

    def get(self, name: str) -> str:
        """Return the value of the entry `name`.

        Raises:
            NameEntryNotFound: there is no such entry.
        """
        value = self._patiently(self._read, check_name(name))
        if value is None:
            raise NameEntryNotFound(f"name {name!r} under {self.root!r} does not exist, or its lease has run out")
        return value

    def get_subtree(self, root: str = "") -> dict[str, str]:
        """Return all living entries at or below `root` ("" is everything), by full name, sorted."""
        found = self._patiently(self._read_subtree, check_name(root) if root else "")
        return dict(sorted(found.items()))

    def follow(self, root: str) -> Subtree:
        """Return the living entries at or below `root` ("" is everything), kept up to date from now on until `close`.

        Every call with the same `root` returns the same object; only the first call waits for the back end.

        Raises:
            NameResolveError: the back end refuses access.
        """
        if root:
            check_name(root)
        with self._following:
            self._check_followed()
            if root not in self._followed:
                self._followed[root] = Subtree(root)
                self._wake()
            subtree = self._followed[root]
            if self._follower is None:
                self._follower = threading.Thread(target=self._keep_up_to_date, name="follow names", daemon=True)
                self._follower.start()
        while not subtree.await_first(LOOK_S):
            self._check_followed()
        return subtree

    def watch(self, name: str, timeout_s: float, last: str | None = None) -> str | None:
        """Wait until the value of `name` differs from `last`, and return the value. None stands for no entry in both.

        Raises:
            NameResolveTimeout: it did not change within `timeout_s` seconds.
        """
        check_name(name)
        deadline = time.monotonic() + timeout_s
        while True:
            self._check_followed()
            left_s, value = deadline - time.monotonic(), last
            try:
                value = self._read(name)
                self._failing.pop(name, None)
            except NameResolveUnavailable as error:
                if lasting := self._failed(name, error):  # whoever waits repeats this: the next call goes on counting
                    raise lasting from error
            if value != last:
                return value
            if left_s <= 0:
                awaited = "appear" if last is None else f"change from {last!r}"
                raise NameResolveTimeout(f"name {name!r} under {self.root!r} did not {awaited} within {timeout_s:g} s")
            self._closing.wait(min(left_s, WATCH_S))

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
        return self._patiently(self._remove, name, value, own)

    def is_fenced(self) -> bool:
        """True if this owner was replaced, according to its `fences`."""
        return self._patiently(self._fenced)

    def hurry(self, limit_s: float = HURRY_S) -> None:
        """Limit outages to `limit_s` seconds from now on: the process was asked to stop, or (0) is about to end."""
        self._patience_s = min(limit_s, self._patience_s)

    def close(self) -> None:
        """Stop renewing, and remove the leased entries of this resolver; entries without a lease stay.

        If the back end is away, the entries end with their leases.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        self._stop_renewing()
        owned, self._leased = list(self._leased), {}
        try:
            for name in owned:
                self._remove(name, None, own=True)
        except NameResolveUnavailable as error:
            _log.warning("entries under %r are left to run out: %s", self.root, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Leases.

    def _keep(self, name: str, value: str, lease_s: float) -> None:
        """Renew the entry from now on."""
        with self._leasing:
            self._leased[name] = _Leased(value, lease_s)
            self._renewal_due = min(self._renewal_due, time.monotonic() + lease_s / RENEWALS_PER_LEASE)
            if self._renewer is None and self._renews:
                self._renewer = threading.Thread(target=self._renew_leases, name="lease-renewer", daemon=True)
                self._renewer.start()
        self._renewer_woken.set()

    def _forget(self, name: str) -> None:
        """Stop renewing `name`, if it is renewed."""
        with self._leasing:
            self._leased.pop(name, None)

    def _stop_renewing(self) -> None:
        """End the thread; wait for a running renewal. The entries stay until their leases run out."""
        with self._leasing:
            self._renews = False
        self._renewer_woken.set()
        if self._renewer is not None:
            self._renewer.join(min(ANSWER_S, max(CLOSE_S, self._patience_s)))

    def _renew_leases(self) -> None:
        while self._renews:
            self._renewer_woken.wait(min(self._renewal_due - time.monotonic(), threading.TIMEOUT_MAX))
            self._renewer_woken.clear()
            if self._renews and time.monotonic() >= self._renewal_due:
                self._renew_all()

    def _renew_all(self) -> None:
        """Renew every lease once, or put its entry back; find out which entries were lost."""
        began, works = time.monotonic(), True
        for name, entry in list(self._leased.items()):
            if self._closing.is_set() or self._leased.get(name) is not entry:  # or its owner has deleted it meanwhile
                continue
            try:
                self._renew_entry(name, entry)
            except NameResolveError as error:
                works = False
                self._failed(self._renew_all, error)  # no limit: other processes may need this entry
            except Exception:  # a defect: the other leases must not end with this one
                _log.exception("the lease of %r was not renewed; it is tried again at the next renewal", name)
        if works:
            self._failing.pop(self._renew_all, None)
        with self._leasing:
            if time.monotonic() > self._renewal_due + LATE_S:
                self._trouble_until = time.monotonic() + GRACE_S
            pause_s = min((entry.lease_s for entry in self._leased.values()), default=math.inf) / RENEWALS_PER_LEASE
            self._renewal_due = began + (pause_s if works else min(pause_s, LOOK_S))

    def _renew_entry(self, name: str, entry: _Leased) -> None:
        try:
            state = self._renew(name)
            if state == "lapsed" or (state == "gone" and self.fences):
                state = "kept" if self._put_back(name, entry) else "gone"
        except OwnerFenced as error:
            _log.warning("%s", error)
            self._forget(name)
            return
        if name in self._adding or self._leased.get(name) is not entry:  # this owner has replaced or deleted it itself
            return
        was_missed, entry.is_missed = entry.is_missed, state == "gone"
        if entry.is_missed and not was_missed:
            _log.warning("name %r was deleted or taken by another owner", name)
            self.on_lost(name)
            if not self.fences:
                self._forget(name)

    def _put_back(self, name: str, entry: _Leased) -> bool:
        """Add the entry again if its name is free; False if another owner has it."""
        try:
            self._claim(name, entry.value, entry.lease_s, replace=False)
        except NameEntryExists:
            return False
        if name not in self._leased:  # its owner deleted it meanwhile
            self._remove(name, entry.value, own=True)
        else:
            _log.warning("name %r was gone; it is put back", name)
        return True

    def _claim(self, name: str, value: str, lease_s: float | None, replace: bool) -> None:
        try:
            self._create(name, value, lease_s, replace)
        except OwnerFenced:
            self.on_fenced()
            raise

    def _fenced(self) -> bool:
        found = {name: self._read(name) for name in self.fences}
        return any(value not in (None, self.fences[name]) for name, value in found.items())

    # Followers.

    def _subtrees(self) -> list[Subtree]:
        with self._following:
            return list(self._followed.values())

    def _keep_up_to_date(self) -> None:
        """Follow all subtrees through any outage, in a thread."""
        while not self._closing.is_set():
            try:
                for found in self._snapshots():
                    self._failing.pop(self._keep_up_to_date, None)
                    for subtree in self._subtrees():
                        if subtree.root in found:
                            subtree.replace(found[subtree.root], in_trouble=self.in_trouble)
            except NameResolveUnavailable as error:
                if self._closing.is_set():
                    return
                for subtree in self._subtrees():
                    subtree.away()
                if lasting := self._failed(self._keep_up_to_date, error):
                    self._refuse(lasting)
                else:
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

    def _wake(self) -> None:
        """Let the follower look now: the resolver is closed, or another root is followed too."""
        self._woken.set()

    def _check_followed(self) -> None:
        """Raise the reason if the thread keeps nothing up to date any more."""
        self._check_open()
        if self._refused is not None:
            raise self._refused

    # Outages.

    def _patiently(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Retry `call` until it succeeds, and return its result."""
        failures, this_call = 0, object()
        try:
            while True:
                try:
                    return call(*args, **kwargs)
                except NameResolveUnavailable as error:
                    if lasting := self._failed(this_call, error):
                        raise lasting from error
                failures += 1
                self._closing.wait(_BACKOFF.delay(failures))
                self._check_open()
        finally:
            self._failing.pop(this_call, None)

    def _failed(self, call: object, error: NameResolveError) -> NameResolveUnavailable | None:
        """Record that `call`, which is retried, has failed; return the error to raise if it has been failing for too
        long.
        """
        now = time.monotonic()
        self._trouble_until = now + GRACE_S  # leases may run out meanwhile
        if not self._failing:
            _log.warning(
                "name resolution under %r fails, calls are retried for up to %g s: %s",
                self.root, self._patience_s, error,
            )  # fmt: skip
        failed_s = now - self._failing.setdefault(call, now)
        if failed_s < self._patience_s:
            return None
        return NameResolveUnavailable(f"{error} (name resolution has failed for {failed_s:.0f} s)")

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
        """


def make_resolver(
    backend: NameBackend, root: str, *, patience_s: float = OUTAGE_S, access: Mapping[str, str] | None = None
) -> NameResolver:
    """Return a resolver of the given back end.

    `root` is a directory for `file` and a key prefix for `etcd3`, whose cluster `access` describes
    (`asyncrl.hosts.etcd_access.EtcdAccess.at`). Failed calls are retried for `patience_s` seconds.

    Raises:
        NameResolveError: the back end cannot be reached or refuses access, or `access` is invalid.
        ValueError: there is no such back end.
    """
    made: NameResolver = pkgutil.resolve_name(NAME_BACKENDS[NameBackend(backend)])(root, patience_s, **(access or {}))
    return made
