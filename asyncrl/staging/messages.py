"""Requests to a staging server, and its replies.

Folders are called by the same name on every host: `model` is the initial model, `v<N>` a version of the actor,
and `inputs` the input files of RolloutWorkers.
"""

from __future__ import annotations

import re

from msgspec import Struct

from asyncrl.runtime.planning.process_kinds import MODEL

INPUTS = "inputs"
"""Name of the input files of RolloutWorkers (`asyncrl.staging.inputs`)."""
LAUNCHER_HOST = 0
"""Index of the staging server on the launcher's host, the publisher's."""
OF_THE_LAUNCH = frozenset({MODEL, INPUTS})
"""Folders that do not change during a launch."""
_FOLDER = re.compile(r"model|inputs|v\d{1,18}")


def version_folder(version: int) -> str:
    """Return the folder name of a version of the actor."""
    return f"v{version}"


def is_folder(name: str) -> bool:
    """True if `name` is the name of a folder."""
    return _FOLDER.fullmatch(name) is not None


class StageRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /stage`: bring a folder to this host, from its own disk or from another host; repeated until it is done.

    Attributes:
        folder: name of the folder.
        path: path of the folder on this host's disk; empty if it must be fetched.
        source: URL of the staging server that has the folder.
        manifest_sum: checksum of the folder's manifest, if it must be fetched.
        keep: folders that are still read or fetched from here; other versions are removed once this one is complete.
    """

    folder: str
    path: str = ""
    source: str = ""
    manifest_sum: str = ""
    keep: tuple[str, ...] = ()


class SameCodeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /same_code`: compare the caller's code with that on this host (`asyncrl.config.plugin_code.same_code`).

    Attributes:
        sums: checksums of sources, by the names of their modules.
    """

    sums: dict[str, str]


class SameCodeReply(Struct, frozen=True):
    """Modules that differ on the requested host, each with the reason."""

    differences: dict[str, str]


class ObservedRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /observed`: new lines of the caller's processes about themselves, to the launcher's host.

    Attributes:
        sender, first, lines: see `asyncrl.staging.forwarding.Batch`.
        ahead_s: seconds by which the caller's clock is ahead of the server's.
    """

    sender: str = ""
    first: dict[str, int] = {}
    lines: dict[str, list[str]] = {}
    ahead_s: float = 0.0


class ObservedReply(Struct, frozen=True):
    """The lines are written; `at` is the server's time, in seconds since 1970, and `home` the id of its folder."""

    at: float
    home: str = ""


class StageReply(Struct, frozen=True):
    """Path of the folder on this host and checksum of its manifest; `done` is False while the folder is being
    fetched.
    """

    done: bool
    path: str = ""
    manifest_sum: str = ""
