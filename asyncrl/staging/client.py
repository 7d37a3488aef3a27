"""A client of one staging server."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from asyncrl.comm.http.calls import HttpRefused, JsonHttp
from asyncrl.staging.messages import (
    ObservedReply,
    ObservedRequest,
    SameCodeReply,
    SameCodeRequest,
    StageReply,
    StageRequest,
)

HOLD_S = 10.0
"""Longest time in seconds that a server holds a request for a folder that is being fetched."""
_MARGIN_S = 10.0
_COMPARING_S = 60.0
OBSERVED_LIMIT_S = 10.0
SOURCE_FAILED = HTTPStatus.BAD_GATEWAY
"""Status of a reply if the source failed, not the requested host."""


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
