"""Client of one staging server; its requests, and their replies.

Folders are called by the same name on every host: `model` is the initial model, `v<N>` a version of the actor, and
`inputs` the input files of RolloutWorkers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from msgspec import Struct

from asyncrl.comm.http_client import HttpRefused, JsonHttp
from asyncrl.runtime.plan import MODEL

INPUTS = "inputs"
"""Name of the input files of RolloutWorkers (`asyncrl.staging.inputs`)."""
LAUNCHER_HOST = 0
"""Index of the staging server on the launcher's host, the publisher's."""
OF_THE_LAUNCH = frozenset({MODEL, INPUTS})
"""Folders that do not change during a launch."""
_FOLDER = re.compile(r"model|inputs|v\d{1,18}")
HOLD_S = 10.0
"""Longest time in seconds that a server holds a request for a folder that is being fetched."""
_MARGIN_S = 10.0
_COMPARING_S = 60.0
OBSERVED_LIMIT_S = 10.0
SOURCE_FAILED = HTTPStatus.BAD_GATEWAY
"""Status of a reply if the source failed, not the requested host."""


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
        sender: random name of the sending process; a new one after a restart.
        first: number of the first line of each file, counted from this sender's first.
        lines: by file name in `observed/`.
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


class StagingClient:
    """Calls of the staging server at `url`."""

    def __init__(self, http: JsonHttp, url: str) -> None:
        self._http, self._url = http, url.rstrip("/")

    async def stage(self, request: StageRequest) -> StageReply:
        """Wait until the folder is on the host, without a time limit: a fetch that receives no more data ends by
        itself.

        Raises:
            HttpError: the folder could not be fetched; `source_failed` is True if the source failed.
        """
        while True:
            reply = await self._http.call(
                "POST", f"{self._url}/stage", request, timeout_s=HOLD_S + _MARGIN_S, reply=StageReply
            )
            if reply.done:
                return reply

    async def observed(self, request: ObservedRequest) -> ObservedReply:
        """Append lines to files in `observed/` on the server's host, which is the launcher's.

        Raises:
            HttpError: the lines were not appended.
        """
        return await self._http.call(
            "POST", f"{self._url}/observed", request, timeout_s=OBSERVED_LIMIT_S, reply=ObservedReply
        )

    async def code_differences(self, sums: Mapping[str, str]) -> dict[str, str]:
        """Return the modules whose source on the server's host differs from these checksums, with the reason for each.

        Raises:
            HttpError: the server did not answer.
        """
        request = SameCodeRequest(dict(sums))
        reply = await self._http.call(
            "POST", f"{self._url}/same_code", request, timeout_s=_COMPARING_S, reply=SameCodeReply
        )
        return reply.differences


def source_failed(error: Exception) -> bool:
    """True if the source of a folder caused the error that `StagingClient.stage` raised; False if the requested host
    did.
    """
    return isinstance(error, HttpRefused) and error.status == SOURCE_FAILED


def reason_of(error: HttpRefused) -> str:
    """Return the reason that the staging server gives in its refusal."""
    try:
        return str(msgspec.json.decode(error.body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return str(error)
