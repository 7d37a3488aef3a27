"""What is asked of a staging server, and what it answers.

Folders are called by the same name on every host: `model`, the initial one, and `v<N>`, a version of the actor.
"""

from __future__ import annotations

import re

from msgspec import Struct

MODEL = "model"
"""Name of the initial model."""
_FOLDER = re.compile(r"model|v\d{1,18}")


def version_folder(version: int) -> str:
    """Name of a version of the actor."""
    return f"v{version}"


def is_folder(name: str) -> bool:
    """Whether `name` is that of a folder."""
    return _FOLDER.fullmatch(name) is not None


class StageRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /stage`: have a folder on this host, from its own disk or from another host; asked again until it is done.

    Attributes:
        folder: its name.
        path: where it is on this host's disk; empty where it has to be fetched.
        source: URL of the staging server that has it.
        manifest_sum: checksum of its manifest, where it has to be fetched.
        keep: folders that somebody still reads or fetches from here; other versions are removed once this one is there.
    """

    folder: str
    path: str = ""
    source: str = ""
    manifest_sum: str = ""
    keep: tuple[str, ...] = ()


class StageReply(Struct, frozen=True):
    """Where the folder is on this host, and the checksum of its manifest; not `done` while it is on its way."""

    done: bool
    path: str = ""
    manifest_sum: str = ""
