"""A server that somebody else started, and the wait for one that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from asyncrl.comm.http_client import HttpError, HttpRefused
from asyncrl.comm.security import HttpSecurity
from asyncrl.inference.client import connect
from asyncrl.inference.process import BASE_VERSION, EngineStartError, ServedEngine
from asyncrl.runtime.process.starting import LONGEST_STARTS

_READY_POLL_S, _LAST_READY_POLL_S = 0.2, 2.0
"""First and last interval of the readiness check, in s. It grows, so that answering the check does not count as
progress.
"""
_REQUEST_TIMEOUT_S = 5.0


class AdoptedHost:
    """A server that somebody else started; it outlives the run. It gets no token, as it is not the run's.

    Args:
        url: the server's address.
        model_dir: the initial model, at a path that the server can read. The server loads it unless it already serves
            this model under label "0". None: the server keeps its own model, under any label.
        security: has `url` among the adopted ones; None if the run has no secret.
        timeout_s: limit in seconds for the server to answer and load.
    """

    def __init__(self, url: str, *, model_dir: Path | None, security: HttpSecurity | None, timeout_s: float) -> None:
        self.shortage: tuple[str, str] | None = None
        self._url = url.rstrip("/")
        self._model_dir, self._security, self._timeout_s = model_dir, security, timeout_s

    async def start(self) -> ServedEngine:
        """Wait for the server and give it the initial model, unless it keeps its own.

        Raises:
            EngineStartError: it does not answer in time, asks for a token, or cannot load the model.
        """
        await wait_ready(self._url, self._security, self._timeout_s)
        keeps, wanted = self._model_dir is None, (BASE_VERSION, str(self._model_dir))
        try:
            async with connect(self._url, self._security) as client:
                info = await client.model_info()
                if not keeps and (info.weight_version, info.model_path) != wanted:
                    await client.update_weights(
                        str(self._model_dir), int(BASE_VERSION), abort_all=True, timeout_s=self._timeout_s
                    )
        except HttpError as error:
            if isinstance(error, HttpRefused) and error.status == HTTPStatus.UNAUTHORIZED:
                raise EngineStartError(
                    f"adopted server {self._url} asks for a token, and the run's is not for it: start it without "
                    "--api-key"
                ) from error
            what = "say which model it serves" if keeps else "serve the initial model"
            raise EngineStartError(f"adopted server {self._url} does not {what}: {error}") from error
        return ServedEngine(self._url, None)

    async def failed(self) -> str:
        """Never return. The GserverManager watches the server's health, and uses the server again once it answers."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        """Do nothing: the server is not the run's."""


async def wait_ready(
    url: str, security: HttpSecurity | None, timeout_s: float, grew: Callable[[], bool] = lambda: False
) -> None:
    """Wait until the server at `url` takes requests.

    Args:
        grew: returns True if the server has made progress since the last call.

    Raises:
        EngineStartError: the server was not ready within `timeout_s` seconds after its last progress, or within
            `LONGEST_STARTS` times as long in all; the message has the result of the last attempt.
    """
    last, pause_s, now = "no reply", _READY_POLL_S, asyncio.get_running_loop().time
    longest = now() + LONGEST_STARTS * timeout_s
    try:
        async with asyncio.timeout(timeout_s) as limit, connect(url, security) as client:
            while True:
                try:
                    return await client.ready(timeout_s=_REQUEST_TIMEOUT_S)
                except HttpError as error:
                    last = str(error)
                if grew():
                    limit.reschedule(min(now() + timeout_s, longest))
                await asyncio.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LAST_READY_POLL_S)
    except TimeoutError:
        raise EngineStartError(
            f"server {url} made no progress towards being ready for generation.start_timeout_s={timeout_s:g}: {last}"
        ) from None
