"""A client of one staging server."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from asyncrl.comm.http.calls import HttpRefused, JsonHttp
from asyncrl.weights.staging.messages import (
    ObservedReply,
    ObservedRequest,
    SameCodeReply,
    SameCodeRequest,
    StageReply,
    StageRequest,
)

HOLD_S = 10.0
"""Longest time in seconds that a server holds a request for a folder that is on its way."""
_MARGIN_S = 10.0
_COMPARING_S = 60.0
OBSERVED_LIMIT_S = 10.0
SOURCE_FAILED = HTTPStatus.BAD_GATEWAY
"""The status of an answer that it was not this host's fault."""


class StagingClient:
    """Calls of the staging server at `url`."""

    def __init__(self, http: JsonHttp, url: str) -> None:
        self._http, self._url = http, url.rstrip("/")

    async def stage(self, request: StageRequest) -> StageReply:
        """Return once the folder is there, however long that takes: a fetch ends by itself when nothing comes any more.

        Raises:
            HttpError: it is not; `source_failed` says whose fault that was.
        """
        while True:
            reply = await self._http.call(
                "POST", f"{self._url}/stage", request, timeout_s=HOLD_S + _MARGIN_S, reply=StageReply
            )
            if reply.done:
                return reply

    async def observed(self, request: ObservedRequest) -> ObservedReply:
        """Have lines of `observed/` appended on that host, the launcher's.

        Raises:
            HttpError: they were not.
        """
        return await self._http.call(
            "POST", f"{self._url}/observed", request, timeout_s=OBSERVED_LIMIT_S, reply=ObservedReply
        )

    async def code_differences(self, sums: Mapping[str, str]) -> dict[str, str]:
        """Return the modules whose source on that host differs from these checksums, with the reason for each.

        Raises:
            HttpError: it does not say.
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
    """Return the staging server's own words from its refusal."""
    try:
        return str(msgspec.json.decode(error.body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return str(error)
