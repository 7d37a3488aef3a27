"""Errors of name resolution."""

from __future__ import annotations


class NameResolveError(Exception):
    """Base of the errors below. Raised itself if a back end refuses access or is closed, or an entry is damaged."""


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

    def __init__(self, name: str, root: str) -> None:
        super().__init__(f"name {name!r} under {root!r} does not exist, or its owner's lease has run out")


class NameResolveTimeout(NameResolveError):
    """The entry did not appear or change in time."""

    def __init__(self, name: str, root: str, waited_s: float, awaited: str) -> None:
        super().__init__(f"name {name!r} under {root!r} did not {awaited} within {waited_s:g} s")
